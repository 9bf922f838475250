"""What a graph, a device and a link cost, without a tensor in sight.

All times are those of one microbatch in microseconds on a device of speed 1, all sizes in bytes. The RFC's cost of a
part of the model is ``time_weight * time + memory_weight * memory``; the algorithms that follow papers use it, while
the exact ones put time first and keep memory under each device's cap, with a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch_lms.errors import PartitionError
from torch_lms.partition.data_parallel import DataParallel
from torch_lms.partition.device_spec import DeviceSpec
from torch_lms.partition.link_spec import LinkSpec
from torch_lms.partition.relief import KEEP_ALL, MemoryRelief
from torch_lms.schedules.rules import SCHEDULES, splits_backward

if TYPE_CHECKING:
    from torch_lms.profile.document import NodeProfile, Profile

__all__ = [
    "OPTIMIZER_MULTIPLIERS",
    "CostGraph",
    "CostModel",
    "CostNode",
    "DataParallel",
    "DeviceSpec",
    "links_from_profile",
    "optimizer_multiplier",
]

PASSIVE_KINDS = ("placeholder", "get_attr", "output")
_GUESSED_BYTES_PER_US = 1e6
_MOST_MICROBATCHES = 1 << 16  # each has actions of its own in the schedule

# The RFC's table: how many copies of a parameter training keeps: itself, its gradient and the optimizer's state.
OPTIMIZER_MULTIPLIERS: Mapping[str, float] = {
    "sgd": 2,
    "adam": 4,
    "adamw": 4,
    "adadelta": 4,
    "adagrad": 3,
    "rmsprop": 3,
}


def optimizer_multiplier(optimizer: Any) -> float:
    """How many copies of each parameter an optimizer makes training keep, from the RFC's table.

    Args:
        optimizer: a name such as ``"adam"``; a class such as ``torch.optim.Adam``, with its default options; or an
            optimizer, whose options count: momentum, ``amsgrad`` and ``centered`` keep one copy more each.

    Raises:
        PartitionError: for an optimizer that is not in the table.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = optimizer.lower() if isinstance(optimizer, str) else kind.__name__.lower()
    if name not in OPTIMIZER_MULTIPLIERS:
        known = ", ".join(OPTIMIZER_MULTIPLIERS)
        found = name if isinstance(optimizer, type | str) or hasattr(optimizer, "defaults") else optimizer
        raise PartitionError(
            f"expected an optimizer among {known}, found {found!r}; give optimizer_bytes as measured, or the multiplier"
        )
    options = {} if isinstance(optimizer, type | str) else optimizer.defaults
    more = sum(bool(options.get(option)) for option in ("momentum", "amsgrad", "centered"))
    return OPTIMIZER_MULTIPLIERS[name] + more


@dataclass(frozen=True, kw_only=True)
class CostNode:
    """One operation, or one module where the graph is no finer.

    Attributes:
        name: unique in its graph.
        forward_us: of one microbatch, on a device of speed 1.
        backward_us: as ``forward_us``.
        input_backward_us: of its backward in two parts, as zero bubble has it, that of values; None if not known.
        weight_backward_us: that of weights.
        forward_working_bytes: what its forward needs besides what it saves, its output included; None if not known.
        backward_working_bytes: what its backward needs besides that, the gradients that come and go included.
        output_bytes: what a border behind it carries forward.
        gradient_bytes: what it carries backward; 0 where the output needs no gradient.
        kept_gradient_bytes: of the gradients that zero bubble keeps from the backward of its inputs to that of its
            parameters; None means that of its output.
        parameters: names of those it reads; tied weights under one name.
        saved: ids of storages that it keeps for its backward.
        inputs: names of the nodes whose outputs it reads.
        module: qualified path of the module that it belongs to.
        kind: ``placeholder``, ``get_attr``, ``output``, or what it does.
        output_storages: ids of the storages of its output, so that a value that is sent and saved counts once.
        element: whether it only takes an element out of its one input. That may be a tuple, which cannot be sent, so no
            border lies between the two.
        not_before: names of nodes besides its inputs that must not be in a later stage than it; two that name each
            other stay together.
        writes: names of the nodes whose memory it changes, and of buffers that it changes.
    """

    name: str
    forward_us: float = 0.0
    backward_us: float = 0.0
    input_backward_us: float | None = None
    weight_backward_us: float | None = None
    forward_working_bytes: int | None = None
    backward_working_bytes: int | None = None
    output_bytes: int = 0
    gradient_bytes: int = 0
    kept_gradient_bytes: int | None = None
    parameters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    module: str = ""
    kind: str = "call_function"
    output_storages: tuple[str, ...] = ()
    element: bool = False
    not_before: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def passive(self) -> bool:
        """Whether it only hands a value in or out and no stage is made for it."""
        return self.kind in PASSIVE_KINDS


@dataclass(frozen=True, kw_only=True)
class CostGraph:
    """The nodes in topological order, with the sizes of what they share.

    Attributes:
        nodes: each after its inputs.
        parameter_bytes: of each parameter; tied weights once.
        storage_bytes: of each saved storage, for one microbatch.
        trainable: names of parameters with gradient and optimizer state; None means all.
        optimizer_bytes: of each parameter's optimizer state, where it was measured.
        optimizer_us: of each parameter's part in the optimizer's step, where that was.

    Raises:
        PartitionError: if a name appears twice, is missing, or is used before it is made (a cycle, or a wrong order).
    """

    nodes: tuple[CostNode, ...]
    parameter_bytes: Mapping[str, int] = field(default_factory=dict)
    storage_bytes: Mapping[str, int] = field(default_factory=dict)
    trainable: frozenset[str] | None = None
    optimizer_bytes: Mapping[str, int] | None = None
    optimizer_us: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        names = {node.name for node in self.nodes}
        seen: set[str] = set()
        for node in self.nodes:
            if node.name in seen:
                raise PartitionError(f"expected each name once, found {node.name!r} twice; give nodes unique names")
            if node.forward_us < 0 or node.backward_us < 0 or node.output_bytes < 0 or node.gradient_bytes < 0:
                raise PartitionError(f"expected times and sizes of at least 0, found {node}; profile it again")
            self._check_inputs(node, names, seen)
            self._check_sizes(node)
            seen.add(node.name)

    def is_trainable(self, parameter: str) -> bool:
        """Whether it gets a gradient."""
        return self.trainable is None or parameter in self.trainable

    def _check_inputs(self, node: CostNode, names: set[str], seen: set[str]) -> None:
        for name in node.inputs:
            if name not in names:
                raise PartitionError(
                    f"expected the inputs of {node.name!r} among the nodes, found {name!r}; add the node that makes it"
                )
            if name not in seen:
                raise PartitionError(
                    f"expected nodes in topological order, found {node.name!r} before its input {name!r}; "
                    "order them, or break the cycle between the two"
                )
        for name in node.not_before:
            if name not in names:
                raise PartitionError(
                    f"expected what {node.name!r} must not come before among the nodes, found {name!r}; leave it out"
                )

    def _check_sizes(self, node: CostNode) -> None:
        for what, wanted, known in (
            ("parameter", node.parameters, self.parameter_bytes),
            ("saved storage", node.saved, self.storage_bytes),
        ):
            for name in wanted:
                if name not in known:
                    raise PartitionError(
                        f"expected the size of {what} {name!r} of node {node.name!r}, found none; add it to the graph"
                    )

    @classmethod
    def from_profile(cls, profile: Profile) -> CostGraph:
        """The costs that a profile measured; tied weights come under their first name.

        Where nothing was timed (a model on the meta device) a node counts by the bytes of its parameters, as the RFC
        proposes, or of its output if no node has parameters: only the ratios of such times mean something.
        """
        tied = getattr(profile, "tied", {})
        guesses = {} if profile.timed else _guessed_times(profile)
        nodes = tuple(
            CostNode(
                name=node.name,
                forward_us=guesses.get(node.name, node.forward_us),
                backward_us=2 * guesses[node.name] if node.name in guesses else node.backward_us,
                input_backward_us=node.input_backward_us,
                weight_backward_us=node.weight_backward_us,
                forward_working_bytes=node.forward_working_bytes,
                backward_working_bytes=node.backward_working_bytes,
                output_bytes=node.output_bytes,
                gradient_bytes=node.gradient_bytes,
                kept_gradient_bytes=node.kept_gradient_bytes,
                parameters=tuple(dict.fromkeys(tied.get(name, name) for name in node.parameters)),
                saved=tuple(id_ for id_ in node.saved if id_ in profile.storage_bytes),
                inputs=tuple(dict.fromkeys(node.inputs)),
                module=node.module,
                kind=_kind_of(node),
                output_storages=node.output_storages,
                element=node.op == "call_function" and node.target.endswith("getitem"),
                not_before=node.not_before,
                writes=node.writes,
            )
            for node in profile.nodes
        )
        return cls(
            nodes=nodes,
            parameter_bytes=dict(profile.parameter_bytes),
            storage_bytes=dict(profile.storage_bytes),
            trainable=profile.trainable,
            optimizer_bytes=profile.optimizer_bytes,
            optimizer_us=profile.optimizer_us,
        )


def _kind_of(node: NodeProfile) -> str:
    """What a node does. One that computes is of no passive kind, though its layer may be called ``output``."""
    if node.op in PASSIVE_KINDS:
        return node.op
    return f"{node.op} {node.target}" if node.target in PASSIVE_KINDS else node.target


def _guessed_times(profile: Profile) -> dict[str, float]:
    """A time for each node, from sizes alone."""
    active = [node for node in profile.nodes if node.op not in PASSIVE_KINDS]
    held = {node.name: sum(profile.parameter_bytes.get(name, 0) for name in node.parameters) for node in active}
    if not any(held.values()):
        held = {node.name: node.output_bytes for node in active}
    return {name: nbytes / _GUESSED_BYTES_PER_US for name, nbytes in held.items()}


def slower_of(ways: Sequence[Any]) -> LinkSpec:
    """Of links of a profile, at least one, the one with the lower rate."""
    slower = min(ways, key=lambda link: link.bytes_per_us)
    return LinkSpec(bytes_per_us=slower.bytes_per_us, latency_us=slower.latency_us)


def links_from_profile(profile: Profile, devices: Sequence[DeviceSpec]) -> LinkSpec | dict[tuple[str, str], LinkSpec]:
    """The links between some devices as a profile measured them; unmeasured pairs get the slowest of these.

    Where the profile has no link between any two of the devices, transfers count as free.
    """
    names = list(dict.fromkeys(device.name for device in devices))
    known = {
        (link.source, link.target): LinkSpec(bytes_per_us=link.bytes_per_us, latency_us=link.latency_us)
        for link in profile.links
        if link.source in names and link.target in names
    }
    if not known:
        return LinkSpec()
    slowest = min(known.values(), key=lambda link: link.bytes_per_us)
    pairs = ((source, target) for source in names for target in names if source != target)
    return {pair: known.get(pair) or known.get(pair[::-1]) or slowest for pair in pairs}


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """How times and sizes become the time and the memory of a training step.

    Note [Step time]: a step's time is when its last action ends if the schedule runs as its data says: each device does
    its actions in their order, each as soon as what it needs is there (``schedules.simulation``). An action takes the
    stage's forward or backward time; zero bubble's two parts of a backward take what was measured of their nodes, else
    a share each, and the first stage's backward is that of weights as a whole. From one device to another there is one
    transfer at a time, and each direction has its own way; where transfers go in turn, each device has one at a time,
    in the order of Note [Traffic] in ``schedules.traffic``. Where communication does not overlap, a device that
    receives does nothing else; where it does, the stages at both ends take longer by a share of its time.
    Values between stages of one device are not transferred. Devices are told apart by their names. A device that is
    named for several stages does their actions in turns: those of interleaved and zero bubble as the schedule says
    (there stage s is on device ``s % devices``), under 1F1B and GPipe in the order in which they would begin if each
    stage had its own device and all took equally long. The bubble is the share of the devices' time in which they do
    not compute.

    Note [Step's end]: a stage's trainable parameters' gradients are summed over the data-parallel ranks in buckets of
    equal size, one stage after the other on each device. With overlap a bucket begins when its gradients are final: in
    the last backward of the stage, in which they become so evenly, or after that if it is zero bubble's backward of
    weights. It runs beside what the device still computes. Without overlap all begin when the device has done all its
    actions. Then the optimizer steps for each stage, one after the other and beside nothing; where its state is on the
    host, that comes over the host link and goes back. Tied weights count in each of their stages, and as all others.
    The step ends when the last device has done all this.

    Note [Stage memory]: parameters with gradient and optimizer state, once for each stage that uses them; for each
    microbatch in flight the storages that its nodes save, each once, and the values that cross its borders, unless
    they are among these; and as working space that of the one node that needs most (Note [Working space] in
    ``working_space``), and once more what comes in from the stage before and what goes back there: that is on its way
    while another microbatch runs. A microbatch is in flight from the begin of its forward to the end of its backward,
    or of the weights' part of it. Between two parts it holds less of these, and gradients as well (Note [Half done] in
    ``moments``). A stage's own figure is that of its own worst moment; a device's is that of the worst moment of all
    its stages together, with the working space of the one that runs. State on the host takes no memory of the device.

    Attributes:
        time_weight: of the RFC's cost, where times and sizes are shares of the whole graph's.
        memory_weight: the rest, so that both sum to 1.
        optimizer_multiplier: copies of each trainable parameter (`optimizer_multiplier`); where the graph or this
            model has measured bytes these count instead.
        optimizer_bytes: of each parameter's optimizer state.
        memory_buffer: share of a device's cap that stays free.
        schedule: ``gpipe``, ``1f1b``, ``interleaved`` or ``zero_bubble``, as ``torch_lms.pipeline`` runs them.
        microbatches: in a step.
        overlap_communication: whether a device computes while its transfers run.
        input_backward_share: of a backward's time, what the gradients of the inputs take, where zero bubble splits it
            and nothing was measured; the first stage has none.
        transfers_in_turn: whether a device has one transfer at a time, as NCCL has.
        transfer_share: of a transfer's time, by how much longer the stages at both ends compute where that overlaps.
        data_parallel: copies of the pipeline.
        optimizer_offload: the link to the host where optimizer state is kept there; None where devices keep it.
        relief: what may lower a stage's memory at a cost in time.
        outputs_stay: whether what the model returns stays until the backward; not where that is its loss, with which a
            pipeline lets go of all else.
    """

    time_weight: float = 0.6
    memory_weight: float = 0.4
    optimizer_multiplier: float = 4.0
    optimizer_bytes: Mapping[str, int] | None = None
    memory_buffer: float = 0.1
    schedule: str = "1f1b"
    microbatches: int = 8
    overlap_communication: bool = True
    input_backward_share: float = 0.5
    transfers_in_turn: bool = False
    transfer_share: float = 0.0
    data_parallel: DataParallel = field(default_factory=DataParallel)
    optimizer_offload: LinkSpec | None = None
    relief: MemoryRelief = KEEP_ALL
    outputs_stay: bool = True

    def __post_init__(self) -> None:
        if min(self.time_weight, self.memory_weight) < 0 or abs(self.time_weight + self.memory_weight - 1) > 1e-9:
            raise PartitionError(
                f"expected weights of at least 0 that sum to 1, found time {self.time_weight} and memory "
                f"{self.memory_weight}; the RFC proposes 0.6 and 0.4"
            )
        if self.optimizer_multiplier < 1:
            raise PartitionError(f"expected an optimizer multiplier of at least 1, found {self.optimizer_multiplier}")
        if not 0 <= self.memory_buffer < 1:
            raise PartitionError(
                f"expected a memory buffer from 0 to below 1, found {self.memory_buffer}; it is a share"
            )
        if self.schedule not in SCHEDULES:
            raise PartitionError(f"expected a schedule among {', '.join(SCHEDULES)}, found {self.schedule!r}")
        if not 1 <= self.microbatches <= _MOST_MICROBATCHES:
            raise PartitionError(
                f"expected from 1 to {_MOST_MICROBATCHES} microbatches, found {self.microbatches}; change their number"
            )
        if not 0 <= self.input_backward_share <= 1:
            raise PartitionError(f"expected a share of backward from 0 to 1, found {self.input_backward_share}")
        if not 0 <= self.transfer_share <= 1:
            raise PartitionError(f"expected a share of transfers from 0 to 1, found {self.transfer_share}")

    def relief_shares(self, stage: int) -> tuple[float, float]:
        """Of what a stage's backward takes longer, what belongs to the gradients of inputs and to those of weights."""
        if not splits_backward(self.schedule):
            return 1.0, 0.0
        inputs = self.input_backward_share if stage else 0.0
        return inputs, 1 - inputs

    def usable_bytes(self, device: DeviceSpec) -> float:
        """What stages may take of a device's memory."""
        cap = device.memory_cap_bytes
        return float("inf") if cap is None else cap * (1 - self.memory_buffer)

    def parameter_cost_bytes(self, graph: CostGraph) -> dict[str, float]:
        """What each parameter takes of a device in training, with its gradient and the optimizer state kept there."""
        state = {} if self.optimizer_offload is not None else self.optimizer_state_bytes(graph)
        gradient = self.gradient_bytes(graph)
        return {name: nbytes + gradient[name] + state.get(name, 0.0) for name, nbytes in graph.parameter_bytes.items()}

    def gradient_bytes(self, graph: CostGraph) -> dict[str, float]:
        """Of each parameter; 0 where it is not trained."""
        share = 1.0 if self._measured(graph) is not None else min(1.0, self.optimizer_multiplier - 1)
        return {name: nbytes * share * graph.is_trainable(name) for name, nbytes in graph.parameter_bytes.items()}

    def optimizer_state_bytes(self, graph: CostGraph) -> dict[str, float]:
        """Of each parameter that is trained, wherever it is kept."""
        measured = self._measured(graph)
        return {
            name: max(nbytes * (self.optimizer_multiplier - 2), 0.0)
            if measured is None
            else float(measured.get(name, 0))
            for name, nbytes in graph.parameter_bytes.items()
            if graph.is_trainable(name)
        }

    def update_us(self, state_bytes: Any) -> Any:
        """What the ways of a stage's optimizer state take; see Note [Step's end]. Arrays too."""
        return (
            0.0 * state_bytes if self.optimizer_offload is None else 2 * self.optimizer_offload.transfer_us(state_bytes)
        )

    def _measured(self, graph: CostGraph) -> Mapping[str, int] | None:
        return self.optimizer_bytes if self.optimizer_bytes is not None else graph.optimizer_bytes

    def cost(self, time_share: float, memory_share: float) -> float:
        """The RFC's cost of a part of the model, from its shares of the whole graph's time and memory."""
        return self.time_weight * time_share + self.memory_weight * memory_share
