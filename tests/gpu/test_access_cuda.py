"""The unit tests' table of kinds of access, on CUDA tensors; transfers in the profiler; chaos mode."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import torch_lms
from tests.unit.access_kinds import OP_KINDS, AccessKind, skip_what_nothing_tells_of
from tests.unit.paging_states import STATES, Place, round_trip, snapshot
from tests.unit.program_access_kinds import PROGRAM_KINDS
from tests.unit.raw_access_kinds import RAW_KINDS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

KINDS = [kind for kind in OP_KINDS + RAW_KINDS + PROGRAM_KINDS if not kind.cpu_only]


def seen(kind: AccessKind, place: Place, *, again: bool) -> Any:
    """What an access returns and leaves behind; also after its tensors have gone out and come back."""
    torch.manual_seed(0)
    tensors = kind.make("cuda")
    place(tensors)
    result = kind.access(*tensors)
    at_once = snapshot((result, tensors))
    if again:
        refused = round_trip(tensors)
        assert kind.pins == (refused > 0), f"{refused} storages refused to be paged out"
    return at_once, snapshot((result, tensors))


@functools.cache
def seen_plain(name: str) -> Any:
    return seen(next(kind for kind in KINDS if kind.name == name), STATES["plain"], again=False)


@pytest.mark.parametrize("state", [state for state in STATES if state != "plain"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_access_in_every_state_is_bit_equal(kind: AccessKind, state: str, paged: ModuleType) -> None:
    skip_what_nothing_tells_of(kind.name, state)
    assert seen(kind, STATES[state], again=True) == seen_plain(kind.name)


def test_transfers_show_in_the_profiler() -> None:
    tensor = torch.ones(1 << 22, device="cuda")
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


# What a stream has made comes back on that stream, after what it is made from, which others use, too.
STREAMS_PROGRAM = """
import json, torch
side, main = torch.cuda.Stream(), torch.cuda.current_stream()
small = torch.zeros(1, device="cuda")
sums = []
for i in range(40):
    one = torch.full((1 << 24,), float(i), device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        other = one * 2
        last = other + 1
    main.wait_stream(side)
    for _ in range(8):
        small.add_(1)  # whatever goes out, does so here
    sums += [last.sum().item(), other.max().item(), one.min().item()]
    last.record_stream(main)
    del one, other, last
print(json.dumps(sums))
"""


@pytest.mark.parametrize("body", [CHAOS_PROGRAM, STREAMS_PROGRAM], ids=["training", "streams"])
def test_chaos_changes_no_result(body: str) -> None:
    def results(**environment: str) -> Any:
        program = "import torch_lms\n" + body
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return json.loads(done.stdout.splitlines()[-1])

    assert results() == results(TORCH_LMS_CHAOS="1", TORCH_LMS_CHAOS_PERIOD="3")
