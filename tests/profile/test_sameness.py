"""What counts as the same value, of all that a graph or a state dict may hold."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from torch_lms.profile.sameness import is_same

NAN = float("nan")


@dataclass
class Settings:
    rates: Any
    name: str = "one"


VALUES: list[Any] = [
    *(None, "text", True, 1, 1.0, 0.0, -0.0, NAN, 1j, complex(0.0, NAN), torch.float32, slice(1, 2)),
    *(torch.tensor([1.0, NAN]), torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([0]), torch.tensor(1.0)),
    *(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bool), torch.ones(2, 2), torch.ones(0)),
    *(
        torch.tensor([1j, NAN]),
        torch.ones(2, 2).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(3, device="meta"),
    ),
    *(np.array([1.0, NAN]), np.array([1, 2]), np.array([1, 2], dtype=np.int8), np.float32(2), np.array(["a"])),
    *(np.array([None, "a"], dtype=object), np.array([[1, 2]])),
    *([1, [NAN]], (1, np.arange(2)), deque([1]), {"a": np.arange(3), "b": {"c": NAN}}, {"a": np.arange(3)}, {1}),
    *(OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), Settings(np.arange(2)), Settings(np.arange(3))),
]


@pytest.mark.parametrize("place", range(len(VALUES)))
def test_a_value_is_the_same_as_its_copy_alone(place: int) -> None:
    value = VALUES[place]
    assert is_same(value, value)
    assert [other for other, one in enumerate(VALUES) if is_same(value, copy.deepcopy(one))] == [place]


def test_the_order_and_the_place_of_what_is_the_same_do_not_matter() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert is_same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert is_same(torch.Size([1, 2]), (1, 2))
    assert is_same(x, x.T.contiguous().T)
    assert is_same(x, torch.nn.Parameter(x.clone()))
    assert is_same(x, x.to("meta"))
    assert not is_same((1, 2), [1, 2])
    assert not is_same(np.ones(2), torch.ones(2))
    assert not is_same(x, 1.0)
