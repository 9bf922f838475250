"""Training under a limit, with all that PyTorch offers for it, against plain training: the same bits in less memory."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_lms
from tests.gpu.new_interpreters import NewInterpreters

# --- in this process: variants of one training -------------------------------------------------------

SHARE_OF_PEAK = 0.75


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the training differs from the simplest one."""

    optimizer: dict[str, Any]
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    checkpointed: bool = False
    scaled: bool = False


ONE_BY_ONE: dict[str, Any] = {"foreach": False}
VARIANTS = {
    "one_by_one": Variant(optimizer=ONE_BY_ONE),
    "foreach": Variant(optimizer={"foreach": True}),
    "fused": Variant(optimizer={"fused": True}),
    "autocast_and_scaler": Variant(
        optimizer=ONE_BY_ONE, scope=lambda: torch.autocast("cuda", torch.float16), scaled=True
    ),
    "checkpointed": Variant(optimizer=ONE_BY_ONE, checkpointed=True),
    "anomaly_detection": Variant(optimizer=ONE_BY_ONE, scope=lambda: torch.autograd.detect_anomaly(check_nan=True)),
}


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512))


def train(variant: Variant) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(block() for _ in range(4)).cuda()
    optimizer = torch.optim.AdamW(blocks.parameters(), **variant.optimizer)
    scaler = torch.amp.GradScaler("cuda", enabled=variant.scaled)
    batch = torch.randn(8192, 512, device="cuda")
    losses = []
    for _ in range(3):
        with variant.scope():
            x = batch
            for part in blocks:
                x = x + (checkpoint(part, x, use_reentrant=False) if variant.checkpointed else part(x))
            loss = x.float().square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in blocks.parameters()]


def measured(variant: Variant) -> tuple[list[float], list[torch.Tensor], int]:
    """A training and its peak, in an allocator without leftovers."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses, parameters = train(variant)
    return losses, parameters, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_training_under_a_limit_is_bit_equal(name: str, paged: ModuleType, cleaned: None) -> None:
    train(VARIANTS[name])  # libraries allocate their workspaces
    losses, parameters, peak_bytes = measured(VARIANTS[name])
    limit_bytes = int(SHARE_OF_PEAK * peak_bytes)
    torch_lms.enable(limit_bytes)
    limited_losses, limited_parameters, limited_peak_bytes = measured(VARIANTS[name])
    assert torch_lms.stats().pageouts > 0
    assert losses == limited_losses
    assert all(torch.equal(one, other) for one, other in zip(parameters, limited_parameters, strict=True))
    assert limited_peak_bytes <= limit_bytes


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_finds_a_nan_that_was_paged_out(paged: ModuleType) -> None:
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    with torch.autograd.detect_anomaly():
        root = (x * 1).sqrt()
        total = (root * 0).sum()
        torch_lms.pageout(root, x)
        torch_lms.wait()
        with pytest.raises(RuntimeError, match="returned nan values"):
            total.backward()


# --- the demo, in processes of its own ---------------------------------------------------------------

DEMOS = {
    "gpt": ["--layers=4", "--width=256", "--heads=4", "--tokens=256", "--batch=32"],
    # Deep enough that half of its memory holds the workspace of cuDNN's algorithm.
    "resnet": ["--layers=24", "--width=32", "--image-size=32", "--batch=128"],
}
SEGMENTS = {"expandable": {}, "fixed": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}}


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NewInterpreters, Path]]:
    """Each model with each kind of segments, at the same time: most of their time is PyTorch's import."""
    folder = tmp_path_factory.mktemp("demos")
    programs, environments = {}, {}
    for model, sizes in DEMOS.items():
        for kind, environment in SEGMENTS.items():
            name = f"{model}-{kind}"
            words = ["train", "--device=cuda", "--steps=3", "--limit=50%", f"--model={model}", *sizes]
            programs[name] = ["-m", "torch_lms", *words, f"--json={folder / name}.json"]
            environments[name] = environment
    with NewInterpreters(programs, environments) as started:
        yield started, folder


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("model", DEMOS)
def test_demo_in_half_of_its_memory_is_bit_equal(
    model: str, segments: str, demos: tuple[NewInterpreters, Path]
) -> None:
    started, folder = demos
    started.check(f"{model}-{segments}")
    document = json.loads((folder / f"{model}-{segments}.json").read_text())
    plain, limited = document["runs"]["plain"], document["runs"]["limited"]
    assert [step["loss"] for step in plain["steps"]] == [step["loss"] for step in limited["steps"]]
    assert plain["digests"] == limited["digests"]
    assert limited["peak_tensor_bytes"] <= document["limit_bytes"] <= plain["peak_tensor_bytes"] // 2
    assert limited["stats"]["pageouts"] > 0
