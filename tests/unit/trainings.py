"""Small trainings of real kinds, and limits that are too small for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it

Batch = tuple[torch.Tensor, torch.Tensor]

MIN_BYTES = 4096
CLASSES = 64


@dataclass(frozen=True)
class Training:
    """A model, its batches, and less memory than it takes."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    limit_bytes: int


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.before_attention(x_BTW)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen_BHTD = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x_BTW = x_BTW + self.project(seen_BHTD.transpose(1, 2).flatten(2))
        return x_BTW + self.feed_forward(x_BTW)


class GPT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTW = self.tokens(tokens_BT)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        return self.head(x_BTW).flatten(0, 1)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.inner(x), inplace=True)


def make_resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    body = [Residual(16), Residual(16), Residual(16), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), Residual(32)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


class RNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, 64)
        self.layers = nn.ModuleList(nn.LSTM(64, 64, batch_first=True) for _ in range(4))  # each is one op
        self.head = nn.Linear(64, CLASSES)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTW = self.tokens(tokens_BT)
        for layer in self.layers:
            x_BTW = layer(x_BTW)[0]
        return self.head(x_BTW).flatten(0, 1)


def make_wide_mlp() -> nn.Module:
    """4 MiB of parameters: with gradients and Adam's state, 16 MiB."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(512, CLASSES))


def token_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randint(CLASSES, (8, 64), generator=generator),
        torch.randint(CLASSES, (8 * 64,), generator=generator),
    )


def image_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(8, 3, 48, 48, generator=generator), torch.randint(CLASSES, (8,), generator=generator)


def vector_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(16, 512, generator=generator), torch.randint(CLASSES, (16,), generator=generator)


GPT_TRAINING = Training("gpt", GPT, token_batch, 5 << 20)
RESNET_TRAINING = Training("resnet", make_resnet, image_batch, 3 << 20)
RNN_TRAINING = Training("rnn", RNN, token_batch, 6 << 20)
LARGE_STATE_TRAINING = Training("large state", make_wide_mlp, vector_batch, 7 << 20)
TRAININGS = [GPT_TRAINING, RESNET_TRAINING, RNN_TRAINING, LARGE_STATE_TRAINING]


@contextmanager
def one_thread() -> Iterator[None]:
    """For ops as small as these, more threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Step = Callable[[nn.Module, torch.optim.Optimizer, Batch], torch.Tensor]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


@one_thread()
def train(training: Training, steps: int = 3, step: Step = plain_step) -> list[torch.Tensor]:
    """The losses, and all gradients, parameters, buffers and optimizer state at the end."""
    torch.manual_seed(0)
    model = training.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [step(model, optimizer, training.batch(number)) for number in range(steps)]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    state = [value for state in optimizer.state.values() for value in state.values()]
    return [*losses, *gradients, *model.state_dict().values(), *state]


def same_bits(mine: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal, NaN to NaN."""
    return len(mine) == len(others) > 0 and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(mine, others, strict=True)
    )
