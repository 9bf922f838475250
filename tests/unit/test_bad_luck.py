"""No room on the host, no room on disk, no room at all: said in words, and everything goes on."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torch_lms
from tests.unit.error_messages import raises_saying
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from torch_lms._core import core
from torch_lms.errors import HostPoolFullError, SpillError
from torch_lms.swap import SwapEnv, is_enabled, pin, state, unpin

BLOCK_BYTES = 1 << 20
RAISE_HOST_LIMIT = "raise host_limit="
NAME_A_DIRECTORY = "name a directory that exists and can be written to with spill_dir="


def block(value: float = 1, blocks: int = 1) -> torch.Tensor:
    return torch.full((blocks * BLOCK_BYTES // 4,), float(value))


def paged_out(tensors: list[torch.Tensor]) -> int:
    return [state(tensor) for tensor in tensors].count("paged_out")


def round_trip(tensor: torch.Tensor) -> None:
    """Goes out and comes back whole; for a process of its own."""
    before = tensor.clone()
    torch_lms.pageout(tensor)
    torch_lms.wait()
    assert state(tensor) == "paged_out"
    assert torch.equal(tensor, before)


@pytest.fixture(autouse=True)
def host_limit_restored() -> Iterator[None]:
    pin(tensor := torch.ones(1))  # the device's pool exists from here on
    unpin(tensor)
    before = torch_lms.stats().host_limit_bytes
    yield
    SwapEnv(host_limit=before)


# --- the host's limit -------------------------------------------------------------------------------------


@counts_exactly
def test_what_finds_no_room_on_the_host_stays_and_wait_says_so_once(paged: ModuleType) -> None:
    tensors = [block(value) for value in range(6)]
    SwapEnv(host_limit=4 * BLOCK_BYTES)
    assert paged.pageout(tensors) == 6
    with raises_saying(HostPoolFullError, found=f"the limit of {4 * BLOCK_BYTES} bytes reached", do=RAISE_HOST_LIMIT):
        paged.wait()
    paged.wait()
    assert paged_out(tensors) == 4
    assert paged.stats().pageouts == 4
    assert all(torch.equal(tensor, block(value)) for value, tensor in enumerate(tensors))


@counts_exactly
def test_more_room_on_the_host_lets_the_rest_go_out(paged: ModuleType) -> None:
    tensors = [block(value) for value in range(6)]
    SwapEnv(host_limit=4 * BLOCK_BYTES)
    paged.pageout(tensors)
    with pytest.raises(HostPoolFullError):
        paged.wait()
    SwapEnv(host_limit=8 * BLOCK_BYTES)
    assert paged.pageout(tensors) == 2
    paged.wait()
    assert paged_out(tensors) == 6


@counts_exactly
def test_a_lower_host_limit_than_is_used_refuses_what_is_new_and_keeps_what_is_out(paged: ModuleType) -> None:
    tensors = [block(value) for value in range(4)]
    SwapEnv(host_limit=4 * BLOCK_BYTES)
    paged.pageout(tensors)
    paged.wait()
    torch_lms.enable({"cpu": "1GiB"}, host_limit=2 * BLOCK_BYTES)
    assert paged.stats().host_limit_bytes == 2 * BLOCK_BYTES
    assert paged_out(tensors) == 4
    more = block(9)
    paged.pageout(more)
    with pytest.raises(HostPoolFullError):
        paged.wait()
    assert all(torch.equal(tensor, block(value)) for value, tensor in enumerate(tensors))
    assert torch.equal(more, block(9))


@counts_exactly
def test_leaving_an_environment_tells_of_it_and_pages_everything_in(paged: ModuleType) -> None:
    tensors = [block(value) for value in range(6)]
    env = SwapEnv(host_limit=4 * BLOCK_BYTES).__enter__()
    env.pageout(tensors)
    with raises_saying(HostPoolFullError, found="limit", do=RAISE_HOST_LIMIT):
        env.close()
    env.close()
    assert [state(tensor) for tensor in tensors] == ["resident"] * 6
    with env:
        env.pageout(tensors[0])


def full_host_in_automatic_mode() -> None:
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, host_limit=4 * BLOCK_BYTES, recompute=False)
    held: list[torch.Tensor] = []
    with raises_saying(torch.OutOfMemoryError, found=RAISE_HOST_LIMIT, do=", or page less out"):
        held.extend(block(value) for value in range(20))
    del held[6:]
    assert all(torch.equal(tensor, block(value)) for value, tensor in enumerate(held))
    assert torch_lms.stats().allocated_bytes <= 8 * BLOCK_BYTES


@pytest.mark.slow
def test_a_full_host_in_automatic_mode_is_out_of_memory_that_says_why() -> None:
    in_fresh_process(full_host_in_automatic_mode)


def full_host_again_and_again() -> None:
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, host_limit=4 * BLOCK_BYTES, recompute=False)
    held: list[torch.Tensor] = []
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            held.extend(block(value) for value in range(20))


@pytest.mark.slow
@counts_exactly
def test_a_full_host_is_out_of_memory_each_time() -> None:
    in_fresh_process(full_host_again_and_again)


def smaller_ones_than_those_that_come_first() -> None:
    torch_lms.enable({"cpu": 12 * BLOCK_BYTES + (64 << 10)}, host_limit=2 * BLOCK_BYTES, recompute=False)
    large = [block(value, blocks=3) for value in range(3)]
    small = [block(value) for value in range(3)]
    more = [block(value) for value in range(2)]
    assert paged_out(large) == 0
    assert paged_out(small) == 2
    with raises_saying(torch.OutOfMemoryError, found=RAISE_HOST_LIMIT, do=", or page less out"):
        block()
    torch_lms.disable()
    for tensors in (large, small, more):
        assert all(bool((tensor == value).all()) for value, tensor in enumerate(tensors))


@pytest.mark.slow
def test_where_the_host_has_no_room_for_what_is_to_go_what_is_smaller_goes() -> None:
    in_fresh_process(smaller_ones_than_those_that_come_first)


def test_automatic_mode_ends_also_after_page_outs_that_failed() -> None:
    torch_lms.enable({"cpu": "1GiB"}, host_limit=BLOCK_BYTES)
    tensors = [block(value) for value in range(4)]
    torch_lms.pageout(tensors)
    try:
        with suppress(HostPoolFullError):
            torch_lms.disable()
        assert not is_enabled()
        assert torch_lms.stats().limit_bytes == 0
        assert [state(tensor) for tensor in tensors] == ["resident"] * 4
    finally:
        core.disable()
        tensors.clear()  # a traceback keeps this frame


# --- a limit that one op cannot keep ------------------------------------------------------------------------


def test_a_tensor_larger_than_the_limit_is_out_of_memory_and_the_next_call_works() -> None:
    torch_lms.enable({"cpu": 4 * BLOCK_BYTES})
    held = block()
    needed, limit = 8 * BLOCK_BYTES, 4 * BLOCK_BYTES
    with raises_saying(torch.OutOfMemoryError, found="bytes in use", do="Raise the limit, lower min_bytes") as _:
        block(blocks=8)
    with pytest.raises(torch.OutOfMemoryError, match=rf"tensor of {needed + 64} bytes within the limit of {limit} by"):
        block(blocks=8)
    assert torch.equal(held + 1, block(2))
    torch_lms.enable({"cpu": 40 * BLOCK_BYTES})
    assert torch.equal(block(blocks=8), torch.ones(8 * BLOCK_BYTES // 4))


def test_a_prefetch_that_has_taken_the_last_room_makes_room_again() -> None:
    limit_bytes = 8 * BLOCK_BYTES
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=4096)
    moved = block() + 1
    torch_lms.pageout(moved)
    torch_lms.wait()
    room_bytes = limit_bytes - torch_lms.stats().allocated_bytes - moved.nbytes
    filler = torch.empty(room_bytes - 2 * 64 - 8, dtype=torch.uint8).fill_(1)  # each block has a header of 64 bytes
    torch_lms.prefetch(moved)
    torch_lms.wait()
    assert [len(torch.tensor([1.0, 2.0])) for _ in range(8)] == [2] * 8
    assert filler.min() == 1
    assert torch.equal(moved, block(2))


def test_storages_that_were_given_other_memory_are_passed_over(paged: ModuleType) -> None:
    paged.enable({"cpu": BLOCK_BYTES}, min_bytes=4096)
    shared = [torch.full((2048,), 1.0) + 1 for _ in range(60)]
    for one in shared:
        one.share_memory_()
    paged.stats(reset=True)
    kept = [torch.ones(128, 128)]
    for _ in range(40):
        kept.append(kept[-1] + 1)
    assert paged.stats().limit_exceeded == 0
    assert paged.stats().peak_allocated_bytes <= BLOCK_BYTES
    assert [one[7, 7].item() for one in kept] == list(range(1, 42))


def test_an_op_whose_result_alone_fits_reads_its_inputs_from_the_host() -> None:
    torch_lms.enable({"cpu": 10 * BLOCK_BYTES}, host_limit=64 * BLOCK_BYTES)
    torch_lms.stats(reset=True)
    one, two = block(1, 3), block(2, 3)
    joined = torch.cat([one, two, one])
    assert torch_lms.stats().host_served > 0
    assert torch_lms.stats().peak_allocated_bytes <= 10 * BLOCK_BYTES
    assert [(part.min().item(), part.max().item()) for part in joined.chunk(3)] == [(1, 1), (2, 2), (1, 1)]
    assert torch.equal(one.add_(two), block(3, 3))


def test_an_op_without_room_for_its_result_leaves_its_inputs_whole() -> None:
    torch_lms.enable({"cpu": 10 * BLOCK_BYTES})
    one, two = block(1, 3), block(2, 3)
    with raises_saying(torch.OutOfMemoryError, found="inputs of running ops", do="use smaller batches"):
        torch.cat([one, two, one, two])
    assert torch.equal(one.add_(two), block(3, 3))


def test_a_backward_without_room_can_be_repeated_with_more() -> None:
    def gradient(limit_blocks: int | None) -> torch.Tensor:
        leaf = torch.linspace(0, 1, 3 * BLOCK_BYTES // 4, requires_grad=True)
        loss = leaf.exp().sum()
        if limit_blocks is not None:
            torch_lms.enable({"cpu": limit_blocks * BLOCK_BYTES})
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward(retain_graph=True)
            torch_lms.disable()
            leaf.grad = None
        loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(gradient(2), gradient(None))


def large_ones_beside_small_ones(limit_bytes: int) -> None:
    torch_lms.enable({"cpu": limit_bytes})
    small = []
    try:
        for value in range(20):
            large = block(value)
            small.append(torch.full((16,), float(value)))
            assert large[7].item() == value
    finally:
        torch_lms.disable()


@counts_exactly
def test_the_limit_that_an_error_names_is_not_refused_for_some_small_tensors() -> None:
    limit_bytes = BLOCK_BYTES // 2
    refusals = []
    while True:
        try:
            large_ones_beside_small_ones(limit_bytes)
            break
        except torch.OutOfMemoryError as error:
            refusals.append(str(error))
            named = re.search(r"a limit of (\d+) bytes would do", refusals[-1])
            assert named is not None
            assert int(named.group(1)) > limit_bytes
            limit_bytes = int(named.group(1))
    assert len(refusals) == 1, refusals
    assert limit_bytes < 2 * BLOCK_BYTES


# --- the disk: each in a process of its own, which has not chosen a directory yet ---------------------------


def full_disk(directory: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * BLOCK_BYTES, resource.RLIM_INFINITY))
    small, large = block(1), block(2, 8)
    with SwapEnv(spill_dir=directory) as env:
        env.pageout(small, large)
        with raises_saying(SpillError, found="File too large", do="ulimit -f"):
            env.wait()
        assert [state(small), state(large)] == ["paged_out", "resident"]
    assert torch.equal(large, block(2, 8))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    round_trip(large)
    round_trip(small)


def full_disk_in_automatic_mode(directory: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES, resource.RLIM_INFINITY))
    SwapEnv(spill_dir=directory)
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES})
    held = [block(value) for value in range(4)]
    with raises_saying(torch.OutOfMemoryError, found="File too large", do="ulimit -f"):
        block(9, 7)
    assert all(torch.equal(tensor, block(value)) for value, tensor in enumerate(held))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert torch.equal(block(9, 7), torch.full((7 * BLOCK_BYTES // 4,), 9.0))


def too_many_open_files(directory: str) -> None:
    tensor = block(3)
    with SwapEnv(spill_dir=directory) as env:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
        env.pageout(tensor)
        with raises_saying(SpillError, found="Too many open files", do="ulimit -n"):
            env.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        assert state(tensor) == "resident"
        round_trip(tensor)


def directory_that_vanishes(directory: str) -> None:
    tensor = block(3)
    env = SwapEnv(spill_dir=directory)
    pin(tensor)  # the pool exists from here on
    unpin(tensor)
    shutil.rmtree(directory)
    torch_lms.pageout(tensor)
    with raises_saying(SpillError, found="No such file or directory", do=NAME_A_DIRECTORY):
        torch_lms.wait()
    assert state(tensor) == "resident"
    os.mkdir(directory)
    with env:
        round_trip(tensor)


def directory_that_cannot_be_written_to(directory: str) -> None:
    tensor = block(3)
    SwapEnv(spill_dir="/proc")
    with SwapEnv(host_limit="64MiB"):
        torch_lms.pageout(tensor)
        with raises_saying(SpillError, found="(0 bytes free)", do=NAME_A_DIRECTORY):
            torch_lms.wait()
        assert state(tensor) == "resident"


def directory_for_temporary_files_that_is_not_there(directory: str) -> None:
    os.environ["TMPDIR"] = "/not/there"
    tensor = block(3)
    with raises_saying(SpillError, found="none at '/not/there'", do="create it or name another with spill_dir="):
        torch_lms.pageout(tensor)
    with raises_saying(SpillError, found="none at '/not/there'", do="create it or name another with spill_dir="):
        torch_lms.enable({"cpu": "1GiB"})
    assert not is_enabled()
    with SwapEnv(spill_dir=directory):
        round_trip(tensor)


def another_directory_while_one_is_in_use(directory: str) -> None:
    with SwapEnv(spill_dir=directory) as env:
        tensor = block(3)
        env.pageout(tensor)
        env.wait()
        SwapEnv(spill_dir=Path(directory))
        with raises_saying(SpillError, found="'/'", do="name another when nothing is paged out"):
            SwapEnv(spill_dir="/")
        assert torch.equal(tensor, block(3))
    another = Path(directory) / "another"
    another.mkdir()
    SwapEnv(spill_dir=another)
    round_trip(block(4))


def another_directory_has_a_limit_of_its_own(directory: str) -> None:
    os.environ["TMPDIR"] = directory
    torch_lms.swap.count_cpu_allocations()
    for found in (directory, "/dev/shm"):
        if found != directory:
            SwapEnv(spill_dir=found)
        room = os.statvfs(found)
        expected = pytest.approx(0.9 * room.f_bavail * room.f_frsize, rel=0.1)  # others use it, too
        assert core.memory_report("cpu")["host_limit_bytes"] == expected


def spill_files_have_no_names(directory: str) -> None:
    with SwapEnv(spill_dir=directory) as env:
        tensor = block(3)
        env.pageout(tensor)
        env.wait()
        assert torch_lms.stats().host_bytes > 0
        assert os.listdir(directory) == []


def directory_named_with_automatic_mode(directory: str) -> None:
    torch_lms.enable({"cpu": 8 * BLOCK_BYTES}, spill_dir=directory)


def directory_named_with_a_host_limit(directory: str) -> None:
    SwapEnv(spill_dir=directory, host_limit="64MiB")


def another_directory_after_one_that_was_no_good(directory: str) -> None:
    tensor = block(3)
    SwapEnv(spill_dir="/proc")
    with SwapEnv(host_limit="64MiB"):
        torch_lms.pageout(tensor)
        with pytest.raises(SpillError):
            torch_lms.wait()
    SwapEnv(spill_dir=directory)


def default_directory_by_its_name(directory: str) -> None:
    os.environ["TMPDIR"] = directory
    round_trip(block(3))
    SwapEnv(spill_dir=directory)


def relative_directory_after_a_change_of_directory(directory: str) -> None:
    os.chdir(directory)
    os.mkdir("spill")
    env = SwapEnv(spill_dir="spill")
    os.chdir("/")
    with env:
        round_trip(block(3))


@pytest.mark.parametrize(
    "scenario",
    [
        full_disk,
        full_disk_in_automatic_mode,
        too_many_open_files,
        directory_that_vanishes,
        directory_that_cannot_be_written_to,
        directory_for_temporary_files_that_is_not_there,
        another_directory_while_one_is_in_use,
        another_directory_has_a_limit_of_its_own,
        spill_files_have_no_names,
        directory_named_with_automatic_mode,
        directory_named_with_a_host_limit,
        default_directory_by_its_name,
        relative_directory_after_a_change_of_directory,
        another_directory_after_one_that_was_no_good,
    ],
    ids=lambda scenario: scenario.__name__,
)
@counts_exactly
def test_spill_directory(scenario: object, tmp_path: Path) -> None:
    directory = tmp_path / "spill"
    directory.mkdir()
    in_fresh_process(scenario, str(directory))  # type: ignore[arg-type]
