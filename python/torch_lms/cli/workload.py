"""What the demo trains: a model, its sizes, its data and how long."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torch_lms.cli.images import CLASSES, ImageBatches
from torch_lms.cli.models import GPT, GPTShape, ResNet, ResNetShape
from torch_lms.cli.text import VOCABULARY, TextBatches, read_text

__all__ = ["MODELS", "Batches", "Workload"]

Batches = Callable[[], tuple[torch.Tensor, torch.Tensor]]

# Sizes where activations are nearly all of the memory and a step takes seconds: on two cores, and on one large GPU.
_SIZES: dict[tuple[str, str], dict[str, int]] = {
    ("gpt", "cpu"): {"layers": 8, "width": 64, "heads": 2, "tokens": 128, "batch": 600},
    ("gpt", "cuda"): {"layers": 24, "width": 1024, "heads": 16, "tokens": 1024, "batch": 16},
    ("resnet", "cpu"): {"layers": 2, "width": 32, "image_size": 32, "batch": 512},
    ("resnet", "cuda"): {"layers": 6, "width": 64, "image_size": 64, "batch": 1024},
}
MODELS = ("gpt", "resnet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A training run, but for where its memory lives. The same workload gives the same bits.

    Attributes:
        model: one of `MODELS`.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        steps: optimizer steps.
        batch: excerpts or images a step.
        layers: blocks of the GPT, or of each of the ResNet's three stages.
        width: hidden size of the GPT, or channels of the ResNet's first stage.
        heads: of the GPT's attention.
        tokens: bytes of each excerpt that the GPT reads.
        image_size: rows, and columns, of each image that the ResNet sees.
        seed: of parameters and data.
        learning_rate: of AdamW.

    Raises:
        ValueError: for an unknown model or device, or a size that is not positive.
    """

    model: str
    device: str
    steps: int
    batch: int
    layers: int
    width: int
    heads: int = 1
    tokens: int = 1
    image_size: int = 1
    seed: int = 0
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        _default_sizes(self.model, self.device)
        if min(self.steps, self.batch, self.image_size) < 1:
            raise ValueError(f"expected at least 1 step, 1 example and 1 pixel, found {self}; pass positive sizes")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"expected a positive learning rate, found {self.learning_rate}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"expected a seed from 0 to 2**63 - 1, found {self.seed}; take another")
        self._shape()

    @classmethod
    def sized(cls, *, model: str, device: str, **sizes: Any) -> Workload:
        """A workload with the default sizes for its model and kind of device, where ``sizes`` has None or nothing."""
        defaults = _default_sizes(model, device)
        chosen = {name: value for name, value in sizes.items() if value is not None}
        return cls(model=model, device=device, **(defaults | chosen))

    def build_model(self) -> nn.Module:
        """The model, freshly initialised on its device."""
        shape = self._shape()
        with torch.device(self.device):
            return GPT(shape) if isinstance(shape, GPTShape) else ResNet(shape)

    def build_batches(self) -> Batches:
        """Draws the next inputs and targets, on the CPU, at each call."""
        if self.model == "gpt":
            return TextBatches(read_text(), batch=self.batch, tokens=self.tokens, seed=self.seed).draw
        return ImageBatches(batch=self.batch, size=self.image_size, seed=self.seed).draw

    def describe(self) -> str:
        """One line for people."""
        names = ["layers", "width", *(["heads", "tokens"] if self.model == "gpt" else ["image_size"]), "batch", "steps"]
        values = asdict(self)
        sizes = ", ".join(f"{name.replace('_', ' ')} {values[name]}" for name in names)
        return f"{self.model} on {self.device}: {sizes}"

    def _shape(self) -> GPTShape | ResNetShape:
        if self.model == "gpt":
            return GPTShape(
                layers=self.layers, hidden=self.width, heads=self.heads, tokens=self.tokens, vocabulary=VOCABULARY
            )
        return ResNetShape(layers=self.layers, channels=self.width, classes=CLASSES)


def _default_sizes(model: str, device: str) -> dict[str, int]:
    """The sizes for a model on a kind of device, or an error for what there is not."""
    if model not in MODELS:
        raise ValueError(f"expected a model among {', '.join(MODELS)}, found {model!r}; name one of these")
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"expected a cpu or cuda device, found {device!r}; other devices cannot be paged")
    return _SIZES[model, kind]
