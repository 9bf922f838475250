"""Each kind of access, wherever the storage is; and what one sees of transfers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import torch_lms
from tests.access_driver import PLACES, check_access
from tests.access_kinds import CPU_ONLY, KINDS

MIB = 1 << 20


def filled(mib: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((mib * MIB // 4,), value, dtype=torch.float32, device="cuda")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [name for name in KINDS if name not in CPU_ONLY])
def test_access_is_bit_equal_wherever_the_storage_is(name: str, place: str) -> None:
    check_access(KINDS[name], place, "cuda")


def test_transfers_show_in_the_profiler() -> None:
    tensor = filled(16)
    with torch.profiler.profile() as profile:
        torch_lms.pageout(tensor)
        torch_lms.wait()
        tensor.add_(1)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert {"torch_lms::pageout", "torch_lms::passive_pagein"} <= names


CHAOS_PROGRAM = """
import json, torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
batch = torch.randn(512, 256, device="cuda")
losses = []
for _ in range(20):
    loss = model(batch).relu().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
"""


def test_chaos_does_not_change_a_training() -> None:
    def losses(**environment: str) -> Any:
        program = "import torch_lms\n" + CHAOS_PROGRAM
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return json.loads(done.stdout.splitlines()[-1])

    assert losses() == losses(TORCH_LMS_CHAOS="1", TORCH_LMS_CHAOS_PERIOD="3")
