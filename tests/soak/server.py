"""Threads that answer requests with weights which they share and which exceed the limit, in automatic mode."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

import torch_lms
from tests.soak.program import Given, finish, parse, run_threads

LAYERS = 64
SIZES = {"cpu": 512, "cuda": 2048}  # weights of 64 MiB and of 1 GiB in all
LIMITS = {"cpu": "40MiB", "cuda": "600MiB"}


class Server:
    """Weights that every thread reads, each on its own way through them."""

    def __init__(self, given: Given) -> None:
        self.given = given
        size = SIZES[given.device]
        self.weights = [torch.randn(size, size, device=given.device) for _ in range(LAYERS)]
        self.x = torch.randn(32, size, device=given.device)
        self.expected = [self.answer(index) for index in range(LAYERS)]
        self.passes = 0
        self.wrong: list[str] = []

    def answer(self, index: int) -> float:
        """What one weight gives."""
        return float((self.x @ self.weights[index]).sum().item())

    def worker(self, number: int) -> Callable[[], None]:
        """A thread's body: forwards, backwards, or from anywhere."""
        choose = random.Random(1000 * self.given.seed + number)

        def run() -> None:
            while not self.given.is_over():
                first, way = choose.randrange(LAYERS), choose.choice((1, -1))
                for step in range(LAYERS):
                    index = (first + way * step) % LAYERS
                    found = self.answer(index)
                    if found != self.expected[index]:
                        self.wrong.append(f"weight {index}: expected {self.expected[index]}, found {found}")
                self.passes += 1

        return run


def main() -> None:
    given = parse(__doc__, threads=4)
    torch_lms.enable({given.device: LIMITS[given.device]}, min_bytes="64KiB")
    server = Server(given)
    failures = run_threads([server.worker(number) for number in range(given.threads)])
    out_mib = torch_lms.stats().pageout_bytes >> 20
    if not out_mib:
        failures.append("expected page-outs, found none: the limit was not reached")
    finish(f"{server.passes} passes of {given.threads} threads, {out_mib} MiB paged out", failures + server.wrong)


if __name__ == "__main__":
    main()
