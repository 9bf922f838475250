"""The training steps that `benchmarks.overhead` times: one that keeps a device busy, two that wait for launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.resnet import ResNet
from torch_lms.cli.models import GPT, GPTShape

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's steps.

    Attributes:
        title: of its rows.
        most: how often as long as plain its step may take under a limit that it never reaches.
        steps: how many are timed together.
        make: builds it on a device; what it returns runs one step.
    """

    title: str
    most: float
    steps: int
    make: Callable[[str], Callable[[], None]]

    def work(self, device: str) -> Callable[[], None]:
        """The steps that are timed together."""
        step = self.make(device)

        def run() -> None:
            for _ in range(self.steps):
                step()

        return run


def _gpt_step(device: str, shape: GPTShape, batch: int) -> Callable[[], None]:
    with torch.device(device):
        model = GPT(shape).to(torch.bfloat16 if device == "cuda" else torch.float32)
        ids = torch.randint(shape.vocabulary, (batch, shape.tokens))
    return _step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), (ids, ids.roll(-1, 1)))


def _resnet_step(device: str, channels: int, batch: int, pixels: int) -> Callable[[], None]:
    with torch.device(device):
        model = ResNet(channels=channels)
        images, classes = torch.randn(batch, 3, pixels, pixels), torch.randint(1000, (batch,))
    return _step(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), (images, classes))


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> Callable[[], None]:
    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


_LARGE = GPTShape(layers=24, hidden=2048, heads=16, tokens=2048, vocabulary=32000)
_SMALL = GPTShape(layers=12, hidden=768, heads=12, tokens=1024, vocabulary=50304)
_TINY = GPTShape(layers=2, hidden=64, heads=2, tokens=32, vocabulary=256)

MODELS = {
    "large": Model(title="GPT 1.3B, 16 x 2048", most=1.002, steps=1, make=lambda device: _gpt_step(device, _LARGE, 16)),
    # The device waits for the launches of its kernels: what an op costs more shows in the step.
    "small": Model(title="GPT 0.1B, 8 x 1024", most=1.01, steps=8, make=lambda device: _gpt_step(device, _SMALL, 8)),
    "resnet": Model(
        title="ResNet-50, 8 images", most=1.01, steps=8, make=lambda device: _resnet_step(device, 64, 8, 224)
    ),
    # To try the benchmark on a small machine.
    "tiny": Model(title="GPT, tiny", most=1.01, steps=4, make=lambda device: _gpt_step(device, _TINY, 2)),
    "tiny_resnet": Model(
        title="ResNet-50, tiny", most=1.01, steps=1, make=lambda device: _resnet_step(device, 8, 2, 32)
    ),
}
