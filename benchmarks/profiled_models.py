"""Models of the transformers package from their configurations, profiled on the CPU: nothing is downloaded.

Their names have the sizes; Qwen3-MoE and Gemma 2 are smaller than what is published. Each takes a minute or so on two
cores.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.workloads import hugging_face
from torch_lms.profile import Profile, ProfileConfig, profile

__all__ = ["MODELS", "ProfiledModel", "profile_model"]

TOKENS = 128
CONFIG = ProfileConfig(warmup_runs=1, timed_runs=3, links=False, progress=False)
_DECODER: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
_SMOLLM: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}

# Class and configuration of each; the defaults of a configuration are those of a published model.
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "GPT-2 124M": ("GPT2 LMHeadModel", {}),
    "SmolLM 135M (Llama)": ("Llama ForCausalLM", _SMOLLM),
    "T5-small": ("T5 ForConditionalGeneration", {"decoder_start_token_id": 0}),
    "BERT-base": ("Bert ForMaskedLM", {}),
    "ViT-base": ("ViT ForImageClassification", {}),
    "Qwen3-MoE 118M": ("Qwen3Moe ForCausalLM", {**_DECODER, **_EXPERTS}),
    "Gemma 2 64M": ("Gemma2 ForCausalLM", {**_DECODER, "intermediate_size": 2048}),
}


@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    """What a profile found, and how long it took."""

    profile: Profile
    parameter_count: int
    profiling_s: float

    def facts(self) -> dict[str, Any]:
        """What its rows say of it."""
        return {
            "level": self.profile.level,
            "parameter_count": self.parameter_count,
            "nodes_us": self.profile.forward_us + self.profile.backward_us,
            "whole_step_us": self.profile.step_us,
            "timed_runs": self.profile.timed_runs,
            "profiling_s": self.profiling_s,
        }


def profile_model(name: str) -> ProfiledModel:
    """Traces and profiles one of `MODELS` in training, with its own loss, on one sample."""
    torch.manual_seed(0)
    model = hugging_face(*MODELS[name])
    begin = time.perf_counter()
    found = profile(model, config=CONFIG, **_sample(model))
    spent_s = time.perf_counter() - begin
    count = sum(value.numel() for value in model.parameters())
    return ProfiledModel(profile=found, parameter_count=count, profiling_s=spent_s)


def _sample(model: Any) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        side = model.config.image_size
        return {"pixel_values": torch.randn(1, 3, side, side), "labels": torch.zeros(1, dtype=torch.long)}
    ids = torch.randint(3, model.config.vocab_size, (1, TOKENS))
    return {"input_ids": ids, "labels": ids}
