"""Small models, each with something that profiles must get right."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class TiedLM(nn.Module):
    """Tied weights, a buffer outside of state dicts, a constructor, constants and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)
        self.mix = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids_BT: torch.Tensor, factor: float = 1.0, *, mixed: bool = True) -> dict[str, torch.Tensor]:
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTH = self.embed(ids_BT) + positions_T[None, :, None] * self.scale
        if mixed:
            x_BTH = self.mix(x_BTH)
        return {"logits": self.head(x_BTH * factor)}


class Convolutions(nn.Module):
    """Batch norm, an op in place, a view, a recurrent layer with several outputs, and a scalar loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x_BCYX: torch.Tensor) -> torch.Tensor:
        x_BCYX = self.relu(self.norm(self.conv(x_BCYX)))
        y_BTH, (last, _) = self.lstm(x_BCYX.flatten(2).transpose(1, 2))
        y_BTH = y_BTH * 1.5
        y_BTH[:, 0].mul_(2.0)
        return self.head(y_BTH).sum() + last.sum()


class Branching(nn.Module):
    """Which way it goes depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the user's line
            return self.inner(x).relu_()
        return self.inner(x)


class Unseen(Branching):
    """What it depends on is read outside of PyTorch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach().numpy().sum() > 0:
            return self.inner(x).relu_()
        return self.inner(x)


class OneBranching(nn.Module):
    """One part of it depends on data, the rest does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), Branching()), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * 2
        for part in self.parts:
            x = part(x)
        return x


class Fresh(nn.Module):
    """Changes a tensor that it makes itself; one frozen into the graph would add up from run to run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4)
        total.add_(x.sum(0))
        return total


class Asking(nn.Module):
    """Asks whether it was given a tensor."""

    def forward(self, x: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            x = [x]
        return torch.cat([*x, x[0]])


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Nested(nn.Module):
    """Tensors inside of lists and dicts, in and out."""

    def forward(self, pair: list[torch.Tensor], extra: dict[str, Any]) -> dict[str, Any]:
        total = pair[0] + pair[1] * extra["weight"]
        return {"total": total, "parts": [pair[1], (extra["bias"] + total, None)], "name": "nested"}


class Quiet(nn.Module):
    """A part without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 2:  # torch.fx cannot know: the graph is torch.export's
            raise ValueError("two rows")
        with torch.no_grad():
            norm = (x * self.weight).norm()
        return x * self.weight / norm
