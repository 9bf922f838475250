"""The MLMS manual's program on the fork's CUDA wheel: activations leave in the forward, are fetched for the backward.

Each row is a process of its own. A paged run must give the plain run's losses and gradients, bit for bit, and is
compared with the longer of two times: the plain step, and the time that the link needs for what is moved, at the rates
of plain copies in the same process. Rows with a limit are the plain program behind IBM's names, in a part of the plain
peak. The last rows have more activations than the GPU has memory: plain, they must fail.

It runs in an environment with the fork's CUDA wheel:

    python3 -m benchmarks.fork_training
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import torch_lms
from benchmarks.fork_step_worker import Block, bottlenecks, stem
from benchmarks.fresh import CallFailedError, FreshProcesses, News, Row
from benchmarks.results import Result
from benchmarks.training import GIB, gradient_digest, make_deterministic

COLUMNS = [
    ("model", "Training", "{}"),
    ("way", "Way", "{}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("peak_gib", "Peak (GiB)", "{:.1f}"),
    ("out_gib", "Moved out (GiB)", "{:.1f}"),
    ("passive_pageins", "Page-ins that an access made", "{}"),
    ("link_ms", "Link's time (ms)", "{:.0f}"),
    ("over_bound", "Step / bound", "{:.2f}"),
]
MOST_OVER_BOUND = 1.10
LEAST_BYTES = 1 << 20  # smaller tensors stay
UNDER_WAY = 2  # blocks whose backward has been submitted and need not have begun: a page-in's copy waits for them
fork: Any = torch.cuda  # with the patches' functions
WAIT_ABOVE = 0.7  # of the GPU's memory
LIMIT = 0.7  # of the plain peak
Loss = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A training in one way.

    Attributes:
        model: its name.
        batch: samples.
        way: plain; paged, where what is saved for the backward leaves by hand; or limit.
        limit_bytes: with a limit: its size, or 0 for what the GPU has.
        stay: the last modules, of which nothing leaves: the link has the time of the forward for the others.
        warmup: steps that are not timed.
        steps: that are.
    """

    model: str
    batch: int
    way: str
    stay: int = 0
    limit_bytes: int = 0
    warmup: int = 2
    steps: int = 5

    @property
    def title(self) -> str:
        """What is trained."""
        return f"{TITLES[self.model]}, batch {self.batch}"


TITLES = {"gpt": "GPT, 24 layers, hidden 2048, 1024 tokens, fp32", "cnn": "ResNet-50 without cuDNN, 128 x 128, fp32"}
CASES = [
    Case("cnn", 128, "plain", warmup=5, steps=15),
    Case("cnn", 128, "paged", stay=8, warmup=5, steps=15),
    Case("gpt", 8, "plain"),
    Case("gpt", 8, "paged", stay=13),
]
BEYOND = [
    Case("gpt", 18, "plain", warmup=1, steps=2),
    Case("gpt", 18, "paged", stay=8, warmup=1, steps=2),
    Case("gpt", 18, "limit", warmup=1, steps=2),
]


def gpt(batch: int) -> tuple[nn.Sequential, Loss]:
    """A GPT of 1.3 thousand million parameters."""
    hidden, vocabulary, tokens = 2048, 32000, 1024
    blocks = (Block(hidden, 16) for _ in range(24))
    model = nn.Sequential(
        nn.Embedding(vocabulary, hidden), *blocks, nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
    )
    ids = torch.randint(vocabulary, (batch, tokens + 1), device="cuda")
    return model, lambda model: functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def cnn(batch: int) -> tuple[nn.Sequential, Loss]:
    """A ResNet-50."""
    blocks, channels = bottlenecks()
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    images, classes = torch.randn(batch, 3, 128, 128, device="cuda"), torch.randint(1000, (batch,), device="cuda")
    return nn.Sequential(nn.Sequential(*stem()), *blocks, head), lambda model: functional.cross_entropy(
        model(images), classes
    )


class Activations:
    """What autograd saves, block by block: out behind a block's forward, back before its backward.

    The last blocks stay. As their memory becomes free, block by block, others are fetched: always as many blocks ahead
    as have stayed. A page-in's copy comes after all work that has been submitted when it begins, so the host must not
    run far ahead of the device: it waits until the backward of some block before has begun. Used from one thread at a
    time, as a step is.

    Args:
        model: whose children are the blocks.
        stay: how many of the last ones.
    """

    def __init__(self, model: nn.Sequential, stay: int) -> None:
        self._stay = stay
        self._blocks: list[list[Any]] = [[] for _ in model]
        self._of_block = 0  # whose forward runs
        self._fetched = 0  # this one and those behind it are there, or have been fetched
        self._begun: list[torch.cuda.Event] = []  # backwards that were submitted last
        self._most_bytes = WAIT_ABOVE * torch.cuda.get_device_properties(0).total_memory
        self._parameters = {parameter.data_ptr() for parameter in model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        for index, block in enumerate(model):
            block.register_forward_pre_hook(lambda *_, index=index: self._begin(index))

    def forward(self, loss_of: Loss, model: nn.Module) -> torch.Tensor:
        """The loss; then all that has to be away is away, and what the backward begins with is on its way back."""
        with self._hooks:
            loss = loss_of(model)
        fork.before_prefetch_wait_all()
        fork.prefetch_init()
        self._of_block = len(self._blocks)
        self._fetched = max(len(self._blocks) - self._stay, 0)
        self._begun.clear()
        fork.prefetch_all()
        return loss

    def _begin(self, index: int) -> None:
        """A block begins: what the one before it saved leaves, but for this one's input."""
        self._of_block = index
        if torch.cuda.memory_allocated() > self._most_bytes:
            fork.before_prefetch_wait_all()  # the link is behind; the first step also has to pin host memory
        if 0 <= index - 1 < len(self._blocks) - self._stay:
            for tensor in self._blocks[index - 1]:
                tensor.pageout_manual()

    def _pack(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        if self._leaves(tensor):
            self._blocks[self._of_block].append(tensor)
        return self._of_block, tensor

    def _leaves(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != "cuda" or tensor.numel() * tensor.element_size() < LEAST_BYTES:
            return False
        if fork.swap.state(tensor) != "resident":
            return True  # an activation that is used again; asking for its address would bring it back
        return tensor.storage().data_ptr() not in self._parameters

    def _unpack(self, packed: tuple[int, torch.Tensor]) -> torch.Tensor:
        """A block's backward wants a tensor: those of the blocks that come soon are fetched."""
        index, tensor = packed
        if index < self._of_block:
            self._of_block = index
            if len(self._begun) == UNDER_WAY:
                self._begun.pop(0).synchronize()
            self._begun.append(torch.cuda.Event())
            self._begun[-1].record()
            self._blocks[index].clear()  # autograd has them
            self._fetch(index + 1 - self._stay)
        return tensor

    def _fetch(self, first: int) -> None:
        while self._fetched > max(first, 0):
            self._fetched -= 1
            for tensor in reversed(self._blocks[self._fetched]):
                tensor.need_prefech()


def link_rates() -> tuple[float, float]:
    """Bytes per second of plain copies of 256 MiB between pinned memory and the device: out, in."""
    device = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    host = torch.empty(256 << 20, dtype=torch.uint8).pin_memory()
    rates = []
    for target, source in ((host, device), (device, host)):
        seconds = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        rates.append(device.numel() / statistics.median(seconds))
    return rates[0], rates[1]


def train(case: Case, news: News) -> Row:
    """Steps of a case: times, peak, losses, and a digest of the last step's gradients."""
    make_deterministic(warn_only=True)
    torch.manual_seed(0)
    if case.way == "limit":
        torch_lms.swap.mlms.attach()
        fork.set_limit_lms(case.limit_bytes or None)
        fork.set_enabled_lms(True)
    torch.set_default_tensor_type("torch.cuda.FloatTensor")  # no large model is made in main memory
    model, loss_of = {"gpt": gpt, "cnn": cnn}[case.model](case.batch)
    torch.set_default_tensor_type("torch.FloatTensor")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    out_rate, in_rate = link_rates()
    activations = None
    if case.way == "paged":
        fork.create_swap_env()
        fork.prefetch_all()
        activations = Activations(model, case.stay)
    seconds: list[float] = []
    losses: list[str] = []
    digest = ""
    for index in range(case.warmup + case.steps):
        if index == case.warmup:
            torch.cuda.reset_peak_memory_stats()
            fork.swap.stats(reset=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = loss_of(model) if activations is None else activations.forward(loss_of, model)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.item()).hex())
        if index == case.warmup + case.steps - 1:
            digest = gradient_digest(model)
        optimizer.zero_grad(set_to_none=True)
        del loss
        news({"steps_done": index + 1, "seconds": seconds[-1]})
    row: Row = {
        "model": case.title, "way": case.way,
        "step_ms": 1e3 * statistics.median(seconds[case.warmup :]), "steps_ms": [1e3 * one for one in seconds],
        "peak_gib": torch.cuda.max_memory_allocated() / GIB, "losses": losses, "gradients": digest,
        "link_out_gb_per_s": out_rate / 1e9, "link_in_gb_per_s": in_rate / 1e9,
    }  # fmt: skip
    if case.way != "plain":
        row.update(_paging(case.steps, out_rate, in_rate))
    if case.way == "paged":
        fork.close_swap_env()
    if case.way == "limit":
        row["limit_gib"] = torch_lms.stats().limit_bytes / GIB
    return row


def _paging(steps: int, out_rate: float, in_rate: float) -> dict[str, Any]:
    """What a step moved, and how long the link needs for it."""
    done = fork.swap.stats()
    out_bytes, in_bytes = done["pageout_bytes"] / steps, done["pagein_bytes"] / steps
    return {
        "out_gib": out_bytes / GIB, "in_gib": in_bytes / GIB,
        "passive_pageins": done["passive_pageins"] // steps, "prefetch_hits": done["prefetch_hits"] // steps,
        "cancelled_pageouts": done["cancelled_pageouts"] // steps, "host_gib": done["host_bytes"] / GIB,
        "link_ms": 1e3 * (out_bytes / out_rate + in_bytes / in_rate),
    }  # fmt: skip


def compare(result: Result, processes: FreshProcesses, cases: list[Case]) -> None:
    """Adds the rows of a training, plain, paged and with a limit, and holds the others against the first."""
    plain, paged = (processes.call(train, case, seconds=240) for case in cases)
    limit_bytes = int(LIMIT * plain["peak_gib"] * GIB)
    limited = processes.call(train, replace(cases[0], way="limit", limit_bytes=limit_bytes), seconds=240)
    title = cases[0].title
    for row in (paged, limited):
        row["over_bound"] = row["step_ms"] / max(plain["step_ms"], row["link_ms"])
        for key in ("losses", "gradients"):
            same = plain[key] == row[key]
            result.check(f"{title}, {row['way']}: {key} are the plain run's bits", "equal", str(same), same)
    for row in (plain, paged, limited):
        result.add(**row)
    over = round(paged["over_bound"], 3)
    what = f"{title}: paged step over the longer of the plain step and the link's time"
    result.check(what, f"at most {MOST_OVER_BOUND}", over, over <= MOST_OVER_BOUND)
    less = paged["peak_gib"] < plain["peak_gib"]
    result.check(f"{title}: paging lowers the peak", "True", str(less), less)
    kept = limited["peak_gib"] <= limited["limit_gib"]
    what = f"{title}: peak with a limit, GiB"
    result.check(what, f"at most {limited['limit_gib']:.1f}", round(limited["peak_gib"], 1), kept)


def go_beyond(result: Result, processes: FreshProcesses) -> None:
    """Adds a training that does not fit: paged or with a limit it runs, plain it must not."""
    plain, *others = BEYOND
    try:
        ran = f"ran, {processes.call(train, plain, seconds=120)['peak_gib']:.1f} GiB"
    except CallFailedError as error:
        ran = "out of memory" if "out of memory" in str(error) else str(error)[:300]
    result.check(f"{plain.title}: plain", "out of memory", ran, ran == "out of memory")
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    rows = [processes.call(train, case, seconds=240) for case in others]
    for row in rows:
        result.add(**row)
        need = row["peak_gib"] + row["out_gib"]
        what = f"{plain.title}, {row['way']}: peak and what is out, GiB"
        result.check(what, f"more than {memory:.1f}", round(need, 1), need > memory)
    same = rows[0]["losses"] == rows[1]["losses"] and rows[0]["gradients"] == rows[1]["gradients"]
    result.check(f"{plain.title}: both give the same bits", "True", str(same), same)


def main() -> None:
    """Runs all rows, or those of one model, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cnn", "gpt", "beyond"))
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    processes = FreshProcesses(method="spawn")
    title = "The manual's program on the fork's CUDA wheel, v1.13.1, CUDA 11.8"
    result = Result(name="fork_training", title=title, columns=COLUMNS)
    for model in ("cnn", "gpt"):
        if given.only in (None, model):
            compare(result, processes, [case for case in CASES if case.model == model])
            result.write(given.output_dir)
    if given.only in (None, "beyond"):
        go_beyond(result, processes)
    result.write(given.output_dir)


if __name__ == "__main__":
    main()
