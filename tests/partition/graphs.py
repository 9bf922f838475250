"""Cost graphs of well-known models, from formulas: floating point operations, bytes moved, and what autograd saves.

A node takes the longer of its operations at 300 TFLOP/s and its bytes at 3 TB/s, and 3 us to launch; backward takes
twice the operations where there are weights. Values are two bytes an element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_lms.partition import CostGraph, CostNode

__all__ = ["GRAPHS", "Maker", "amoebanet", "bert", "chain", "gpt", "llama", "resnet152", "t5", "unet"]

_FLOPS_PER_US = 300e6
_BYTES_PER_US = 3e6
_LAUNCH_US = 3.0
_ELEMENT = 2


@dataclass
class Maker:
    """Collects nodes."""

    nodes: list[CostNode] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)

    def input(self, name: str, elements: int) -> str:
        self.elements[name] = elements
        self.nodes.append(CostNode(name=name, kind="placeholder", output_bytes=8 * elements))
        return name

    def op(
        self,
        module: str,
        kind: str,
        inputs: Sequence[str],
        elements: int,
        *,
        flops: float = 0.0,
        weight: int = 0,
        tied: str = "",
        saves: Sequence[str] | None = None,
        saves_output: bool = False,
    ) -> str:
        """One operation; it saves its first input unless told otherwise."""
        name = f"{module}.{kind}".replace(".", "_")
        while name in self.elements:
            name += "_"
        read = sum(self.elements[one] for one in inputs) + weight
        moved_us = _ELEMENT * (read + elements) / _BYTES_PER_US
        forward = max(flops / _FLOPS_PER_US, moved_us) + _LAUNCH_US
        backward = max((2 if weight else 2.5) * flops / _FLOPS_PER_US, 2 * moved_us) + _LAUNCH_US
        own = tied or f"{module}.{kind}.weight"
        if weight:
            self.parameters.setdefault(own, _ELEMENT * weight)
        saved = list(inputs[:1] if saves is None else saves) + [name] * saves_output
        self.elements[name] = elements
        for one in [*saved, name]:
            self.storages.setdefault(one, _ELEMENT * self.elements[one])
        kept = tuple(dict.fromkeys(saved))
        self.nodes.append(
            CostNode(
                name=name, forward_us=forward, backward_us=backward, output_bytes=_ELEMENT * elements,
                gradient_bytes=_ELEMENT * elements, parameters=(own,) if weight else (), saved=kept,
                inputs=tuple(dict.fromkeys(inputs)), module=module, kind=kind, output_storages=(name,),
            )
        )  # fmt: skip
        return name

    def linear(self, module: str, x: str, rows: int, wide: int, out: int, kind: str = "linear", tied: str = "") -> str:
        flops = 2.0 * rows * wide * out
        return self.op(module, kind, [x], rows * out, flops=flops, weight=wide * out, tied=tied)

    def graph(self, *outputs: str) -> CostGraph:
        self.nodes.append(CostNode(name="output", kind="output", inputs=outputs))
        return CostGraph(nodes=tuple(self.nodes), parameter_bytes=self.parameters, storage_bytes=self.storages)


@dataclass(frozen=True)
class _Text:
    """Sizes of a transformer."""

    batch: int
    tokens: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


def _attention(make: Maker, at: str, x: str, size: _Text, memory: str = "") -> str:
    """Queries from x, keys and values from x or from memory; before the residual."""
    source = memory or x
    q, k, v = (
        make.linear(f"{at}.{name}", one, size.rows, size.hidden, size.hidden)
        for name, one in (("q", x), ("k", source), ("v", source))
    )
    flops = 4.0 * size.batch * size.tokens * size.tokens * size.hidden
    mixed = make.op(f"{at}.core", "attention", [q, k, v], size.rows * size.hidden, flops=flops, saves=[q, k, v],
                    saves_output=True)  # fmt: skip
    return make.linear(f"{at}.out", mixed, size.rows, size.hidden, size.hidden)


def _norm(make: Maker, at: str, x: str, size: _Text) -> str:
    return make.op(at, "norm", [x], size.rows * size.hidden, weight=size.hidden)


def _add(make: Maker, at: str, x: str, y: str, elements: int) -> str:
    return make.op(at, "add", [x, y], elements, saves=[])


def _mlp(make: Maker, at: str, x: str, size: _Text, gated: bool = False) -> str:
    up = make.linear(f"{at}.up", x, size.rows, size.hidden, size.inner)
    act = make.op(at, "gelu", [up], size.rows * size.inner)
    if gated:
        gate = make.linear(f"{at}.gate", x, size.rows, size.hidden, size.inner)
        act = make.op(at, "mul", [act, gate], size.rows * size.inner, saves=[act, gate])
    return make.linear(f"{at}.down", act, size.rows, size.inner, size.hidden)


def _block(make: Maker, at: str, x: str, size: _Text, *, gated: bool = False, memory: str = "") -> str:
    """A pre-norm block, with cross attention where there is a memory."""
    width = size.rows * size.hidden
    x = _add(make, at, x, _attention(make, f"{at}.attn", _norm(make, f"{at}.ln1", x, size), size), width)
    if memory:
        crossed = _attention(make, f"{at}.cross", _norm(make, f"{at}.ln3", x, size), size, memory)
        x = _add(make, at, x, crossed, width)
    return _add(make, at, x, _mlp(make, f"{at}.mlp", _norm(make, f"{at}.ln2", x, size), size, gated), width)


def _embed(make: Maker, at: str, ids: str, size: _Text) -> str:
    return make.op(at, "embedding", [ids], size.rows * size.hidden, weight=size.vocabulary * size.hidden, saves=[ids])


def _head(make: Maker, x: str, size: _Text, tied: str = "") -> str:
    x = _norm(make, "ln_f", x, size)
    logits = make.linear("lm_head", x, size.rows, size.hidden, size.vocabulary, tied=tied)
    targets = make.input("targets", size.rows)
    return make.op("loss", "cross_entropy", [logits, targets], 1, saves=[logits, targets])


def gpt(layers: int = 48, hidden: int = 1600, vocabulary: int = 50304) -> CostGraph:
    """GPT-2 XL with tied embedding and head."""
    size = _Text(4, 1024, hidden, 25, 4 * hidden, vocabulary)
    make = Maker()
    x = _embed(make, "wte", make.input("ids", size.rows), size)
    for layer in range(layers):
        x = _block(make, f"h.{layer}", x, size)
    return make.graph(_head(make, x, size, tied="wte.embedding.weight"))


def llama(layers: int = 32, hidden: int = 4096) -> CostGraph:
    """Llama 7B."""
    size = _Text(1, 2048, hidden, 32, 11008, 32000)
    make = Maker()
    x = _embed(make, "embed", make.input("ids", size.rows), size)
    for layer in range(layers):
        x = _block(make, f"layers.{layer}", x, size, gated=True)
    return make.graph(_head(make, x, size))


def bert(layers: int = 24, hidden: int = 1024) -> CostGraph:
    """BERT-large."""
    size = _Text(16, 512, hidden, 16, 4 * hidden, 30522)
    make = Maker()
    x = _embed(make, "embeddings", make.input("ids", size.rows), size)
    for layer in range(layers):
        x = _block(make, f"encoder.layer.{layer}", x, size)
    return make.graph(_head(make, x, size, tied="embeddings.embedding.weight"))


def t5(layers: int = 24, hidden: int = 1024) -> CostGraph:
    """T5-large: the encoder's output goes to every block of the decoder."""
    size = _Text(8, 512, hidden, 16, 4 * hidden, 32128)
    make = Maker()
    x = _embed(make, "encoder.embed", make.input("ids", size.rows), size)
    for layer in range(layers):
        x = _block(make, f"encoder.block.{layer}", x, size)
    memory = _norm(make, "encoder.final", x, size)
    y = _embed(make, "decoder.embed", make.input("decoder_ids", size.rows), size)
    for layer in range(layers):
        y = _block(make, f"decoder.block.{layer}", y, size, memory=memory)
    return make.graph(_head(make, y, size))


def _conv(make: Maker, at: str, x: str, pixels: int, wide: int, out: int, kernel: int, groups: int = 1) -> str:
    """Convolution, batch norm and ReLU; ``pixels`` counts the batch."""
    weight = kernel * kernel * wide * out // groups
    y = make.op(f"{at}.conv", "conv", [x], pixels * out, flops=2.0 * pixels * weight, weight=weight)
    y = make.op(f"{at}.bn", "norm", [y], pixels * out, weight=2 * out)
    return make.op(at, "relu", [y], pixels * out, saves=[], saves_output=True)


def resnet152(batch: int = 32) -> CostGraph:
    """ResNet-152 at 224 by 224."""
    make = Maker()
    side, wide = 56, 64
    x = _conv(make, "stem", make.input("images", batch * 3 * 224 * 224), batch * 112 * 112, 3, 64, 7)
    x = make.op("stem.pool", "max_pool", [x], batch * side * side * wide)
    for group, blocks in enumerate((3, 8, 36, 3)):
        inner = 64 << group
        for block in range(blocks):
            at = f"layer{group + 1}.{block}"
            if block == 0 and group:
                side //= 2
            pixels = batch * side * side
            y = _conv(make, f"{at}.a", x, pixels, wide, inner, 1)
            y = _conv(make, f"{at}.b", y, pixels, inner, inner, 3)
            y = _conv(make, f"{at}.c", y, pixels, inner, 4 * inner, 1)
            if block == 0:
                x = _conv(make, f"{at}.down", x, pixels, wide, 4 * inner, 1)
                wide = 4 * inner
            x = _add(make, at, x, y, pixels * wide)
    x = make.op("pool", "mean", [x], batch * wide)
    return make.graph(make.linear("fc", x, batch, wide, 1000))


def unet(batch: int = 8, side: int = 256, wide: int = 64, depth: int = 5, repeats: int = 6) -> CostGraph:
    """A U-Net: each level's output on the way down is joined on the way up."""
    make = Maker()
    x, channels, skips = make.input("images", batch * 3 * side * side), 3, []
    for level in range(depth):
        pixels, out = batch * (side >> level) ** 2, wide << min(level, 3)
        for repeat in range(repeats):
            x = _conv(make, f"down.{level}.{repeat}", x, pixels, channels, out, 3)
            channels = out
        if level < depth - 1:
            skips.append(x)
            x = make.op(f"down.{level}.pool", "max_pool", [x], pixels * out // 4)
    for level in range(depth - 2, -1, -1):
        pixels, out = batch * (side >> level) ** 2, wide << min(level, 3)
        x = make.op(f"up.{level}.resize", "upsample", [x], pixels * channels, saves=[])
        x = make.op(f"up.{level}.join", "cat", [skips.pop(), x], pixels * (channels + out), saves=[])
        channels += out
        for repeat in range(repeats):
            x = _conv(make, f"up.{level}.{repeat}", x, pixels, channels, out, 3)
            channels = out
    return make.graph(make.op("head", "conv", [x], batch * side * side * 3, flops=6.0 * channels * batch * side * side,
                              weight=3 * channels))  # fmt: skip


def amoebanet(cells: int = 24, batch: int = 32, wide: int = 256) -> CostGraph:
    """Cells like AmoebaNet's: five pairs of branches, each on one of the two cells before or on an earlier pair."""
    make = Maker()
    side = 28
    pixels = batch * side * side
    x = _conv(make, "stem.0", make.input("images", pixels * 48), pixels, 48, wide, 3)
    before, last = x, _conv(make, "stem.1", x, pixels, wide, wide, 3)
    for cell in range(cells):
        at = f"cells.{cell}"
        states = [
            _conv(make, f"{at}.in0", before, pixels, wide, wide, 1),
            _conv(make, f"{at}.in1", last, pixels, wide, wide, 1),
        ]
        for pair, (left, right, kernel) in enumerate(((0, 1, 3), (1, 0, 1), (0, 2, 3), (3, 1, 1), (2, 4, 3))):
            a = _conv(make, f"{at}.{pair}.a", states[left], pixels, wide, wide, kernel, groups=4)
            b = make.op(f"{at}.{pair}.b", "avg_pool", [states[right]], pixels * wide)
            states.append(_add(make, f"{at}.{pair}", a, b, pixels * wide))
        joined = make.op(at, "cat", states[4:], 3 * pixels * wide, saves=[])
        before, last = last, _conv(make, f"{at}.out", joined, pixels, 3 * wide, wide, 1)
    x = make.op("pool", "mean", [last], batch * wide)
    return make.graph(make.linear("fc", x, batch, wide, 1000))


def chain(times_us: Sequence[float], output_bytes: int = 1000) -> CostGraph:
    """Nodes one after the other, a third of each time forward."""
    nodes = [CostNode(name="x", kind="placeholder", output_bytes=output_bytes)]
    for index, time_us in enumerate(times_us):
        nodes.append(
            CostNode(name=f"n{index}", forward_us=time_us / 3, backward_us=2 * time_us / 3, module=f"layers.{index}",
                     output_bytes=output_bytes, gradient_bytes=output_bytes, inputs=(nodes[-1].name,),
                     parameters=(f"w{index}",), saved=(f"s{index}",))
        )  # fmt: skip
    nodes.append(CostNode(name="output", kind="output", inputs=(nodes[-1].name,)))
    count = range(len(times_us))
    return CostGraph(
        nodes=tuple(nodes),
        parameter_bytes={f"w{index}": 100 for index in count},
        storage_bytes={f"s{index}": 1000 for index in count},
    )


GRAPHS: dict[str, Callable[[], CostGraph]] = {
    "GPT-2 XL": gpt,
    "Llama 7B": llama,
    "T5-large": t5,
    "BERT-large": bert,
    "ResNet-152": resnet152,
    "U-Net": unet,
    "AmoebaNet": amoebanet,
}
