"""Ops that need several times their inputs while they run: a plan has room for them also where it runs them again."""

from __future__ import annotations

import torch

import torch_lms
from benchmarks.unet3d import UNet3d
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.planned_programs import wait_for_planner
from torch_lms._core import core

CHANNELS, VOXELS, BATCH = 8, 32**3, 4
FINEST_BYTES = 4 * BATCH * CHANNELS * VOXELS
STEPS = 8


def shares_of_planned_steps() -> list[float]:
    """Of a U-Net, whose largest convolution needs nine times its finest level's features; the host holds fourteen."""
    torch.manual_seed(0)
    model = UNet3d((CHANNELS, 2 * CHANNELS, 4 * CHANNELS))
    volumes = torch.randn(BATCH, 4, 32, 32, 32)
    labels = (torch.rand(BATCH, 3, 32, 32, 32) < 0.1).float()

    def step() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        loss = model(volumes, labels)
        loss.backward()
        return [
            loss.detach(),
            *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
        ]

    expected = step()
    torch_lms.swap.count_cpu_allocations()
    torch_lms.enable({"cpu": 9 * FINEST_BYTES}, min_bytes=1 << 16, host_limit=14 * FINEST_BYTES)
    shares = []
    for _ in range(STEPS):
        assert all(map(torch.equal, step(), expected))
        shares.append(core.share_in_step())
        wait_for_planner()
    return shares


@counts_exactly
def test_a_plan_has_room_for_ops_that_are_run_again() -> None:
    shares = in_fresh_process(shares_of_planned_steps)
    assert shares[-1] > 0.9
