"""Threads that use the same paged-out weights at the same moment: one of them brings each in, all find it whole."""

from __future__ import annotations

import threading

import torch

import torch_lms
from tests.soak.program import Given, finish, parse, run_threads

WEIGHTS = 8


class Rounds:
    """Before each round the last thread to arrive pages the weights out; then all use them at once."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.weights = [torch.randn(64, 256 << index % 3, device=given.device) for index in range(WEIGHTS)]
        self.x = torch.randn(4, 64, device=given.device)
        self.expected = [self.use(index, round_) for round_ in (0, 1) for index in range(WEIGHTS)]
        self.barrier = threading.Barrier(given.threads, action=self.begin)
        self.count = 0
        self.over = False
        self.wrong: list[str] = []

    def use(self, index: int, round_: int) -> float:
        """Reads a weight: by itself in even rounds, beside another input in odd ones."""
        weight = self.weights[index]
        return float((self.x @ weight if round_ % 2 else weight).sum().item())

    def begin(self) -> None:
        """Pages out, unless the time is up."""
        self.over = self.given.is_over()
        if not self.over:
            torch_lms.pageout(self.weights)
            torch_lms.wait()
            self.count += 1

    def take_part(self) -> None:
        """One thread's part of every round."""
        while True:
            self.barrier.wait()
            if self.over:
                return
            round_ = self.count
            for index in range(WEIGHTS):
                found, expected = self.use(index, round_), self.expected[WEIGHTS * (round_ % 2) + index]
                if found != expected:
                    self.wrong.append(f"round {round_}, weight {index}: expected {expected}, found {found}")


def main() -> None:
    given = parse(__doc__)
    rounds = Rounds(given)
    failures = run_threads([rounds.take_part] * given.threads, barrier=rounds.barrier)
    finish(f"{rounds.count} rounds of {given.threads} threads", failures + rounds.wrong)


if __name__ == "__main__":
    main()
