"""Steps of a ResNet-50 or a GPT, one for each line of the input, each with its time in seconds as a line of the output.

Runs on PyTorch 1.13 alone, with the fork's patches and without; `benchmarks.fork_steps` starts one for each build.

    python3 benchmarks/fork_step_worker.py resnet50
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norm, beside a shortcut (He et al. 2016, figure 5)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        layers = [(channels_in, channels, 1, 1), (channels, channels, 3, stride), (channels, 4 * channels, 1, 1)]
        self.layers = nn.ModuleList(self._convolution(*layer) for layer in layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != 4 * channels:
            self.shortcut = self._convolution(channels_in, 4 * channels, 1, stride)

    @staticmethod
    def _convolution(channels_in: int, channels: int, size: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        first, second, third = self.layers
        y = third(functional.relu(second(functional.relu(first(x)))))
        return functional.relu(y + self.shortcut(x))


def bottlenecks() -> tuple[list[nn.Module], int]:
    """The blocks of a ResNet-50, and how many channels the last one gives."""
    blocks: list[nn.Module] = []
    channels_in = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        for index in range(depth):
            blocks.append(Bottleneck(channels_in, 64 << stage, 2 if stage and index == 0 else 1))
            channels_in = 256 << stage
    return blocks, channels_in


def stem() -> list[nn.Module]:
    """What a ResNet begins with."""
    return [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]


def resnet50() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The model, and its loss of a batch of small images."""
    blocks, channels = bottlenecks()
    model = nn.Sequential(*stem(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    images, classes = torch.randn(4, 3, 64, 64), torch.randint(1000, (4,))
    return model, lambda model: functional.cross_entropy(model(images), classes)


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm and beside a residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block; the shape stays."""
        batch, tokens, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        scores = (q @ k.transpose(2, 3)) / (hidden // self.heads) ** 0.5
        masked = scores + torch.full((tokens, tokens), -1e9, device=x.device).triu(1)
        x = x + self.proj((masked.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, hidden))
        y: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + y


def gpt() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The model, and its loss of a batch of tokens."""
    hidden, vocabulary = 256, 2048
    blocks = (Block(hidden, 8) for _ in range(8))
    model = nn.Sequential(
        nn.Embedding(vocabulary, hidden), *blocks, nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary)
    )
    ids = torch.randint(vocabulary, (4, 65))
    return model, lambda model: functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    """Says what it runs on, then steps on demand, on one core: the same for all who step in turns."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_of = {"resnet50": resnet50, "gpt": gpt}[sys.argv[1]]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    print(torch.__version__, hasattr(torch.Tensor, "pageout_manual"), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(time.perf_counter() - start, loss.item(), flush=True)


if __name__ == "__main__":
    main()
