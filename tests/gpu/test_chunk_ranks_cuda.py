"""A model spread over GPUs trains as one process with all gradients would, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.pipeline.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    "scenarios",
    [
        "spread_models:mlp+checkpointed+on_the_host",
        "spread_models:backwards+optimizers+normed",
        "spread_models:routed+adapted+checkpointing+clipping+tests.chunk.spread_running:memory",
        "spread_uses:ends_early+odd_uses",
    ],
)
def test_two_ranks(scenarios: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LMS_TEST_DEVICE", "cuda")
    for rank, ended in enumerate(run_ranks(f"tests.chunk.{scenarios}", 2, tmp_path, timeout_s=180)):
        assert ended.status == 0, f"rank {rank} of {scenarios}:\n{ended.output[-4000:]}"
