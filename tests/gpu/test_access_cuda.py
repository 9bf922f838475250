from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

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


def test_pageout_gives_device_memory_back_and_pagein_takes_it() -> None:
    gc.collect()  # what other tests have left behind
    tensor = filled(64)
    before = torch.cuda.memory_allocated()
    torch_lms.pageout(tensor)
    torch_lms.wait()
    assert torch.cuda.memory_allocated() == before - 64 * MIB
    assert torch_lms.swap.state(tensor) == "paged_out"
    assert tensor.device.type == "cuda"
    assert tensor.sum().item() == 16 * MIB
    assert torch_lms.swap.state(tensor) == "resident"
    assert torch.cuda.memory_allocated() >= before


def test_pageout_waits_for_every_stream_that_uses_the_storage() -> None:
    side = torch.cuda.Stream()
    for _ in range(20):
        tensor = torch.zeros(4 * MIB, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(20):
                tensor.add_(1)
        torch_lms.pageout(tensor)
        torch_lms.wait()
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(tensor, torch.full_like(tensor, 20))


def test_pagein_is_ordered_before_its_first_use_on_another_stream() -> None:
    side = torch.cuda.Stream()
    for value in range(20):
        tensor = filled(16, value)
        torch_lms.pageout(tensor)
        torch_lms.wait()
        torch_lms.prefetch(tensor)
        with torch.cuda.stream(side):
            doubled = tensor * 2
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(doubled, torch.full_like(doubled, 2 * value))


def test_memory_of_a_called_off_pageout_may_be_reused_at_once() -> None:
    for value in range(20):
        tensor = filled(64, value)
        torch_lms.pageout(tensor)
        kept = tensor[:1024].clone()  # calls the page-out off
        del tensor
        other = filled(64, -1)
        assert kept.eq(value).all()
        assert other.eq(-1).all()
    torch_lms.wait()


def test_numpy_and_dlpack_pin_their_storage() -> None:
    tensor = filled(4)
    torch_lms.pageout(tensor)
    torch_lms.wait()
    alias = torch.from_dlpack(tensor)
    with pytest.raises(torch_lms.errors.PageoutError, match=r"expected .* found"):
        torch_lms.pageout(tensor)
    tensor.add_(1)
    assert alias.eq(2).all()


def test_pinned_host_and_private_pool_memory_is_refused() -> None:
    with pytest.raises(torch_lms.errors.PageoutError, match="found"):
        torch_lms.pageout(torch.zeros(MIB, pin_memory=True))


def test_graph_replays_right_while_other_storages_move(cleaned: None) -> None:
    torch_lms.enable("50%")
    try:
        static = filled(4)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            static.mul(2)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = static * 2
        other = filled(64, 3)
        torch_lms.pageout(other)
        torch_lms.wait()
        with pytest.raises(torch_lms.errors.PageoutError):
            torch_lms.pageout(static)
        static.fill_(5)
        graph.replay()
        assert doubled.eq(10).all()
        assert other.eq(3).all()
    finally:
        torch_lms.disable()


def test_compiled_function_reads_paged_out_inputs() -> None:
    pytest.importorskip("triton")
    function = torch.compile(lambda x, y: (x * y + 1).relu().sum(0))
    x, y = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    expected = function(x, y).clone()
    for _ in range(3):
        torch_lms.pageout(x, y)
        torch_lms.wait()
        assert torch.equal(function(x, y), expected)


def test_storages_beyond_the_device_take_turns_under_a_limit(little_memory: None) -> None:
    torch_lms.enable("1GiB")
    try:
        tensors = [filled(128, index) for index in range(24)]
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            for index, tensor in enumerate(tensors):
                assert tensor.max().item() == index
        assert torch.cuda.max_memory_allocated() <= 1 << 30
    finally:
        del tensors
        torch_lms.disable()


def test_op_larger_than_the_limit_raises_and_the_next_call_works(cleaned: None) -> None:
    torch_lms.enable("256MiB")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            filled(512)
        assert filled(64).sum().item() == 16 * MIB
    finally:
        torch_lms.disable()


def train(limit: str | None) -> tuple[list[float], list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)]
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(8192, 1024, device="cuda")
    if limit is not None:
        torch_lms.enable(limit)
    torch.cuda.reset_peak_memory_stats()
    losses = []
    try:
        for _ in range(4):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        peak = torch.cuda.max_memory_allocated()
    finally:
        torch_lms.disable()
    return losses, [parameter.detach().clone() for parameter in model.parameters()], peak


def test_training_under_half_of_the_memory_is_bit_equal(cleaned: None) -> None:
    losses, parameters, peak = train(None)
    gc.collect()
    torch.cuda.empty_cache()
    limited_losses, limited_parameters, limited_peak = train(str(peak // 2))
    assert losses == limited_losses
    assert all(torch.equal(one, other) for one, other in zip(parameters, limited_parameters, strict=True))
    assert limited_peak <= peak // 2


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


def test_no_room_for_a_pagein_is_served_by_the_host_and_nothing_is_lost(little_memory: None) -> None:
    tensor = filled(512, 2)
    torch_lms.pageout(tensor)
    torch_lms.wait()
    fillers = [filled(128) for _ in range(12)]
    with pytest.raises(torch.OutOfMemoryError):
        fillers.extend(filled(128) for _ in range(12))
    served = torch_lms.stats().host_served
    assert tensor[:1000].sum().item() == 2000
    assert torch_lms.stats().host_served > served
    assert torch_lms.swap.state(tensor) == "paged_out"
    del fillers
    gc.collect()
    assert tensor.sum().item() == 2 * tensor.numel()
    assert torch_lms.swap.state(tensor) == "resident"
