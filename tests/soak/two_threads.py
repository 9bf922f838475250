"""Threads that use one paged-out weight at the same moment: one of them brings it in, all find it whole."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

import torch_lms
from tests.soak.program import Given, finish, parse, run_threads


class Rounds:
    """Before each round the last thread to arrive pages the weight out; then all use it at once."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.weight = torch.randn(256, 1024, device=given.device)
        self.x = torch.randn(8, 256, device=given.device)
        self.expected = [use() for use in self.uses()]
        self.barrier = threading.Barrier(given.threads, action=self.begin)
        self.count = 0
        self.over = False
        self.wrong: list[str] = []

    def uses(self) -> list[Callable[[], float]]:
        """Ways to read the weight."""
        return [lambda: self.weight.sum().item(), lambda: (self.x @ self.weight).sum().item()]

    def begin(self) -> None:
        """Pages out, unless the time is up."""
        self.over = self.given.is_over()
        if not self.over:
            torch_lms.pageout(self.weight)
            torch_lms.wait()
            self.count += 1

    def take_part(self) -> None:
        """One thread's part of every round."""
        uses = self.uses()
        while True:
            self.barrier.wait()
            if self.over:
                return
            which = self.count % len(uses)
            found = uses[which]()
            if found != self.expected[which]:
                self.wrong.append(f"round {self.count}: expected {self.expected[which]}, found {found}")


def main() -> None:
    given = parse(__doc__)
    rounds = Rounds(given)
    failures = run_threads([rounds.take_part] * given.threads, barrier=rounds.barrier)
    finish(f"{rounds.count} rounds of {given.threads} threads", failures + rounds.wrong)


if __name__ == "__main__":
    main()
