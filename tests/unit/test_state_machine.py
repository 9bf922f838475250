"""Anything that a program may do with tensors, in any order, against the same on arrays that stay where they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

import torch_lms
from tests.conftest import CHAOS, settle
from torch_lms.errors import PageoutError
from torch_lms.swap import is_enabled, state, unpin

LIMIT_BYTES = 64 << 10
STATE_NAMES = {"resident", "out_queued", "paging_out", "paged_out", "in_queued", "paging_in", "dropped"}
MAX_STORAGES = 12

WRITES: dict[str, Callable[[torch.Tensor | np.ndarray], object]] = {
    "add": lambda values: values.__iadd__(1),
    "multiply": lambda values: values.__imul__(2),
    "first": lambda values: values.__setitem__(0, -5),
    "all": lambda values: values.__setitem__(slice(None), 3),
}

# (start, stop, step) in tenths of what is there
slices = st.tuples(st.integers(0, 4), st.integers(5, 10), st.integers(1, 3))


class Handle:
    """A tensor, and the array that it must equal; views of one storage are views of one array."""

    def __init__(self, tensor: torch.Tensor, array: np.ndarray, root: Handle | None = None) -> None:
        self.tensor = tensor
        self.array = array
        self.root = root or self  # counts what the handles of a storage share
        self.pins = 0
        self.escaped = False


class Paging(RuleBasedStateMachine):
    """Storages below and above the limit's reach; every rule may come at any time."""

    handles = Bundle("handles")

    @initialize(automatic=st.booleans())
    def begin(self, automatic: bool) -> None:
        if automatic:
            self.enable()

    def __init__(self) -> None:
        super().__init__()
        settle()
        self.alive: list[Handle] = []

    def remember(self, handle: Handle) -> Handle:
        self.alive.append(handle)
        return handle

    # --- making and dropping ---------------------------------------------------------------------------

    @precondition(lambda self: len({id(handle.root) for handle in self.alive}) < MAX_STORAGES)
    @rule(target=handles, elements=st.sampled_from([10, 1000, 2500]), fill=st.integers(-100, 100))
    def make(self, elements: int, fill: int) -> Handle:
        array = np.arange(elements, dtype=np.float32) + fill
        return self.remember(Handle(torch.arange(elements, dtype=torch.float32) + fill, array))

    @rule(target=handles, of=handles, part=slices)
    def view(self, of: Handle, part: tuple[int, int, int]) -> Handle:
        tenth = max(len(of.array) // 10, 1)
        where = slice(part[0] * tenth, part[1] * tenth, part[2])
        if len(of.array[where]) == 0:
            where = slice(None)
        return self.remember(Handle(of.tensor[where], of.array[where], of.root))

    @rule(target=handles, of=handles)
    def copy(self, of: Handle) -> Handle:
        return self.remember(Handle(of.tensor.clone(), of.array.copy()))

    @rule(handle=consumes(handles))
    def free(self, handle: Handle) -> None:
        self.alive.remove(handle)
        handle.tensor = torch.empty(0)

    # --- paging --------------------------------------------------------------------------------------------

    @rule(handle=handles)
    def pageout(self, handle: Handle) -> None:
        immovable = handle.root.pins > 0 or handle.root.escaped
        if not immovable:
            assert torch_lms.pageout(handle.tensor) in (0, 1)
            return
        with pytest.raises(PageoutError):
            torch_lms.pageout(handle.tensor)

    @rule(handle=handles)
    def prefetch(self, handle: Handle) -> None:
        assert torch_lms.prefetch(handle.tensor) in (0, 1)

    @rule(handle=handles)
    def pageout_and_wait(self, handle: Handle) -> None:
        self.pageout(handle)
        self.wait()
        if not (CHAOS or is_enabled() or handle.root.pins or handle.root.escaped):
            assert state(handle.tensor) == "paged_out"

    @rule()
    def wait(self) -> None:
        torch_lms.wait()
        if not (CHAOS or is_enabled()):
            assert {state(handle.tensor) for handle in self.alive} <= {"resident", "paged_out"}

    def immovable(self) -> int:
        """Storages that cannot be made to fit a limit."""
        return len({id(handle.root) for handle in self.alive if handle.root.pins or handle.root.escaped})

    @precondition(lambda self: self.immovable() < 2)
    @rule(handle=handles)
    def pin(self, handle: Handle) -> None:
        torch_lms.pin(handle.tensor)
        handle.root.pins += 1

    @rule(handle=handles)
    def unpin(self, handle: Handle) -> None:
        if handle.root.pins:
            unpin(handle.tensor)
            handle.root.pins -= 1

    @precondition(lambda self: self.immovable() < 2)
    @rule(handle=handles)
    def hand_to_numpy(self, handle: Handle) -> None:
        torch_lms.pageout(torch.ones(1))  # from here on it is watched
        assert np.array_equal(handle.tensor.numpy(), handle.array)
        handle.root.escaped = True

    @rule()
    def enable(self) -> None:
        # What was known before may not go out: see test_enable_again.py.
        torch_lms.enable(limit=64 * LIMIT_BYTES if self.alive else LIMIT_BYTES, min_bytes=512)

    @rule()
    def disable(self) -> None:
        torch_lms.disable()

    # --- using -------------------------------------------------------------------------------------------------

    @rule(handle=handles)
    def read(self, handle: Handle) -> None:
        assert handle.tensor.tolist() == handle.array.tolist()

    @rule(handle=handles, how=st.sampled_from(sorted(WRITES)))
    def write(self, handle: Handle, how: str) -> None:
        WRITES[how](handle.tensor)
        with np.errstate(over="ignore"):
            WRITES[how](handle.array)

    @rule(one=handles, other=handles)
    def combine(self, one: Handle, other: Handle) -> None:
        count = min(len(one.array), len(other.array))
        # through a copy: the two may be views of one storage
        one.tensor[:count] = one.tensor[:count] - other.tensor[:count]
        one.array[:count] = one.array[:count] - other.array[:count]

    @rule(handle=handles)
    def move_to_a_new_storage(self, handle: Handle) -> None:
        """The others that shared the old one keep it."""
        if any(other is not handle and other.root is handle.root for other in self.alive) or handle.root is not handle:
            return
        if handle.pins or handle.escaped:
            return
        handle.tensor.data = handle.tensor + 1
        handle.array = handle.array.copy() + 1

    # --- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def states_have_names(self) -> None:
        assert {state(handle.tensor) for handle in self.alive} <= STATE_NAMES

    @invariant()
    def gauges_are_of_what_is_out(self) -> None:
        stats = torch_lms.stats()
        assert min(stats.paged_out_bytes, stats.paged_out_storages, stats.host_used_bytes) >= 0
        assert stats.host_used_bytes <= stats.host_bytes
        if CHAOS or is_enabled():
            return
        out = {
            handle.tensor.untyped_storage()._cdata: handle.tensor.untyped_storage().nbytes()
            for handle in self.alive
            if state(handle.tensor) in ("paged_out", "in_queued", "paging_in", "dropped")
        }
        assert stats.paged_out_bytes == sum(out.values())
        assert stats.paged_out_storages == len(out)

    def teardown(self) -> None:
        try:
            for handle in self.alive:
                assert handle.tensor.tolist() == handle.array.tolist()
        finally:
            for handle in self.alive:
                handle.tensor = torch.empty(0)  # the bundle keeps the handle, and would keep its memory
            settle()


class TestPaging(Paging.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=25 if CHAOS else 60,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
