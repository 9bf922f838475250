"""Device memory and its owners: what is given back, what is refused, streams, threads, and no room."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from types import ModuleType

import pytest
import torch

import torch_lms
from torch_lms.errors import PageoutError
from torch_lms.swap import state
from torch_lms.swap.link import measure_link

MIB = 1 << 20
A_WHILE_CYCLES = 5_000_000  # some milliseconds
LONG_CYCLES = 1_000_000_000  # half a second


def filled(mib: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((mib * MIB // 4,), value, dtype=torch.float32, device="cuda")


def extremes(tensor: torch.Tensor) -> tuple[float, float]:
    """The least and the largest element, for which little memory is needed."""
    return tensor.min().item(), tensor.max().item()


def page_out(*tensors: torch.Tensor) -> None:
    torch_lms.pageout(*tensors)
    torch_lms.wait()


@pytest.fixture
def observed(paged: ModuleType) -> torch.Tensor:
    """Something is out, so that ops, and the streams they use, are seen."""
    tensor = filled(1)
    page_out(tensor)
    return tensor


def test_the_link_is_measured_each_way_alone_and_both_at_once() -> None:
    link = measure_link("cuda")
    assert min(link.out_bytes_per_us, link.in_bytes_per_us) > 1e3  # a tenth of what the slowest of these links does
    assert 0.4 < link.share_beside <= 1.0  # less than half would be slower than one after the other


# --- what is given back -------------------------------------------------------------------------------


def test_pageout_gives_device_memory_back_and_pagein_takes_it(paged: ModuleType, cleaned: None) -> None:
    tensor = filled(64)
    before = torch.cuda.memory_allocated()
    page_out(tensor)
    assert torch.cuda.memory_allocated() == before - 64 * MIB
    assert state(tensor) == "paged_out"
    assert tensor.device.type == "cuda"
    assert tensor.sum().item() == 16 * MIB
    assert state(tensor) == "resident"
    assert torch.cuda.memory_allocated() >= before


def test_pageout_through_any_view_gives_the_whole_storage_back(paged: ModuleType, cleaned: None) -> None:
    tensor = filled(64)
    view = tensor.view(-1, 1024)[3:5].t()
    before_bytes = torch.cuda.memory_allocated()
    page_out(view)
    assert torch.cuda.memory_allocated() == before_bytes - 64 * MIB
    assert state(tensor) == state(view) == "paged_out"
    view.mul_(3)
    assert state(tensor) == "resident"
    assert tensor.eq(3).sum().item() == view.numel()
    assert tensor.eq(1).sum().item() == tensor.numel() - view.numel()


def test_host_memory_of_a_dead_paged_out_tensor_is_used_again(paged: ModuleType) -> None:
    host_bytes = []
    for _ in range(10):  # 2.5 GiB, where slabs are of 1 GiB
        tensor = filled(256)
        page_out(tensor)
        host_bytes.append(torch_lms.stats().host_bytes)
        del tensor
    assert host_bytes[-1] <= host_bytes[1]
    assert torch_lms.stats().paged_out_bytes == 0


def test_more_than_the_device_holds_fits_in_turns(paged: ModuleType, little_memory: None) -> None:
    before_bytes = torch.cuda.memory_allocated()
    tensors = []
    for value in range(24):  # 3 GiB where there are 2
        tensors.append(filled(128, value))
        page_out(tensors[-1])
    assert torch.cuda.memory_allocated() == before_bytes
    for value, tensor in enumerate(tensors):
        assert extremes(tensor) == (value, value)
        page_out(tensor)


# --- streams and threads ------------------------------------------------------------------------------


@pytest.mark.parametrize("watched", [True, False])
def test_pageout_waits_for_a_stream_that_still_writes(watched: bool, paged: ModuleType) -> None:
    other = filled(1)
    if watched:
        page_out(other)  # something is out: ops, and the streams they use, are seen
    side = torch.cuda.Stream()
    for value in range(5):
        tensor = filled(16, value)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(A_WHILE_CYCLES)
            tensor.add_(1)
        page_out(tensor)
        torch.cuda.current_stream().wait_stream(side)
        assert tensor.eq(value + 1).all()
        torch_lms.wait()  # where nothing else is out, ops are no longer observed


def test_pagein_is_ordered_before_its_first_use_on_another_stream(paged: ModuleType) -> None:
    side = torch.cuda.Stream()
    for value in range(20):
        tensor = filled(16, value)
        page_out(tensor)
        torch_lms.prefetch(tensor)
        with torch.cuda.stream(side):
            doubled = tensor * 2
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(doubled, torch.full_like(doubled, 2 * value))


def test_a_pagein_waits_for_nothing_that_other_streams_do(paged: ModuleType) -> None:
    tensor = filled(16, 5)
    page_out(tensor)
    with torch.cuda.stream(torch.cuda.Stream()):
        filled(1)  # the stream is noted
        torch.cuda._sleep(LONG_CYCLES)
        asleep = torch.cuda.Event()
        asleep.record()
    assert extremes(tensor) == (5, 5)
    assert not asleep.query()


def test_memory_of_a_called_off_pageout_may_be_reused_at_once(paged: ModuleType) -> None:
    for value in range(20):
        tensor = filled(64, value)
        torch_lms.pageout(tensor)
        kept = tensor[:1024].clone()  # calls the page-out off
        del tensor
        other = filled(64, -1)
        assert kept.eq(value).all()
        assert other.eq(-1).all()
    torch_lms.wait()


def test_memory_of_a_pageout_is_not_reused_while_a_stream_still_reads_it(observed: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    for value in range(5):
        tensor = filled(16, value)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(A_WHILE_CYCLES)
            doubled = tensor * 2
        page_out(tensor)
        other = filled(16, -1)
        torch.cuda.current_stream().wait_stream(side)
        assert doubled.eq(2 * value).all()
        assert other.eq(-1).all()


def test_record_stream_of_a_paged_out_tensor_holds_its_memory(paged: ModuleType) -> None:
    side = torch.cuda.Stream()
    for value in range(5):
        tensor = filled(16, value)
        page_out(tensor)
        tensor.record_stream(side)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(A_WHILE_CYCLES)
            doubled = tensor * 2
        del tensor
        other = filled(16, -1)
        torch.cuda.current_stream().wait_stream(side)
        assert doubled.eq(2 * value).all()
        assert other.eq(-1).all()


def test_host_memory_is_not_reused_while_its_pagein_is_under_way(paged: ModuleType) -> None:
    for value in range(10):
        tensor, other = filled(64, value), filled(64, -1)
        page_out(tensor)
        doubled = tensor * 2  # its page-in is only submitted
        page_out(other)  # wants host memory
        assert doubled.eq(2 * value).all()
        assert other.eq(-1).all()


def test_non_blocking_copies_of_paged_out_tensors_are_right(paged: ModuleType) -> None:
    tensor, host = filled(16, 3), torch.zeros(4 * MIB, pin_memory=True)
    page_out(tensor)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()
    assert host.eq(3).all()
    page_out(tensor)
    tensor.copy_(host.fill_(5), non_blocking=True)
    page_out(tensor)
    assert tensor.cpu().eq(5).all()


def test_threads_with_streams_of_their_own_page_what_others_use(observed: torch.Tensor) -> None:
    tensors = [filled(8, value) for value in range(8)]
    torch.cuda.synchronize()
    found: list[tuple[int, float]] = []

    def compute(seed: int) -> None:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
        with torch.cuda.stream(torch.cuda.Stream()):
            for value in order * 10:
                found.append((value, tensors[value].max().item()))
                with contextlib.suppress(PageoutError):  # another thread's op uses it just now
                    torch_lms.pageout(tensors[(value + 1) % 8])

    threads = [threading.Thread(target=compute, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 80
    assert all(expected == value for expected, value in found)


# --- what is refused ----------------------------------------------------------------------------------


def test_dlpack_pins_the_storage_where_it_is(paged: ModuleType) -> None:
    tensor = filled(4)
    page_out(tensor)
    alias = torch.from_dlpack(tensor)
    with pytest.raises(PageoutError, match=r"expected .* found"):
        torch_lms.pageout(tensor)
    tensor.add_(1)
    assert alias.eq(2).all()


def test_an_address_for_cupy_or_numba_pins_the_storage_where_it_is(paged: ModuleType) -> None:
    tensor = filled(4)
    page_out(tensor)
    address = tensor.__cuda_array_interface__["data"][0]
    with pytest.raises(PageoutError, match=r"expected .* found"):
        torch_lms.pageout(tensor)
    assert tensor.add_(1).data_ptr() == address


def test_numpy_of_a_copy_on_the_host_leaves_the_device_tensor_free_to_move(paged: ModuleType) -> None:
    tensor = filled(4, 3)
    page_out(tensor)
    array = tensor.cpu().numpy()
    page_out(tensor)
    assert state(tensor) == "paged_out"
    assert (array == 3).all()


def test_pinned_storage_stays_until_it_is_unpinned(paged: ModuleType) -> None:
    tensor = filled(4)
    page_out(tensor)
    torch_lms.pin(tensor)
    address = tensor.data_ptr()
    with pytest.raises(PageoutError):
        torch_lms.pageout(tensor)
    assert tensor.data_ptr() == address
    torch_lms.swap.unpin(tensor)
    page_out(tensor)
    assert tensor.eq(1).all()


def test_pinned_host_memory_is_refused(paged: ModuleType) -> None:
    with pytest.raises(PageoutError, match="found"):
        torch_lms.pageout(torch.zeros(MIB, pin_memory=True))


# --- no room ------------------------------------------------------------------------------------------


def fill_the_device() -> list[torch.Tensor]:
    """Leaves a hole of 128 MiB."""
    fillers: list[torch.Tensor] = []
    with pytest.raises(torch.OutOfMemoryError):
        fillers.extend(filled(128) for _ in range(32))
    fillers.pop()
    return fillers


@pytest.mark.filterwarnings("ignore:torch_lms:UserWarning")
def test_pagein_without_room_is_served_by_the_host_and_nothing_is_lost(paged: ModuleType, little_memory: None) -> None:
    tensor = filled(512, 2)
    page_out(tensor)
    fillers = fill_the_device()
    served = torch_lms.stats().host_served
    assert extremes(tensor) == (2, 2)
    tensor.add_(1)
    assert torch_lms.stats().host_served > served
    assert state(tensor) == "paged_out"
    del fillers
    assert extremes(tensor) == (3, 3)
    assert state(tensor) == "resident"


@pytest.mark.filterwarnings("ignore:torch_lms:UserWarning")
def test_prefetch_without_room_is_forgotten(paged: ModuleType, little_memory: None) -> None:
    tensor = filled(512, 2)
    page_out(tensor)
    fillers = fill_the_device()
    torch_lms.prefetch(tensor)
    torch_lms.wait()
    assert state(tensor) == "paged_out"
    del fillers
    torch_lms.prefetch(tensor)
    torch_lms.wait()
    assert state(tensor) == "resident"
    assert tensor.eq(2).all()


def test_storages_beyond_the_limit_take_turns(paged: ModuleType, cleaned: None) -> None:
    torch_lms.enable("1GiB")
    tensors = [filled(128, value) for value in range(24)]
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        for value, tensor in enumerate(tensors):
            assert tensor.max().item() == value
    assert torch.cuda.max_memory_allocated() <= 1 << 30
    assert torch.cuda.max_memory_reserved() <= 1 << 30
    assert torch_lms.stats().pageouts > 0
    del tensors, tensor


def test_storages_move_aside_for_a_large_one_although_two_streams_use_them(paged: ModuleType, cleaned: None) -> None:
    """Updates on streams of their own once had whatever lay in the way paged out in each step."""
    torch_lms.enable("512MiB")
    side = torch.cuda.Stream()
    tensors = [filled(32, value) for value in range(14)]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(A_WHILE_CYCLES)
        for tensor in tensors:
            tensor.add_(1)
    del tensors[::2], tensor  # holes of 32 MiB
    torch.cuda.current_stream().wait_stream(side)
    before = torch_lms.stats().pageouts
    large = filled(128, -1)  # for which two have to go elsewhere
    assert torch_lms.stats().pageouts == before
    with torch.cuda.stream(side):
        found = [extremes(one) for one in tensors]
    assert found == [(value + 1, value + 1) for value in range(1, 14, 2)]
    assert extremes(large) == (-1, -1)


def test_storages_move_aside_while_the_device_is_busy(paged: ModuleType, cleaned: None) -> None:
    """Blocks that were tried, and let go of, once counted as used on every stream: the host waited for all of them."""
    torch_lms.enable("512MiB")
    side = torch.cuda.Stream()
    tensors = [filled(32, value) for value in range(14)]
    with torch.cuda.stream(side):
        filled(1)  # another stream is noted
    del tensors[::2]  # holes of 32 MiB
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    asleep = torch.cuda.Event()
    asleep.record()
    large = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    assert not asleep.query()
    assert [extremes(one) for one in tensors] == [(value, value) for value in range(1, 14, 2)]
    assert large.fill_(3).min().item() == 3


def test_a_prefetch_does_not_ask_for_a_piece_that_an_op_has_just_taken(paged: ModuleType, cleaned: None) -> None:
    """It once took it for free, and the allocator waited for the device to give all free memory back to the driver."""
    torch_lms.enable("512MiB")
    away = filled(128, 5)
    page_out(away)
    tensors = [filled(32, value) for value in range(14)]
    del tensors[::2]  # holes of 32 MiB
    large = filled(128, -1)  # for which two have to go elsewhere
    before = torch.cuda.memory_stats()["num_device_free"]
    torch_lms.prefetch(away)
    torch_lms.wait()
    assert torch.cuda.memory_stats()["num_device_free"] == before
    assert extremes(away) == (5, 5)
    assert extremes(large) == (-1, -1)
    assert [extremes(one) for one in tensors] == [(value, value) for value in range(1, 14, 2)]


def test_op_larger_than_the_limit_raises_and_the_next_one_works(paged: ModuleType, cleaned: None) -> None:
    torch_lms.enable("256MiB")
    with pytest.raises(torch.OutOfMemoryError):
        filled(512)
    assert filled(64).sum().item() == 16 * MIB


def test_small_blocks_find_pages_among_scattered_large_ones(paged: ModuleType, cleaned: None) -> None:
    """What is needed last lies far apart, and none of it holds a whole page of the allocator."""
    torch_lms.enable("1GiB")
    large = [filled(21, value) for value in range(46)]
    torch.manual_seed(0)
    for place in torch.randperm(len(large)).tolist():
        assert large[place][0].item() == place
    small = [torch.full((160 << 10,), float(value), device="cuda") for value in range(400)]
    assert torch.cuda.max_memory_reserved() <= 1 << 30
    assert [tensor.max().item() for tensor in small] == list(range(400))
    assert [tensor.max().item() for tensor in large] == list(range(46))


def test_disable_brings_everything_back(paged: ModuleType, cleaned: None) -> None:
    torch_lms.enable("256MiB")
    tensors = [filled(64, value) for value in range(8)]
    assert torch_lms.stats().paged_out_bytes > 0
    torch_lms.disable()
    assert torch_lms.stats().paged_out_bytes == 0
    assert {state(tensor) for tensor in tensors} == {"resident"}
    assert [tensor.max().item() for tensor in tensors] == list(range(8))


def test_a_limit_below_what_is_held_already_lets_it_go_out(paged: ModuleType, cleaned: None) -> None:
    held = [filled(16, float(number)) for number in range(8)]
    limit_bytes = torch.cuda.memory_allocated() - 80 * MIB  # room for two of them, and a little more
    paged.enable(limit_bytes)
    assert [extremes(one + 1) for one in held] == [(number + 1.0, number + 1.0) for number in range(8)]
    assert torch.cuda.memory_allocated() <= limit_bytes
    assert paged.stats().limit_exceeded == 0


def test_a_limit_leaves_the_share_that_the_program_has_chosen(paged: ModuleType, little_memory: None) -> None:
    chosen = torch.cuda.get_per_process_memory_fraction()
    paged.enable("8GiB")  # more than the share
    assert torch.cuda.get_per_process_memory_fraction() == chosen
    paged.enable("512MiB")
    assert torch.cuda.get_per_process_memory_fraction() < chosen
    paged.disable()
    assert torch.cuda.get_per_process_memory_fraction() == chosen


LOOKED_AT = """
import torch
from torch_lms.swap.limits import parse_limits
torch.cuda.set_per_process_memory_fraction(0.5)
parse_limits({"cuda": "1GiB"})
"""


def test_a_program_that_only_looked_at_a_device_ends_well() -> None:
    subprocess.run([sys.executable, "-c", LOOKED_AT], check=True)


# --- last, since what it leaves may stay in the allocator ---------------------------------------------


def test_storage_of_a_private_pool_keeps_its_bytes(paged: ModuleType, cleaned: None) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = filled(4, 3)
    address = tensor.data_ptr()
    try:
        page_out(tensor)
    except PageoutError:
        assert tensor.data_ptr() == address
    assert tensor.eq(3).all()
