"""Wraps a stage for a transport: carriers in, carriers out, one gradient for each.

    carriers -> Enter -> unpack -> stage -> pack -> Exit -> carriers
                  |                                   ^
                  +------------- token ---------------+

Note [Token]: a transport expects a gradient of every carrier, also of integers and of values that have no influence on
the loss. Enter's backward gives zeros for these; the token, an empty sum from Enter to Exit, makes sure that it runs.
What Enter gives is no leaf and no view, so that the stage may work on it in place.

Note [Buffers that leave]: a value may lie in a buffer or a parameter that the stage's forward changes, and the next
microbatch's may before this one's has been sent, or read where the next stage is on the same rank. So it leaves as a
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_lms._torch_compat import storage_key, tree_map
from torch_lms.errors import PipelineError
from torch_lms.pipeline.borders import Number, carrier_metas, describe, has_numbers, pack, unpack
from torch_lms.pipeline.host_values import HostValues
from torch_lms.pipeline.randomness import RandomStream
from torch_lms.pipeline.transfers import sendable
from torch_lms.profile.preserving import contents_kept
from torch_lms.stages.stage import Stage

__all__ = ["Boundary", "Crossing", "Microbatch"]

LossFunction = Callable[[Any, Any], torch.Tensor]


class _Enter(torch.autograd.Function):
    """Carriers as they come in; backward gives a dense gradient for each of them."""

    @staticmethod
    def forward(ctx: Any, differentiable: tuple[bool, ...], *carriers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A token, and each carrier with no history of views."""
        entered = [carrier.data for carrier in carriers]
        ctx.mark_non_differentiable(*(value for value, has in zip(entered, differentiable, strict=False) if not has))
        return (carriers[0].new_zeros(()), *entered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Zeros where autograd found nothing. The gradient through ``conj`` is a conjugated view."""
        return (None, *(sendable(gradient) for gradient in gradients[1:]))


class _Exit(torch.autograd.Function):
    """One carrier as it goes out; depends on the token as well."""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, carrier: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The carrier."""
        ctx.token_like = token.detach()
        ctx.differentiable = carrier.requires_grad
        ctx.scale = scale
        return carrier.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Nothing through the token, the gradient through the carrier, by the scale."""
        scaled = gradient if ctx.scale is None else (gradient * ctx.scale).to(gradient.dtype)
        return torch.zeros_like(ctx.token_like), scaled if ctx.differentiable else None, None


# Function.apply has no types.
_apply_enter: Callable[..., tuple[torch.Tensor, ...]] = _Enter.apply
_apply_exit: Callable[..., torch.Tensor] = _Exit.apply


class Microbatch:
    """What one microbatch gives a rank.

    Attributes:
        feeds: arguments of the model by name.
        target: for the loss function.
        seed: of random numbers; None leaves the generators alone.
        number: its place among those of a step.
    """

    def __init__(self, feeds: Mapping[str, Any], target: Any = None, seed: int | None = None, number: int = 0) -> None:
        self.feeds = feeds
        self.target = target
        self.seed = seed
        self.number = number

    def before_all(self) -> Microbatch:
        """The same for a run before those of the step, with tensors of its own: a stage may write to them."""
        feeds, target = tree_map(_own, (dict(self.feeds), self.target))
        return Microbatch(feeds, target, self.seed, number=-1)


def _own(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


@dataclass(frozen=True)
class Crossing:
    """What crosses a stage's borders, for arguments of some shapes.

    Attributes:
        incoming: template of the stage's inputs; None for the first stage.
        outgoing: template of its outputs; None for the last stage.
        loss_like: the last stage's loss, without storage; None for the others.
    """

    incoming: Any = None
    outgoing: Any = None
    loss_like: torch.Tensor | None = None


class Boundary(nn.Module):
    """A stage between carriers. Runs the microbatches that `load` was given, in their order.

    Args:
        stage: on its device.
        device: where it is.
        loss: for the last stage: takes what the model returns and the target; None if the model returns its loss, or an
            output with a ``loss``.
        microbatches: in a step; each one's loss is divided by their number.
        host_values: what crosses borders beside carriers.
        carries_random: whether the state of the random generator crosses borders too.
        autocast: what stage and loss function run under; None leaves that to the program.

    Attributes:
        crossing: what crosses its borders in this step.
    """

    def __init__(
        self,
        stage: Stage,
        device: torch.device,
        loss: LossFunction | None,
        microbatches: int,
        *,
        host_values: HostValues,
        carries_random: bool,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.device = device
        self.loss = loss
        self.microbatches = microbatches
        self.autocast = autocast
        self._host_values = host_values
        self.random = RandomStream(device) if carries_random else None
        self.crossing = Crossing()
        self.is_last = stage.index + 1 == stage.count
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._queue: list[Microbatch] = []
        self._scale: torch.Tensor | None = None

    def load(self, microbatches: Sequence[Microbatch], scale: torch.Tensor | None = None) -> None:
        """Sets what the next forwards run on, and what the last stage's backwards begin with; None for 1."""
        self._queue, self._scale = list(microbatches), scale

    def forward(self, *carriers: torch.Tensor) -> Any:
        """One microbatch: the carriers for the next stage, or the last stage's loss."""
        microbatch = self._queue.pop(0)
        token, values, state = self._enter(carriers, microbatch)
        result, state = self._run(values, microbatch, state)
        if self.is_last:
            return _apply_exit(token, self.loss_of(result, microbatch), self._scale)
        packed = self.pack(self.crossing.outgoing, result, microbatch, state)
        return tuple(_apply_exit(token, carrier) for carrier in packed)

    def pack(
        self, outgoing: Any, result: Any, microbatch: Microbatch, state: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """The carriers of what the stage returns, see Note [Buffers that leave]; the next stage is told all else.

        Args:
            outgoing: template of the stage's outputs.
            result: these.
            microbatch: whose they are.
            state: that of the random generator after it.

        Raises:
            PipelineError: if they are not of the template.
        """
        changing = {storage_key(tensor) for tensor in _changing(self.stage) if tensor.layout is torch.strided}
        packed, numbers = pack(outgoing, result, self.device, f"stage {self.stage.index}")
        if numbers or state is not None:
            self._host_values.tell(self.stage.index + 1, microbatch.number, (numbers, state))
        return [carrier.clone() if storage_key(carrier) in changing else carrier for carrier in packed]

    def prepare(self, incoming: Any, carriers: Sequence[torch.Tensor], microbatch: Microbatch) -> list[torch.Tensor]:
        """Runs once, to find what crosses its borders, which is `crossing` then.

        Args:
            incoming: template of the stage's inputs; None for the first stage.
            carriers: of these inputs: true ones, for what a stage does may depend on values.
            microbatch: the first one.

        Returns:
            The carriers of its outputs; none for the last stage.
        """
        self.crossing = Crossing(incoming)
        with _unchanged(self.stage, self.device), torch.enable_grad():
            _, values, state = self._enter([carrier.requires_grad_() for carrier in carriers], microbatch)
            result, state = self._run(values, microbatch, state)
            if self.is_last:
                self.crossing = Crossing(incoming, None, self.loss_of(result, microbatch).detach().to("meta"))
                return []
            outgoing = describe(result)
            self.crossing = Crossing(incoming, outgoing)
            return [carrier.detach() for carrier in self.pack(outgoing, result, microbatch, state)]

    def empty_carriers(self, incoming: Any) -> list[torch.Tensor]:
        """Room for the carriers of a template."""
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in carrier_metas(incoming)]

    def evaluate(self, incoming: Any, carriers: Sequence[torch.Tensor], microbatch: Microbatch) -> Any:
        """One microbatch forward, with nothing kept for a backward.

        Args:
            incoming: template of the stage's inputs; None for the first stage.
            carriers: that came in.
            microbatch: what it gives this rank.

        Returns:
            The stage's values as a tuple, or what the last stage returns.
        """
        numbers, state = self._heard(incoming, microbatch)
        values = () if incoming is None else unpack(incoming, carriers, numbers, self.device)
        return self._run(values, microbatch, state)[0]

    def metas(self, template: Any) -> tuple[torch.Tensor, ...]:
        """The carriers of a template, without storage."""
        if template is None:
            return ()
        return tuple(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            for shape, dtype, _ in carrier_metas(template)
        )

    def _enter(
        self, carriers: Sequence[torch.Tensor], microbatch: Microbatch
    ) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        """A token, the stage's values, and the state of the random generator before it."""
        incoming = self.crossing.incoming
        if incoming is None:
            return self._anchor, (), None
        numbers, state = self._heard(incoming, microbatch)
        differentiable = tuple(has for _, _, has in carrier_metas(incoming))
        token, *entered = _apply_enter(differentiable, *carriers)
        return token, unpack(incoming, entered, numbers, self.device), state

    def _heard(self, incoming: Any, microbatch: Microbatch) -> tuple[Sequence[Number], torch.Tensor | None]:
        """What the stage before tells of a microbatch."""
        if incoming is None or not (has_numbers(incoming) or self._random_of(microbatch)):
            return (), None
        numbers, state = self._host_values.hear(self.stage.index, microbatch.number)
        return numbers, state

    def _random_of(self, microbatch: Microbatch) -> RandomStream | None:
        """The generator whose state the microbatch takes along, if it does."""
        return None if microbatch.seed is None else self.random

    def _run(
        self, values: Sequence[Any], microbatch: Microbatch, state: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor | None]:
        """The stage's values as a tuple, or what the last stage returns; and the random state for the next stage."""
        feeds = {name: self._feed(microbatch, name) for name in self.stage.feeds}
        random = self._random_of(microbatch)
        if random is None or microbatch.seed is None:
            with self._precision():
                return self._as_tuple(self.stage(*values, **feeds)), None
        with random.continued(state, microbatch.seed):
            with self._precision():
                result = self.stage(*values, **feeds)
            return self._as_tuple(result), random.state()

    def _precision(self) -> AbstractContextManager[Any]:
        """Of a forward. Backward ops have the types of the forward's, and are not to be cast again."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)

    def _as_tuple(self, result: Any) -> Any:
        return (result,) if not self.is_last and len(self.stage.outputs) == 1 else result

    def _feed(self, microbatch: Microbatch, name: str) -> Any:
        if name not in microbatch.feeds:
            raise PipelineError(
                f"expected the argument {name!r}, which stage {self.stage.index} uses, found none on this rank; "
                "give it to step() here too"
            )
        return microbatch.feeds[name]

    def loss_of(self, result: Any, microbatch: Microbatch) -> torch.Tensor:
        """This microbatch's share of the loss.

        Args:
            result: of the last stage: the loss, or an output with a ``loss`` in it, unless there is a loss function.
            microbatch: has the target.

        Raises:
            PipelineError: if that is no loss.
        """
        with self._precision():
            loss = _own_loss(result) if self.loss is None else self.loss(result, microbatch.target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PipelineError(
                f"expected a loss of one element, found {found}; pass loss=..., which makes one, or give the model "
                "what it computes its own from, such as labels="
            )
        return loss if self.microbatches == 1 else loss / self.microbatches


def _own_loss(result: Any) -> Any:
    """The loss in a Hugging Face output or a dict; anything else is the loss itself."""
    if isinstance(result, Mapping):
        return result.get("loss", result)
    return result if isinstance(result, torch.Tensor) else getattr(result, "loss", result)


def _changing(stage: Stage) -> list[torch.Tensor]:
    """Buffers, and the parameters that the stage's forward changes."""
    return [*stage.buffers(), *(tensor for name, tensor in stage.named_parameters() if name in stage.writes)]


@contextmanager
def _unchanged(stage: Stage, device: torch.device) -> Iterator[None]:
    """Puts back what the stage's forward changes, and random generators."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), contents_kept(_changing(stage)):
        yield
