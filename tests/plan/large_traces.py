"""Traces of programs with thousands of ops and storages: a mixture of experts, and an encoder with its decoder.

Forward is written op by op onto a tape; backward follows from it, as autograd would run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.plan.traces import Program
from torch_lms.plan.trace import Trace

__all__ = ["encoder_decoder_trace", "experts_trace"]

_MATMUL_FLOPS_PER_US = 0.4e9
_MEMORY_BYTES_PER_US = 2.5e6
_LAUNCH_US = 5.0
_HALF = 2  # bytes of a number


@dataclass(frozen=True)
class _Taped:
    name: str
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    saved: tuple[int, ...]
    output: int
    flops: float


class _Tape:
    def __init__(self) -> None:
        self._program = Program()
        self._taped: list[_Taped] = []
        self._gradients: dict[int, int] = {}

    def weight(self, inner: int, outer: int) -> int:
        """The weight of a matrix multiplication."""
        return self._program.lasting(inner * outer * _HALF)

    def op(
        self,
        name: str,
        inputs: Sequence[int],
        size_bytes: int,
        *,
        weights: Sequence[int] = (),
        flops: float = 0.0,
        saves_output: bool = False,
        recipe: bool = True,
    ) -> int:
        """An op of the forward pass, whose backward reads its inputs, or instead of them its output."""
        output = self._run(f"aten::{name}", [*inputs, *weights], size_bytes, flops, recipe=recipe)
        # An addition's backward reads nothing but the gradient.
        saved = (output,) if saves_output else () if name == "add" else tuple(inputs)
        self._taped.append(_Taped(name, tuple(inputs), tuple(weights), saved, output, flops))
        return output

    def linear(self, given: int, tokens: int, inner: int, outer: int) -> int:
        """A multiplication by a weight of its own."""
        weights = [self.weight(inner, outer)]
        return self.op("mm", [given], tokens * outer * _HALF, weights=weights, flops=2.0 * tokens * inner * outer)

    def trace(self, loss: int) -> Trace:
        """Runs the backward pass from a storage on; what nothing uses any more is released."""
        self._program.phase = "backward"
        self._gradients[loss] = self._run("aten::ones_like", [], self._bytes(loss), recipe=False)
        for taped in reversed(self._taped):
            self._back(taped)
        for draft in self._program.drafts:
            if not draft.recurring:
                draft.released = max(draft.uses, default=draft.producer)
        return self._program.trace()

    def _back(self, taped: _Taped) -> None:
        gradient = self._gradients.pop(taped.output, None)
        if gradient is None:
            return
        for weight in taped.weights:
            made = self._run("aten::mm", [gradient, *taped.inputs], self._bytes(weight), taped.flops, recipe=False)
            self._program.drafts[made].recurring = True
        for given in dict.fromkeys(taped.inputs):
            part = gradient
            if taped.name != "add":
                reads = [gradient, *(taped.weights or taped.saved)]
                name = f"aten::{taped.name}_backward"
                part = self._run(name, reads, self._bytes(given), taped.flops, recipe=False)
            before = self._gradients.get(given)
            if before is not None:
                part = self._run("aten::add", [before, part], self._bytes(given), recipe=False)
            self._gradients[given] = part

    def _run(self, name: str, reads: Sequence[int], size_bytes: int, flops: float = 0.0, *, recipe: bool) -> int:
        moved = size_bytes + sum(self._bytes(one) for one in reads)
        duration_us = _LAUNCH_US + max(moved / _MEMORY_BYTES_PER_US, flops / _MATMUL_FLOPS_PER_US)
        [made] = self._program.op(name, duration_us, reads=reads, makes=[size_bytes], recipe=recipe)
        return made

    def _bytes(self, storage: int) -> int:
        return self._program.drafts[storage].bytes


def experts_trace(*, layers: int = 28, experts: int = 8, tokens: int = 8192, width: int = 1024) -> Trace:
    """A mixture of experts, where each expert that has tokens runs ops of its own on small storages."""
    tape = _Tape()
    unit = tokens * width * _HALF
    x = tape.op("embedding", [tape.weight(32_000, width)], unit)
    for _ in range(layers):
        x = _attention(tape, x, _norm(tape, x, unit), tokens, width, key_width=width // 4)
        given = _norm(tape, x, unit)
        scores = tape.op("softmax", [tape.linear(given, tokens, width, 64)], tokens * 64 * _HALF, saves_output=True)
        for _ in range(experts):
            x = tape.op("add", [x, _expert(tape, given, scores, tokens, width)], unit)
    return tape.trace(_loss(tape, _norm(tape, x, unit), tokens, width))


def _expert(tape: _Tape, given: int, scores: int, tokens: int, width: int) -> int:
    rows, inner = tokens // 2, width // 2
    taken = tape.op("index", [given], rows * width * _HALF)
    gate, up = (tape.linear(taken, rows, width, inner) for _ in range(2))
    gated = tape.op("mul", [tape.op("silu", [gate], rows * inner * _HALF), up], rows * inner * _HALF)
    weighed = tape.op("mul", [tape.linear(gated, rows, inner, width), scores], rows * width * _HALF)
    return tape.op("index_put", [weighed], tokens * width * _HALF)


def encoder_decoder_trace(*, layers: int = 24, tokens: int = 8192, width: int = 1024) -> Trace:
    """An encoder, and a decoder whose every layer reads the encoder's result; attention and norms are of small ops."""
    tape = _Tape()
    unit = tokens * width * _HALF
    x = tape.op("embedding", [tape.weight(32_000, width)], unit)
    for _ in range(layers):
        x = _attention(tape, x, _norm(tape, x, unit), tokens, width, plain=True)
        x = _feed_forward(tape, x, tokens, width)
    encoded = _norm(tape, x, unit)
    x = tape.op("embedding", [tape.weight(32_000, width)], unit // 4)
    for _ in range(layers):
        x = _attention(tape, x, _norm(tape, x, unit // 4), tokens // 4, width, plain=True)
        x = _attention(tape, x, _norm(tape, x, unit // 4), tokens // 4, width, plain=True, source=(encoded, tokens))
        x = _feed_forward(tape, x, tokens // 4, width)
    return tape.trace(_loss(tape, _norm(tape, x, unit // 4), tokens // 4, width))


def _norm(tape: _Tape, x: int, size_bytes: int) -> int:
    scale = tape.op("rsqrt", [tape.op("mean", [tape.op("pow", [x], 2 * size_bytes)], 4096)], 4096, saves_output=True)
    return tape.op("mul", [tape.op("mul", [x, scale], size_bytes)], size_bytes)


def _attention(
    tape: _Tape,
    x: int,
    given: int,
    tokens: int,
    width: int,
    *,
    key_width: int | None = None,
    plain: bool = False,
    source: tuple[int, int] | None = None,
) -> int:
    """Attention with its residual; a plain one has its scores in memory, another one is a single op."""
    key_width, read = key_width or width, source or (given, tokens)
    unit = tokens * width * _HALF
    query = tape.op("rope", [tape.linear(given, tokens, width, width)], unit)
    key, value = (tape.linear(read[0], read[1], width, key_width) for _ in range(2))
    flops = 2.0 * tokens * 512 * width
    if plain:
        scores = tape.op("baddbmm", [query, key], tokens * 512 * 4 * _HALF, flops=flops)
        shares = tape.op("softmax", [scores], tokens * 512 * 4 * _HALF, saves_output=True)
        mixed = tape.op("bmm", [shares, value], unit, flops=flops)
    else:
        mixed = tape.op("attention", [query, key, value], unit, flops=2 * flops, recipe=False)
    return tape.op("add", [x, tape.linear(mixed, tokens, width, width)], unit)


def _feed_forward(tape: _Tape, x: int, tokens: int, width: int) -> int:
    up = tape.linear(_norm(tape, x, tokens * width * _HALF), tokens, width, 4 * width)
    active = tape.op("relu", [up], tokens * 4 * width * _HALF, saves_output=True)
    return tape.op("add", [x, tape.linear(active, tokens, 4 * width, width)], tokens * width * _HALF)


def _loss(tape: _Tape, x: int, tokens: int, width: int) -> int:
    logits = tape.linear(x, tokens, width, 32_000)
    return tape.op("log_softmax", [logits], tokens * 32_000 * _HALF, saves_output=True)
