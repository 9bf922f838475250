"""Threads that page out, prefetch, use, replace and grow the same tensors: no call raises, and no byte is lost.

What PyTorch itself does not allow to happen at once (writing to a tensor, or resizing its storage, beside other uses)
takes turns by a lock; page-outs and prefetches come at any time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import torch_lms
from tests.soak.program import Given, finish, parse, run_threads

SIZES = (1 << 10, 1 << 16, 1 << 18)  # elements
SLOTS = 12


@dataclass
class Slot:
    """A tensor whose every element has one value. Those that are shared are read at any time, never written to."""

    tensor: torch.Tensor
    index: int
    value: int
    shared: bool
    lock: threading.Lock = field(default_factory=threading.Lock)


class Race:
    """The slots, and what a thread may do with one."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.slots = [self.make(index, shared=bool(index % 2)) for index in range(SLOTS)]
        self.actions = 0
        self.wrong: list[str] = []

    def make(self, index: int, *, shared: bool) -> Slot:
        """A new tensor."""
        tensor = torch.full((SIZES[index % len(SIZES)],), float(index), device=self.given.device)
        return Slot(tensor=tensor, index=index, value=index, shared=shared)

    def use(self, slot: Slot) -> None:
        """Reads every element; those of a tensor that is not shared are written, too."""
        if slot.shared:
            self.check(slot.tensor, slot.value)
            return
        with slot.lock:
            self.check(slot.tensor, slot.value)
            slot.tensor.add_(1)
            slot.value += 1

    def grow(self, slot: Slot) -> None:
        """Makes the storage larger, which moves it."""
        if not slot.shared:
            with slot.lock:
                storage = slot.tensor.untyped_storage()
                if storage.nbytes() < 8 * slot.tensor.nbytes:
                    storage.resize_(2 * storage.nbytes())
                self.check(slot.tensor, slot.value)

    def replace(self, slot: Slot) -> None:
        """Frees a tensor, maybe while others page it."""
        self.slots[slot.index] = self.make(slot.index, shared=slot.shared)

    def check(self, tensor: torch.Tensor, value: int) -> None:
        """Notes a tensor that has other values."""
        if not bool((tensor == value).all()):
            self.wrong.append(f"expected {value} in {tensor.numel()} elements, found {tensor.unique().tolist()[:5]}")

    def worker(self, number: int) -> Callable[[], None]:
        """A thread's body: any action on any slot."""
        choose = random.Random(1000 * self.given.seed + number)

        def run() -> None:
            while not self.given.is_over() and not self.wrong:
                slot = self.slots[choose.randrange(SLOTS)]
                action = choose.choices(("out", "in", "use", "grow", "replace"), weights=(8, 4, 8, 1, 1))[0]
                if action == "out":
                    torch_lms.pageout(slot.tensor)
                elif action == "in":
                    torch_lms.prefetch(slot.tensor)
                else:
                    {"use": self.use, "grow": self.grow, "replace": self.replace}[action](slot)
                self.actions += 1

        return run


def main() -> None:
    given = parse(__doc__, threads=8)
    race = Race(given)
    failures = run_threads([race.worker(number) for number in range(given.threads)])
    torch_lms.wait()
    facts = f"{race.actions} actions of {given.threads} threads, {torch_lms.stats().pageouts} page-outs"
    finish(facts, failures + race.wrong)


if __name__ == "__main__":
    main()
