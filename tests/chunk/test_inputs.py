"""What a model in chunks is called with: 32-bit tensors are cast wherever they are, and all else stays as it is."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from tests.chunk.small_model import chunked

WIDE = torch.rand(2, 8)
WHOLE = torch.arange(2)


class Pair(NamedTuple):
    """As datasets have them."""

    x: Any
    other: Any


class Keeps(nn.Module):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named = arguments, named


def seen_of(*arguments: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    model, _ = chunked(Keeps())
    model(*arguments, **named)
    return model.arguments, model.named


@pytest.mark.parametrize(
    "container",
    [
        [WIDE, WHOLE],
        (WIDE, WHOLE),
        {"x": WIDE, "other": WHOLE},
        OrderedDict(x=WIDE, other=WHOLE),
        defaultdict(list, x=WIDE, other=WHOLE),
        deque([WIDE, WHOLE], maxlen=2),
        Pair(WIDE, WHOLE),
    ],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("is_named", [False, True], ids=["given", "named"])
def test_tensors_in_containers_are_cast(container: Any, is_named: bool) -> None:
    arguments, named = seen_of(batch=container) if is_named else seen_of(container)
    found = named["batch"] if is_named else arguments[0]
    assert type(found) is type(container)
    x, other = found.values() if isinstance(found, dict) else found
    assert torch.equal(x, WIDE.bfloat16())
    assert other is WHOLE
    first, _ = container.values() if isinstance(container, dict) else container
    assert first is WIDE  # the caller's stays as it was
    assert getattr(found, "default_factory", list) is list
    assert getattr(found, "maxlen", 2) == 2


def test_tensors_deep_in_containers_are_cast_and_what_is_beside_them_stays() -> None:
    untouched, cache, thing = [WHOLE, {"of": None}], UserDict(x=WIDE), object()
    given = {"batch": [(Pair({"x": WIDE}, untouched), cache), thing, "text", 1.5]}
    ((found,), named) = seen_of(given, x=WIDE, more=untouched)
    (pair, seen_cache), *rest = found["batch"]
    assert pair.x["x"].dtype == named["x"].dtype == torch.bfloat16
    assert pair.other is named["more"] is untouched
    assert seen_cache is cache  # of a kind that nothing is known of
    assert rest == [thing, "text", 1.5]


def test_containers_without_such_tensors_are_the_callers_own() -> None:
    empty: list[Any] = []
    given = ({"x": WHOLE, "more": (WIDE.bfloat16(), empty)}, [WIDE.double()], empty)
    arguments, named = seen_of(*given, mask=[WHOLE > 0])
    assert all(one is other for one, other in zip(arguments, given, strict=True))
    assert named["mask"][0].dtype == torch.bool


def test_autocast_casts_what_is_in_containers_itself() -> None:
    with torch.autocast("cpu"):
        ((found,), _) = seen_of([WIDE])
    assert found[0] is WIDE


def test_gradients_come_to_what_is_in_containers() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, batch: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            return sum(map(self.linear, batch["x"]), torch.zeros(()))

    model, _ = chunked(Sums())
    x = WIDE.clone().requires_grad_()
    model({"x": [x]}).float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert x.grad.any()


def test_packed_sequences_are_cast() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(8, 8)

        def forward(self, x: Any) -> Any:
            return self.recurrent(x)[0]

    model, _ = chunked(Recurrent())
    packed = pack_sequence([torch.rand(3, 8), torch.rand(2, 8)])
    assert model(packed).data.dtype == torch.bfloat16
