"""Programs of many kinds that automatic mode makes plans for, and what runs them."""

from __future__ import annotations

import gc
import hashlib
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812  # PyTorch's own name for it
from torch.utils.checkpoint import checkpoint

import torch_lms
from tests.unit.trainings import MIN_BYTES

Step = Callable[[int], list[torch.Tensor]]

WIDTH, ROWS = 64, 256
STEPS = 15


class Layer(nn.Module):
    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.before = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.before(x)))))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x * x)
        return x * x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        _, square = ctx.saved_tensors
        return 3 * square * grad


def model_of(layers: int = 6, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(**options) for _ in range(layers)))


def batch(step: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def optimized(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def plain_training(**options: object) -> Step:
    model = model_of(**options)
    optimizer = optimized(model)

    def step(number: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = model(batch(number)).square().mean()
        loss.backward()
        made = [loss.detach().clone(), *gradients_of(model), *(buffer.clone() for buffer in model.buffers())]
        optimizer.step()
        return made

    return step


def accumulating() -> Step:
    model = model_of()
    optimizer = optimized(model)

    def step(number: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        for part in range(3):
            model(batch(3 * number + part)).square().mean().backward()
        optimizer.step()
        return gradients_of(model)

    return step


def evaluating_between() -> Step:
    train = plain_training()
    model = model_of(3)

    def step(number: int) -> list[torch.Tensor]:
        made = train(number)
        if number % 3 == 2:
            with torch.no_grad():
                made.append(model(batch(number)).clone())
        return made

    return step


def with_a_large_head() -> Step:
    model = nn.Sequential(*model_of(8), nn.Linear(WIDTH, 32 * WIDTH))
    optimizer = optimized(model)

    def step(number: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch(number)), torch.full((ROWS,), number))
        loss.backward()
        made = [loss.detach().clone(), *gradients_of(model)]
        optimizer.step()
        return made

    return step


def adversarial() -> Step:
    maker, judge = model_of(4), model_of(4)
    optimizers = optimized(maker), optimized(judge)

    def step(number: int) -> list[torch.Tensor]:
        made = []
        for optimizer, which in zip(optimizers, (maker, judge), strict=True):
            optimizer.zero_grad()
            loss = judge(maker(batch(number))).square().mean() * (1 if which is maker else -1)
            loss.backward()
            optimizer.step()
            made += [loss.detach().clone(), *gradients_of(which)]
        return made

    return step


def changing_shapes() -> Step:
    model = model_of()

    def step(number: int) -> list[torch.Tensor]:
        model.zero_grad()
        model(batch(number, ROWS if number % 2 else ROWS // 2)).square().mean().backward()
        return gradients_of(model)

    return step


def changing_model() -> Step:
    layers = list(model_of(8))

    def step(number: int) -> list[torch.Tensor]:
        model = nn.Sequential(*layers[: 8 if number < STEPS // 2 else 5])
        model.zero_grad()
        model(batch(number)).square().mean().backward()
        return gradients_of(model)

    return step


def inferring() -> Step:
    model = model_of(12)

    def step(number: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(batch(number, ROWS // 8)).softmax(-1) for _ in range(10)]

    return step


def of_kind(forward: Callable[[nn.Sequential, torch.Tensor], torch.Tensor], **options: object) -> Callable[[], Step]:
    def begin() -> Step:
        model = model_of(**options)

        def step(number: int) -> list[torch.Tensor]:
            model.zero_grad()
            forward(model, batch(number)).square().mean().backward()
            return gradients_of(model)

        return step

    return begin


def cast(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float()


def checkpointed(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def cubed(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = Cube.apply(layer(x)) * 0.1
    return x


def hooked(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(lambda saved: (saved,), lambda packed: packed[0]):
        return model(x)


def in_place(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = layer(x).mul_(0.5)
    return x


def twice_differentiated(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient


def interrupted() -> Step:
    """A forward that fails at another op each time."""
    model = model_of()
    countdown = [0]

    def count(module: nn.Module, _arguments: object) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise RuntimeError("as asked")

    for layer in model:
        layer.register_forward_pre_hook(count)

    def step(number: int) -> list[torch.Tensor]:
        model.zero_grad()
        countdown[0] = number % 6 + 1 if number % 2 else 0
        try:
            model(batch(number)).square().mean().backward()
        except RuntimeError as error:
            assert str(error) == "as asked"  # noqa: PT017
        countdown[0] = 0
        model(batch(number)).square().mean().backward()
        return gradients_of(model)

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    "training": plain_training,
    "large head": with_a_large_head,
    "dropout": lambda: plain_training(dropout=0.2),
    "batch norm": lambda: plain_training(norm=True),
    "accumulation": accumulating,
    "evaluation between": evaluating_between,
    "adversarial": adversarial,
    "changing shapes": changing_shapes,
    "inference": inferring,
    "changing model": changing_model,
    "autocast": of_kind(cast),
    "checkpoint": of_kind(checkpointed),
    "custom function": of_kind(cubed),
    "saved tensor hooks": of_kind(hooked),
    "in place": of_kind(in_place),
    "double backward": of_kind(twice_differentiated),
    "exceptions": interrupted,
}


def wait_for_planner() -> None:
    for thread in threading.enumerate():
        while thread.name == "torch_lms planner" and thread in threading.enumerate():
            if thread.is_alive():
                thread.join()
            else:
                time.sleep(0.001)  # another thread is about to start it, and it cannot be joined before


def digest(tensors: list[torch.Tensor]) -> list[str]:
    """Every bit, in little memory."""
    return [hashlib.sha256(t.clone().reshape(-1).view(torch.uint8).numpy()).hexdigest() for t in tensors]


def run(begin: Callable[[], Step]) -> Iterator[list[str]]:
    step = begin()
    for number in range(STEPS):
        yield digest(step(number))
        wait_for_planner()


def limit_for(begin: Callable[[], Step], share: float = 0.6) -> int:
    """What the process holds already, and a share of what a program needs besides."""
    return limit_and_results(begin, share)[0]


def limit_and_results(begin: Callable[[], Step], share: float = 0.6) -> tuple[int, list[list[str]]]:
    """The same, and what the program makes without a limit."""
    gc.collect()
    torch_lms.swap.count_cpu_allocations()
    held_bytes = torch_lms.stats(reset=True).allocated_bytes
    results = list(run(begin))
    return held_bytes + int(share * (torch_lms.stats().peak_allocated_bytes - held_bytes)), results


def on(limit_bytes: int, **options: bool) -> None:
    torch_lms.enable({"cpu": limit_bytes}, min_bytes=MIN_BYTES, **options)
    torch_lms.stats(reset=True)
