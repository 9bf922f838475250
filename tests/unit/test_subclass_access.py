"""Ways to a tensor's address that are watched ask nothing of the tensor's class, nor of modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import torch_lms
from tests.unit.markers import counts_exactly
from torch_lms.swap import intercepts, state


class Counting(torch.Tensor):
    """Keeps the names of what it is asked for, and refuses to tell where it is."""

    asked: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        owner = getattr(function, "__self__", None)
        name = getattr(owner, "__name__", "") if function.__name__ == "__get__" else function.__name__
        cls.asked.append(name)
        if name in ("layout", "device"):
            args[0].data_ptr()  # which asks again, if the address's wrapper asks
        return super().__torch_function__(function, types, args, dict(kwargs or {}))


class CountingMode(TorchFunctionMode):
    def __init__(self) -> None:
        self.asked: list[str] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.asked.append(function.__name__)
        return function(*args, **(kwargs or {}))


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "data_ptr": torch.Tensor.data_ptr,
    "numpy": torch.Tensor.numpy,
    "__dlpack__": torch.Tensor.__dlpack__,
}


@pytest.mark.parametrize("name", WAYS)
def test_a_class_is_asked_for_nothing_but_the_address(name: str) -> None:
    plain = torch.arange(1000.0)
    without = watched(plain.as_subclass(Counting), getattr(WAYS[name], "__wrapped__", WAYS[name]))
    intercepts.install()
    assert watched(torch.arange(1000.0).as_subclass(Counting), getattr(torch.Tensor, name)) == without


def watched(tensor: torch.Tensor, way: Callable[[torch.Tensor], object]) -> list[str]:
    Counting.asked = []
    way(tensor)
    return Counting.asked


def test_a_mode_sees_nothing_but_the_call() -> None:
    intercepts.install()
    tensor = torch.arange(1000.0)
    with CountingMode() as mode:
        tensor.data_ptr()
    assert mode.asked == ["data_ptr"]


@counts_exactly
def test_what_is_out_comes_in_for_an_address_of_a_subclass() -> None:
    tensor = torch.arange(1000.0).as_subclass(Counting)
    torch_lms.pageout(tensor)
    torch_lms.wait()
    assert state(tensor) == "paged_out"
    Counting.asked = []
    tensor.data_ptr()
    assert Counting.asked == ["data_ptr"]
    assert state(tensor) == "resident"


@pytest.mark.parametrize(
    ("owner", "movable"),
    [
        (torch.ones(3), True),
        (torch.nn.Parameter(torch.ones(3)), True),
        (torch.ones(3).untyped_storage(), True),
        (torch.ones(3, device="meta"), False),
        (torch.ones(3, device="meta").untyped_storage(), False),
        (torch.eye(3).to_sparse(), False),
        (torch.eye(3).to_sparse_csr(), False),
        (torch.ones(3).to_mkldnn(), False),
        (3, False),
        (None, False),
        (torch.Tensor, False),
    ],
    ids=str,
)
def test_what_could_move_has_a_storage_on_a_device(owner: object, movable: bool) -> None:
    assert intercepts._movable(owner) is movable
