"""The models of ``pipeline_gpt``: each on two or four large devices, and tiny for a CPU. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.workloads import hugging_face
from torch_lms.cli.models import GPT, GPTShape

__all__ = ["MODELS", "Shape"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model's sizes.

    Attributes:
        name: for tables.
        kind: class in transformers, as `hugging_face` takes it; empty for the GPT of the demo.
        config: its sizes.
        layers: name of the size that says how many blocks there are.
        vocabulary: name of the size that says how many tokens there are.
        rows: of a microbatch.
        tokens: of a row.
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    layers: str
    vocabulary: str
    rows: int
    tokens: int

    def make(self) -> nn.Module:
        """The model on the current default device, with random values."""
        if self.kind:
            model: nn.Module = hugging_face(self.kind, {**self.config, "use_cache": False})
            return model
        return GPT(GPTShape(**self.config, tokens=self.tokens))

    def batch(self, rows: int, seed: int) -> dict[str, torch.Tensor]:
        """The arguments of the model by name, on the CPU, the same wherever this is called."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, self.config[self.vocabulary], (rows, self.tokens), generator=generator)
        if self.kind:
            return {"input_ids": ids, "labels": ids}
        return {"ids_BT": ids, "next_ids_BT": ids.roll(-1, 1)}


_DECODER = {"layers": "num_hidden_layers", "vocabulary": "vocab_size"}
_TINY_DECODER = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA_3B = {
    "vocab_size": 128_256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# Experts and attention of Qwen3-30B-A3B, with fewer of both.
_QWEN_MOE = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
}
_T5 = {"decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0}
_T5_LARGE = {**_T5, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "vocab_size": 32_128}
_TINY_T5 = {**_T5, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1024}
_OWN = {"layers": "layers", "vocabulary": "vocabulary"}


def _shapes(
    kind: str, names: Mapping[str, str], large: tuple[str, Mapping[str, Any]], tiny: Mapping[str, Any], rows: int
) -> dict[str, Shape]:
    name, config = large
    return {
        "cuda": Shape(name=name, kind=kind, config=config, **names, rows=rows, tokens=2048),
        "cpu": Shape(name=f"tiny {name.split()[0]}", kind=kind, config=tiny, **names, rows=2, tokens=32),
    }


# By name, for each kind of device.
MODELS: dict[str, dict[str, Shape]] = {
    "gpt": _shapes(
        "",
        _OWN,
        ("GPT", {"layers": 24, "hidden": 2048, "heads": 16, "vocabulary": 128_256}),
        {"layers": 4, "hidden": 64, "heads": 4, "vocabulary": 1024},
        4,
    ),
    "gpt_deep": _shapes(
        "",
        _OWN,
        ("GPT, deep", {"layers": 48, "hidden": 1536, "heads": 12, "vocabulary": 32_000}),
        {"layers": 8, "hidden": 64, "heads": 4, "vocabulary": 1024},
        4,
    ),
    "llama": _shapes(
        "Llama ForCausalLM",
        _DECODER,
        ("Llama 3B, tied embeddings", {**_LLAMA_3B, "tie_word_embeddings": True}),
        {**_TINY_DECODER, "tie_word_embeddings": True},
        2,
    ),
    "qwen_moe": _shapes(
        "Qwen3Moe ForCausalLM", _DECODER, ("Qwen3-MoE", _QWEN_MOE), {**_TINY_DECODER, **_TINY_EXPERTS}, 2
    ),
    "t5": _shapes(
        "T5 ForConditionalGeneration",
        {"layers": "num_layers", "vocabulary": "vocab_size"},
        ("T5 large", _T5_LARGE),
        _TINY_T5,
        4,
    ),
}
