"""What was measured, as a document: dataclasses that go to JSON and come back equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch_lms.errors import PlanError, ProfileError
from torch_lms.plan.fields import read_object, refuse_constant

__all__ = ["LEVELS", "VERSION", "LinkProfile", "NodeProfile", "Profile"]

VERSION = 7
LEVELS = ("operator", "opened", "module", "recorded", "runtime")


@dataclass(frozen=True, kw_only=True)
class NodeProfile:
    """One node of the graph.

    Attributes:
        name: unique in its profile.
        op: as in torch.fx: placeholder, get_attr, call_function, call_method, call_module or output.
        target: what is called, as text.
        inputs: names of the nodes whose outputs it reads.
        module: qualified path of the module that it belongs to; empty for the model itself.
        forward_us: mean of the timed runs.
        backward_us: mean of the timed runs.
        input_backward_us: of its backward in two parts, as zero bubble runs it, that of values; None if not timed.
        weight_backward_us: that of weights. Together they may take longer than the whole.
        forward_working_bytes: what its forward needs at most besides what it keeps, its output included; None if not
            measured. That takes a graph, and what runs whole.
        backward_working_bytes: what its backward needs at most besides what it kept, the gradients that come and go
            included.
        output_bytes: of the tensors that it gives.
        gradient_bytes: of the gradients of these; 0 where none needs a gradient.
        kept_gradient_bytes: of the gradients that arrive where its parameters meet its inputs, which zero bubble keeps
            from the backward of inputs to that of weights.
        parameters: names of those that it reads; tied ones under their first name.
        buffers: names of those that it reads.
        saved: ids of the storages that it keeps for backward; neither parameters nor buffers are among them.
        output_storages: ids of the storages behind its outputs; a view has that of its base.
        saved_parameters: names of the parameters and buffers that it keeps for backward.
        not_before: names of nodes besides its inputs that must not be in a later stage than it, since one of them works
            in place on memory that they share; two that name each other stay together.
        writes: names of the nodes whose memory it changes, and of buffers that it changes.
    """

    name: str
    op: str
    target: str
    inputs: tuple[str, ...] = ()
    module: str = ""
    forward_us: float = 0.0
    backward_us: float = 0.0
    input_backward_us: float | None = None
    weight_backward_us: float | None = None
    forward_working_bytes: int | None = None
    backward_working_bytes: int | None = None
    output_bytes: int = 0
    gradient_bytes: int = 0
    kept_gradient_bytes: int = 0
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    output_storages: tuple[str, ...] = ()
    saved_parameters: tuple[str, ...] = ()
    not_before: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """The way from one device to another: ``latency_us + bytes / bytes_per_us`` a copy."""

    source: str
    target: str
    bytes_per_us: float
    latency_us: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profiled model.

    Attributes:
        model: the name of its class.
        level: how fine the graph is: ``operator``, ``opened``, ``module``, ``recorded`` (of one run), or ``runtime``
            (ops as they ran).
        notes: what could not be traced or measured, and why.
        device: where it ran; ``meta`` for sizes only.
        torch_version: of the PyTorch that ran it.
        warmup_runs: runs that are left out of the means.
        timed_runs: runs that the medians are of.
        timed: whether times were measured; on the meta device they are all 0.
        nodes: each after its inputs.
        parameter_bytes: of each parameter; tied ones once, under their first name.
        buffer_bytes: of each buffer.
        tied: other names of tied parameters to the first.
        trainable: names of the parameters that get a gradient.
        storage_bytes: of each storage that is kept for backward or is an output; parameters are not among them.
        optimizer_bytes: of each parameter's optimizer state; None if no optimizer was given.
        optimizer_us: of each parameter's part in the optimizer's step; None if that was not timed.
        step_us: a whole forward and backward of the model itself, each the median of the timed runs.
        node_scale: how much longer the nodes take in whole steps, where their times add up to ``step_us``, than timed
            by themselves; 1 on a CPU: there they are as measured.
        links: between the devices.
        version: of this document's format.
    """

    model: str
    level: str
    device: str
    torch_version: str
    warmup_runs: int
    timed_runs: int
    timed: bool
    nodes: tuple[NodeProfile, ...]
    notes: tuple[str, ...] = ()
    parameter_bytes: Mapping[str, int] = field(default_factory=dict)
    buffer_bytes: Mapping[str, int] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()
    storage_bytes: Mapping[str, int] = field(default_factory=dict)
    optimizer_bytes: Mapping[str, int] | None = None
    optimizer_us: Mapping[str, float] | None = None
    step_us: float = 0.0
    node_scale: float = 1.0
    links: tuple[LinkProfile, ...] = ()
    version: int = VERSION

    @property
    def forward_us(self) -> float:
        """The sum of the nodes' forward times."""
        return sum(node.forward_us for node in self.nodes)

    @property
    def backward_us(self) -> float:
        """The sum of the nodes' backward times."""
        return sum(node.backward_us for node in self.nodes)

    @property
    def saved_bytes(self) -> int:
        """All that is kept from forward to backward; a storage that several nodes keep counts once."""
        return sum(self.storage_bytes[name] for name in {name for node in self.nodes for name in node.saved})

    def to_json(self) -> str:
        """The document as JSON text."""
        document = asdict(self)
        document["trainable"] = sorted(self.trainable)
        return json.dumps({"version": document.pop("version"), **document}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads what `to_json` wrote.

        Raises:
            ProfileError: for text that is no profile, or one of another version, naming the field.
        """
        try:
            document = json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"expected a profile as JSON, found text that is not: {error}; profile again") from error
        version = document.get("version") if isinstance(document, dict) else None
        if version != VERSION:
            raise ProfileError(f"expected a profile of version {VERSION}, found {version!r}; profile the model again")
        try:
            made: Profile = read_object(cls, document, "profile", VERSION)
        except PlanError as error:
            raise ProfileError(f"{error} (or profile the model again)") from error
        return made

    def save(self, path: str | Path) -> None:
        """Writes the document to a file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads what `save` wrote."""
        return cls.from_json(Path(path).read_text())
