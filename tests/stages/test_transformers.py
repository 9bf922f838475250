"""Tiny models of transformers, by configuration: cut into stages, they give the model's loss and gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from torch_lms._torch_compat import has_export
from torch_lms.partition import CostGraph, CostModel, DeviceSpec, LinkSpec, PartitionProblem, partition
from torch_lms.profile.profiler import ProfileConfig, profile
from torch_lms.profile.tracing import TracedModel, trace
from torch_lms.stages.cutting import split
from torch_lms.stages.materialize import materialize
from torch_lms.stages.other_mode import OtherMode
from torch_lms.stages.running import run_stages
from torch_lms.stages.state_dicts import merge_state_dicts

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not has_export(), reason="this PyTorch has no torch.export")

QUICK = ProfileConfig(warmup_runs=0, timed_runs=1, progress=False)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "tie_word_embeddings": True}
IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS, "labels": IDS.flip(1)}
IMAGES = {
    "pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
    "labels": torch.tensor([0, 1]),
}


def build(name: str) -> tuple[Any, Mapping[str, torch.Tensor]]:
    hf = transformers
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), TEXT
    if name == "gpt2":
        config = hf.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
        return hf.GPT2LMHeadModel(config), TEXT
    if name == "t5":
        sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        return hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **sizes)), TEXT
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(vocab_size=100, **SMALL)), {**TEXT, "attention_mask": (IDS > 5).long()}
    if name == "qwen3-moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**GROUPED, **experts)), TEXT
    if name == "gemma2":
        return hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED)), TEXT
    config = hf.ViTConfig(image_size=16, patch_size=8, **SMALL)
    return hf.ViTForImageClassification(config), IMAGES


MODELS = ["llama", "gpt2", "t5", "bert", "vit", "qwen3-moe", "gemma2"]


@pytest.fixture(scope="module", params=MODELS)
def traced(request: pytest.FixtureRequest) -> Iterator[tuple[TracedModel, CostGraph, Mapping[str, torch.Tensor]]]:
    """A model that was traced, in both modes, and profiled once for all tests on it."""
    torch.manual_seed(0)
    model, kwargs = build(request.param)
    model.eval()  # without dropout
    found = trace(model, (), kwargs)
    other = OtherMode.of(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OtherMode, "of", lambda traced: other)
        yield found, CostGraph.from_profile(profile(found, config=QUICK, **kwargs)), kwargs


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_have_the_models_loss_and_gradients(traced: Any, stages: int) -> None:
    found, graph, kwargs = traced
    model = found.model
    expected = model(**kwargs, use_cache=False) if "input_ids" in kwargs else model(**kwargs)
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    devices = tuple(DeviceSpec(name=f"d{index}") for index in range(stages))
    problem = PartitionProblem(graph=graph, devices=devices, links=LinkSpec(bytes_per_us=1e3), cost_model=CostModel())
    made = split(found, partition(problem, "dp").stage_of, model=model)
    assert len(made) == stages
    output = run_stages(made, **kwargs)
    assert type(output) is type(expected)
    assert torch.equal(output.loss, expected.loss)
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, gradients[name]), name
    model.zero_grad(set_to_none=True)


def test_stages_on_their_own_have_tied_weights_in_each_and_merge(traced: Any) -> None:
    found, graph, kwargs = traced
    devices = tuple(DeviceSpec(name=f"d{index}") for index in range(2))
    made = split(
        found, partition(PartitionProblem(graph=graph, devices=devices), "uniform").stage_of, model=found.model
    )
    for stage in made:
        materialize(stage, "cpu")
    assert merge_state_dicts(made).keys() == found.model.state_dict().keys()
    assert torch.equal(run_stages(made, **kwargs).loss, found.model(**kwargs).loss)


@pytest.mark.parametrize("copied", [list, copy.deepcopy, lambda stages: pickle.loads(pickle.dumps(stages))])
def test_stages_run_on_another_device_than_that_of_the_trace(traced: Any, copied: Any) -> None:
    found, graph, kwargs = traced
    devices = tuple(DeviceSpec(name=f"d{index}") for index in range(2))
    cut = partition(PartitionProblem(graph=graph, devices=devices), "uniform").stage_of
    made = copied([materialize(stage, "meta") for stage in split(found, cut, model=found.model)])
    assert run_stages(made, **kwargs).loss.is_meta
    assert torch.equal(run_stages(split(found, cut, model=found.model), **kwargs).loss, found.model(**kwargs).loss)
