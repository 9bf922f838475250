"""Synthetic traces: programs written op by op, and a GPT of the shapes in which the measured one ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch_lms.plan.trace import Link, Recipe, Trace, TraceOp, TraceStorage

H200_LINK = Link(out_bytes_per_us=55_000.0, in_bytes_per_us=55_000.0, latency_us=10.0)
_MATMUL_FLOPS_PER_US = 0.62e9
_MEMORY_BYTES_PER_US = 3.6e6


@dataclass
class _Draft:
    bytes: int
    producer: int | None
    recurring: bool = False
    recompute: Recipe | None = None
    uses: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    released: int | None = None
    why_not_recompute: str = ""


class Program:
    """Records ops one after the other, as the core would.

    Args:
        link: between device and host.
    """

    def __init__(self, link: Link = H200_LINK) -> None:
        self.link = link
        self.ops: list[TraceOp] = []
        self.drafts: list[_Draft] = []
        self.phase = "forward"

    def lasting(self, size_bytes: int) -> int:
        """A storage that exists at the start and lasts."""
        self.drafts.append(_Draft(bytes=size_bytes, producer=None, recurring=True))
        return len(self.drafts) - 1

    def op(
        self,
        name: str,
        duration_us: float,
        *,
        reads: Iterable[int] = (),
        makes: Sequence[int] = (),
        writes: Iterable[int] = (),
        recipe: bool = True,
        other_bytes: int = 0,
    ) -> list[int]:
        """Runs an op that makes storages of the given sizes; their ids."""
        place = len(self.ops)
        self.ops.append(TraceOp(name=name, phase=self.phase, duration_us=duration_us, other_bytes=other_bytes))
        reads, writes = list(reads), list(writes)
        for used in (*reads, *writes):
            self.drafts[used].uses.add(place)
        for written in writes:
            self.drafts[written].writes.add(place)
        made = []
        for size in makes:
            way = Recipe(duration_us=duration_us, inputs=tuple(reads)) if recipe else None
            why = "" if recipe else f"{name} is random"
            self.drafts.append(_Draft(bytes=size, producer=place, recompute=way, why_not_recompute=why))
            made.append(len(self.drafts) - 1)
        return made

    def release(self, *storages: int) -> None:
        """Nobody holds these after the last op."""
        for storage in storages:
            self.drafts[storage].released = len(self.ops) - 1

    def trace(self) -> Trace:
        """All of it."""
        storages = tuple(
            TraceStorage(
                bytes=one.bytes, recurring=one.recurring, producer=one.producer, released=one.released,
                uses=tuple(sorted(one.uses)), writes=tuple(sorted(one.writes)), recompute=one.recompute,
                why_not_recompute=one.why_not_recompute, module=f"layers.{number}", line=f"model.py:{number}",
            )
            for number, one in enumerate(self.drafts)
        )  # fmt: skip
        return Trace(device="cuda:0", signature="5eed", link=self.link, ops=tuple(self.ops), storages=storages)


class _Gpt(Program):
    """The ops of a GPT, with times from the bytes and the operations that they take."""

    def __init__(self, *, layers: int, width: int, tokens: int, vocabulary: int, weight_bytes: int, link: Link) -> None:
        super().__init__(link)
        self.width, self.tokens, self.vocabulary = width, tokens, vocabulary
        self.unit = tokens * width * 2
        self.layers = layers
        self.weight_bytes = weight_bytes

    def light(self, name: str, reads: Sequence[int], makes: Sequence[int], *, recipe: bool = True) -> list[int]:
        moved = sum(self.drafts[one].bytes for one in reads) + sum(makes)
        return self.op(name, 6.0 + moved / _MEMORY_BYTES_PER_US, reads=reads, makes=makes, recipe=recipe)

    def matmul(self, reads: Sequence[int], makes: Sequence[int], flops: float, name: str = "aten::addmm") -> list[int]:
        return self.op(name, 8.0 + flops / _MATMUL_FLOPS_PER_US, reads=reads, makes=makes)

    def weight(self, inner: int, outer: int) -> int:
        return self.lasting(inner * outer * self.weight_bytes)


def gpt_trace(
    *,
    layers: int = 24,
    width: int = 2048,
    tokens: int = 16 * 2048,
    vocabulary: int = 50_304,
    weight_bytes: int = 2,
    link: Link = H200_LINK,
) -> Trace:
    """Forward and backward of a GPT, with the saved storages of eager PyTorch; weights and gradients recur."""
    program = _Gpt(
        layers=layers, width=width, tokens=tokens, vocabulary=vocabulary, weight_bytes=weight_bytes, link=link
    )
    forward = _forward(program)
    _backward(program, *forward)
    return program.trace()


def _forward(p: _Gpt) -> tuple[list[dict[str, int]], dict[str, int]]:
    u, flops = p.unit, 2.0 * p.tokens * p.width * p.width
    embedding = p.weight(p.vocabulary, p.width)
    [x] = p.light("aten::embedding", [embedding], [u])
    saved = []
    for _ in range(p.layers):
        block = {"x": x}
        block["w_qkv"], block["w_proj"] = p.weight(p.width, 3 * p.width), p.weight(p.width, p.width)
        block["w_up"], block["w_down"] = p.weight(p.width, 4 * p.width), p.weight(4 * p.width, p.width)
        [block["norm1"]] = p.light("aten::native_layer_norm", [x], [u])
        [block["qkv"]] = p.matmul([block["norm1"], block["w_qkv"]], [3 * u], 3 * flops)
        attention_flops = 2.0 * p.tokens * 2048 * p.width * 1.4
        [block["attention"]] = p.matmul(
            [block["qkv"]], [u], attention_flops, "aten::_scaled_dot_product_flash_attention"
        )
        [projected] = p.matmul([block["attention"], block["w_proj"]], [u], flops)
        [block["x2"]] = p.light("aten::add", [x, projected], [u])
        p.release(projected)
        [block["norm2"]] = p.light("aten::native_layer_norm", [block["x2"]], [u])
        [block["up"]] = p.matmul([block["norm2"], block["w_up"]], [4 * u], 4 * flops)
        [block["gelu"]] = p.light("aten::gelu", [block["up"]], [4 * u])
        [down] = p.matmul([block["gelu"], block["w_down"]], [u], 4 * flops)
        [x] = p.light("aten::add", [block["x2"], down], [u])
        p.release(down)
        saved.append(block)
    head = {"x": x, "embedding": embedding}
    [head["norm"]] = p.light("aten::native_layer_norm", [x], [u])
    wide = p.tokens * p.vocabulary * 2
    [head["logits"]] = p.matmul([head["norm"], embedding], [wide], 2.0 * p.tokens * p.width * p.vocabulary)
    [head["losses"]] = p.light("aten::_log_softmax", [head["logits"]], [wide])
    p.release(head["logits"])
    return saved, head


def _backward(p: _Gpt, saved: list[dict[str, int]], head: dict[str, int]) -> None:
    u, flops, wide = p.unit, 2.0 * p.tokens * p.width * p.width, p.tokens * p.vocabulary * 2
    p.phase = "backward"
    [grad] = p.light("aten::_log_softmax_backward_data", [head["losses"]], [wide], recipe=False)
    p.release(head["losses"])
    head_flops = 2.0 * p.tokens * p.width * p.vocabulary
    g_embedding = _weight_gradient(p, head["embedding"], grad, head["norm"], head_flops)
    grad = _through(p, grad, [head["embedding"]], u, head_flops)
    p.release(head["norm"])
    grad = _light_backward(p, grad, head["x"])
    for block in reversed(saved):
        grad = _block_backward(p, block, grad, u, flops)
    p.op("aten::embedding_backward", 100.0, reads=[grad], writes=[g_embedding], recipe=False)
    p.release(grad)


def _block_backward(p: _Gpt, block: dict[str, int], grad: int, u: int, flops: float) -> int:
    residual = grad
    _weight_gradient(p, block["w_down"], residual, block["gelu"], 4 * flops)
    p.release(block["gelu"])
    [grad] = p.matmul([residual, block["w_down"]], [4 * u], 4 * flops, "aten::mm")
    grad = _light_backward(p, grad, block["up"])
    _weight_gradient(p, block["w_up"], grad, block["norm2"], 4 * flops)
    p.release(block["norm2"])
    grad = _through(p, grad, [block["w_up"]], u, 4 * flops)
    grad = _light_backward(p, grad, block["x2"])
    [joined] = p.light("aten::add", [residual, grad], [u], recipe=False)
    p.release(residual, grad)
    _weight_gradient(p, block["w_proj"], joined, block["attention"], flops)
    [grad] = p.matmul([joined, block["w_proj"]], [u], flops, "aten::mm")
    [wide] = p.op(
        "aten::_flash_attention_backward",
        2.5 * 2.0 * p.tokens * 2048 * p.width * 1.4 / _MATMUL_FLOPS_PER_US,
        reads=[grad, block["qkv"], block["attention"]], makes=[3 * u], recipe=False,
    )  # fmt: skip
    p.release(grad, block["qkv"], block["attention"])
    _weight_gradient(p, block["w_qkv"], wide, block["norm1"], 3 * flops)
    p.release(block["norm1"])
    grad = _through(p, wide, [block["w_qkv"]], u, 3 * flops)
    grad = _light_backward(p, grad, block["x"])
    [out] = p.light("aten::add", [joined, grad], [u], recipe=False)
    p.release(joined, grad)
    return out


def _weight_gradient(p: _Gpt, weight: int, grad: int, source: int, flops: float) -> int:
    [made] = p.op(
        "aten::mm", 8.0 + flops / _MATMUL_FLOPS_PER_US, reads=[grad, source], makes=[p.drafts[weight].bytes],
        recipe=False,
    )  # fmt: skip
    p.drafts[made].recurring = True
    return made


def _through(p: _Gpt, grad: int, weights: list[int], size: int, flops: float) -> int:
    [made] = p.op("aten::mm", 8.0 + flops / _MATMUL_FLOPS_PER_US, reads=[grad, *weights], makes=[size], recipe=False)
    p.release(grad)
    return made


def _light_backward(p: _Gpt, grad: int, source: int) -> int:
    [made] = p.light("aten::backward", [grad, source], [p.drafts[source].bytes], recipe=False)
    p.release(grad, source)
    return made
