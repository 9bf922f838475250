"""Requests, uses and pins in any order, against the same tensors in peace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import torch_lms
from torch_lms.errors import PageoutError
from torch_lms.swap import is_resident, unpin

COUNT = 4
ELEMENTS = 16 << 10


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**30, ELEMENTS, dtype=np.int32)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """In memory of PyTorch's own, which may be paged out."""
    return torch.from_numpy(array).clone()


indices = st.integers(0, COUNT - 1)


class AnyOrder(RuleBasedStateMachine):
    """Tensors that are paged in any order, and the same tensors in peace."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = [values(seed) for seed in range(COUNT)]
        self.tensors = [tensor_of(array) for array in self.plain]
        self.pins = [0] * COUNT

    @rule(i=indices)
    def page_out(self, i: int) -> None:
        if self.pins[i]:
            with pytest.raises(PageoutError):
                torch_lms.pageout(self.tensors[i])
        else:
            assert torch_lms.pageout(self.tensors[i]) in (0, 1)

    @rule(i=indices)
    def prefetch(self, i: int) -> None:
        torch_lms.prefetch(self.tensors[i])

    @rule()
    def wait(self) -> None:
        torch_lms.wait()

    @rule(i=indices, j=indices)
    def add(self, i: int, j: int) -> None:
        self.tensors[i].add_(self.tensors[j])
        self.plain[i] += self.plain[j].copy()

    @rule(i=indices, first=st.integers(0, 100))
    def write_a_view(self, i: int, first: int) -> None:
        self.tensors[i][first::7].neg_()
        self.plain[i][first::7] *= -1

    @rule(i=indices)
    def replace(self, i: int) -> None:
        for _ in range(self.pins[i]):
            unpin(self.tensors[i])
        self.pins[i] = 0
        self.plain[i] = values(i + COUNT)
        self.tensors[i] = tensor_of(self.plain[i])

    @rule(i=indices)
    def pin(self, i: int) -> None:
        torch_lms.pin(self.tensors[i])
        self.pins[i] += 1

    @rule(i=indices)
    def unpin(self, i: int) -> None:
        if self.pins[i]:
            unpin(self.tensors[i])
            self.pins[i] -= 1

    @rule(i=indices)
    def read(self, i: int) -> None:
        assert torch.equal(self.tensors[i], torch.from_numpy(self.plain[i]))

    @invariant()
    def pinned_are_resident(self) -> None:
        assert all(is_resident(tensor) for tensor, pins in zip(self.tensors, self.pins, strict=True) if pins)

    def teardown(self) -> None:
        for i in range(COUNT):
            self.read(i)


def test_any_order_of_requests_and_uses_leaves_every_bit() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))
