"""`torch_lms.wait` inside of ops: in hooks on what they save, while other threads' ops run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

import torch_lms
from tests.unit.fresh_process import in_fresh_process
from tests.unit.markers import counts_exactly
from tests.unit.test_threads import together
from torch_lms.swap import state


def saving(pack: Callable[[torch.Tensor], None]) -> Callable[[], torch.Tensor]:
    """An op inside of which `pack` is called with what it saves, once."""

    def run() -> torch.Tensor:
        called: list[torch.Tensor] = []

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if not called:
                called.append(tensor)
                pack(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(once, lambda tensor: tensor):
            return torch.full((5000,), 2.0).requires_grad_().exp()

    return run


def wait_inside_of_two_ops() -> list[str]:
    """Each op may still use what the other one's hook pages out: both would wait for the other to end."""
    outer = torch.ones(5000)
    torch_lms.pageout(outer)  # ops are observed from here on
    torch_lms.wait()
    inside = threading.Barrier(2)
    states: list[str] = []

    def pack(_: torch.Tensor) -> None:
        inside.wait()
        tensor = torch.full((5000,), 1.0)
        torch_lms.pageout(tensor)
        inside.wait()
        torch_lms.wait()
        states.append(state(tensor))
        inside.wait()

    results = together(saving(pack), saving(pack))
    expected = torch.full((5000,), 2.0).exp()
    torch_lms.wait()
    return [*states, *(str(torch.equal(result, expected)) for result in results)]


@counts_exactly
def test_waits_inside_of_two_ops_do_not_wait_for_each_other() -> None:
    assert in_fresh_process(wait_inside_of_two_ops) == ["out_queued", "out_queued", "True", "True"]


def wait_inside_of_an_op() -> list[str]:
    """For what its own thread pages out it waits, also beside what must wait for this op."""
    outer = torch.ones(5000)
    torch_lms.pageout(outer)  # ops are observed from here on
    torch_lms.wait()
    states: list[str] = []
    others = [torch.full((5000,), float(value)) for value in range(3)]

    def pack(_: torch.Tensor) -> None:
        thread = threading.Thread(target=torch_lms.pageout, args=(others,))
        thread.start()
        thread.join()
        for _ in range(20):
            tensor = torch.full((50_000,), 1.0)
            torch_lms.pageout(tensor)
            torch_lms.wait()
            states.append(state(tensor))
        states.extend(state(other) for other in others)

    saving(pack)()
    torch_lms.wait()
    return [*states, *(state(other) for other in others)]


@counts_exactly
def test_a_wait_inside_of_an_op_waits_for_copies() -> None:
    expected = ["paged_out"] * 20 + ["out_queued"] * 3 + ["paged_out"] * 3
    assert in_fresh_process(wait_inside_of_an_op) == expected
