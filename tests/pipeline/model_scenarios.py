"""Models of transformers, trained by ranks in one call; started by ``test_models_on_ranks``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_lms.pipeline import train

LENGTHS, MICROBATCHES = (8, 12), 2
optimize = partial(torch.optim.SGD, lr=0.1)


def models() -> Iterator[tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Each with a batch."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    ids = torch.randint(1, 64, (4, 8))
    text = {"input_ids": ids, "labels": ids}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    t5: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    t5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0, "use_cache": False}
    yield T5ForConditionalGeneration(T5Config(**t5)), text
    moe: dict[str, Any] = {"vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8}
    moe |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "use_cache": False}
    yield Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **moe)), text


def plain_step(model: nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> torch.Tensor:
    total = torch.zeros(())
    for number in range(MICROBATCHES):
        loss = model(**{name: value.chunk(MICROBATCHES)[number] for name, value in batch.items()}).loss / MICROBATCHES
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def models_train(rank: int, world: int) -> None:
    for model, batch in models():
        own = copy.deepcopy(model)
        optimizer = optimize(own.parameters())
        with train(model, None, batch, microbatches=MICROBATCHES, optimizer=optimize) as pipeline:
            for tokens in LENGTHS:
                one = {name: value.repeat(1, 2)[:, :tokens].contiguous() for name, value in batch.items()}
                loss, expected = pipeline.step(**one), plain_step(own, one, optimizer)
                if loss is not None:
                    torch.testing.assert_close(loss, expected)
            found = pipeline.state_dict(full=True)
            assert set(found) == set(own.state_dict())
            for name, value in own.state_dict().items():
                torch.testing.assert_close(found[name], value)
            evaluated = pipeline.evaluate(**batch)
            if evaluated is not None:
                with torch.no_grad():
                    torch.testing.assert_close(evaluated, own.eval()(**batch).loss, rtol=1e-4, atol=1e-4)
