"""Hugging Face models by configuration, with random weights: their graphs compute what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from torch_lms.profile import ProfileConfig, profile, trace

transformers = pytest.importorskip("transformers")
QUICK = ProfileConfig(warmup_runs=0, timed_runs=1, progress=False)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
IDS = torch.randint(3, 100, (2, 16), generator=torch.Generator().manual_seed(0))
LABELS = IDS.flip(1)
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def build(name: str) -> tuple[Any, Mapping[str, torch.Tensor]]:
    hf = transformers
    text = {"input_ids": IDS, "labels": LABELS}
    if name == "llama":
        config = hf.LlamaConfig(vocab_size=100, num_key_value_heads=2, tie_word_embeddings=True, **SMALL)
        return hf.LlamaForCausalLM(config), text
    if name == "gpt2":
        config = hf.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
        return hf.GPT2LMHeadModel(config), text
    if name == "t5":
        sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        return hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **sizes)), text
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(vocab_size=100, **SMALL)), {**text, "attention_mask": (IDS > 5).long()}
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=8, **SMALL)), {"pixel_values": IMAGES}


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert", "vit"])
def test_graph_computes_what_the_model_computes(name: str) -> None:
    torch.manual_seed(0)
    model, kwargs = build(name)
    model.eval()
    traced = trace(model, (), kwargs, sources=("symbolic", "export"))
    assert traced.graph_module is not None
    other = {key: value.flip(0) for key, value in kwargs.items()}
    found, expected = traced.graph_module(*traced.arguments((), other)), model(**other)
    assert type(found) is type(expected)
    assert torch.equal(found.logits, expected.logits)
    own = dict(model.named_parameters())
    for key, parameter in traced.graph_module.named_parameters():
        assert parameter is own[key]


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert", "vit"])
def test_profile_is_at_operator_level_and_counts_all_parameters(name: str) -> None:
    model, kwargs = build(name)
    found = profile(model.train(), config=QUICK, **kwargs)
    assert found.level == "operator"
    assert set(found.parameter_bytes) == {key for key, _ in model.named_parameters()}
    used = {key for node in found.nodes for key in node.parameters}
    assert used == set(found.parameter_bytes)
    assert found.saved_bytes > 0
    assert bool(found.tied) == (name != "vit")


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_models_on_the_meta_device_have_sizes(name: str) -> None:
    with torch.device("meta"):
        model, kwargs = build(name)
    found = profile(model, config=QUICK, **kwargs)
    assert not found.timed
    assert found.level == "operator"
    assert found.saved_bytes > 0


def test_causal_attention_stays_without_a_mask() -> None:
    model, kwargs = build("llama")
    traced = trace(model, (), kwargs)
    assert traced.graph_module is not None
    attention = [node for node in traced.graph_module.graph.nodes if "scaled_dot_product" in node.name]
    assert len([node for node in attention if node.target is torch.ops.aten.scaled_dot_product_attention.default]) == 2
    assert all(node.args[3] is None and node.args[5] is True for node in attention)


def test_configuration_is_as_it_was() -> None:
    masks = transformers.masking_utils
    before = (masks.is_tracing, masks.find_packed_sequence_indices)
    model, kwargs = build("llama")
    trace(model, (), kwargs)
    assert model.config.use_cache is True
    assert (masks.is_tracing, masks.find_packed_sequence_indices) == before


def test_checkpointing_is_off_while_profiled() -> None:
    model, kwargs = build("llama")
    plain = profile(model.train(), config=QUICK, **kwargs)
    model.gradient_checkpointing_enable()
    found = profile(model, config=QUICK, **kwargs)
    assert found.saved_bytes == plain.saved_bytes
    assert any("checkpointing is off" in note for note in found.notes)
    assert model.is_gradient_checkpointing


def test_a_cache_that_is_asked_for_stays() -> None:
    model, kwargs = build("gpt2")
    assert not any("use_cache" in note for note in trace(model, (), {**kwargs, "use_cache": False}).notes)
