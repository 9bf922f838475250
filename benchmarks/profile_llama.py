"""How long profiling and cutting a Llama of 1.2 billion parameters take, and what its nodes' times sum up to."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

from benchmarks.results import Result
from torch_lms.balanced import plan_balanced_partition
from torch_lms.profile import Profile, ProfileConfig, profile

MAX_SECONDS = 90.0
MAX_CUT_SECONDS = {"profiled": 30.0, "from the meta device": 5.0}
STAGES = 4
MAX_ERROR = 0.05
COLUMNS = [
    ("model", "Model", "{}"),
    ("tokens", "Tokens", "{}"),
    ("nodes", "Nodes", "{}"),
    ("seconds", "Profiling (s)", "{:.1f}"),
    ("cut_seconds", "All up to the cut (s)", "{:.1f}"),
    ("forward_ms", "Forward, sum (ms)", "{:.2f}"),
    ("backward_ms", "Backward, sum (ms)", "{:.2f}"),
    ("step_ms", "Whole step (ms)", "{:.2f}"),
    ("error", "Sum / step - 1", "{:+.3f}"),
    ("saved_gib", "Kept for backward (GiB)", "{:.2f}"),
]
SHAPE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}


def build(layers: int, dtype: torch.dtype, device: str) -> nn.Module:
    """The shape of Llama 3.2 1B with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found, import-untyped, unused-ignore]

    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}, dtype=dtype)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype).train()


def run(given: argparse.Namespace, pieces: bool | None) -> tuple[Profile, float]:
    """Profiles once; returns the profile and the seconds that it took."""
    model = build(given.layers, getattr(torch, given.dtype), "cpu" if pieces else given.device)
    ids = torch.randint(SHAPE["vocab_size"], (given.batch, given.tokens), device="cpu" if pieces else given.device)
    config = ProfileConfig(timed_runs=given.runs, pieces=pieces, device=given.device)
    start = time.perf_counter()
    found = profile(model, input_ids=ids, labels=ids, config=config, optimizer=torch.optim.AdamW)
    return found, time.perf_counter() - start


def cut(given: argparse.Namespace, device: str) -> float:
    """Plans stages for ranks of their own; returns the seconds that it took, from the model to the cut."""
    model = build(given.layers, getattr(torch, given.dtype), device)
    ids = torch.zeros((given.batch, given.tokens), dtype=torch.int64, device=device)
    places = [f"rank:{rank}/{given.device}" for rank in range(STAGES)]
    start = time.perf_counter()
    plan_balanced_partition(model, places, input_ids=ids, labels=ids, optimizer=torch.optim.AdamW)
    return time.perf_counter() - start


def main() -> None:
    """Profiles and cuts, checks the targets, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="benchmarks/results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--pieces", action="store_true", help="also node by node, from the host")
    parser.add_argument("--save", help="write the profile to this file")
    given = parser.parse_args()
    result = Result(name="profile_llama", title="Profiling Llama 1B", columns=COLUMNS)
    for pieces in [None, True] if given.pieces else [None]:
        found, seconds = run(given, pieces)
        error = (found.forward_us + found.backward_us) / found.node_scale / found.step_us - 1  # as measured
        result.add(
            model=f"Llama 1B's shape{', piece by piece' if pieces else ''}",
            tokens=given.batch * given.tokens,
            nodes=len(found.nodes),
            seconds=seconds,
            forward_ms=found.forward_us / found.node_scale / 1e3,
            backward_ms=found.backward_us / found.node_scale / 1e3,
            step_ms=found.step_us / 1e3,
            error=error,
            saved_gib=found.saved_bytes / 2**30,
        )
        print("\n".join([*found.notes, *map(str, found.links)]), flush=True)
        if not pieces:
            result.check("profiling takes", f"{MAX_SECONDS:.0f} s", round(seconds, 1), ok=seconds <= MAX_SECONDS)
            result.check("sum of nodes over step, less 1", "5 %", round(error, 4), ok=abs(error) <= MAX_ERROR)
            if given.save:
                found.save(given.save)
    for (how, most), device in zip(MAX_CUT_SECONDS.items(), (given.device, "meta"), strict=True):
        seconds = cut(given, device)
        result.add(model=f"Llama 1B's shape, cut in {STAGES}, {how}", cut_seconds=seconds)
        result.check(f"cutting, {how}, takes", f"{most:.0f} s", round(seconds, 1), ok=seconds <= most)
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
