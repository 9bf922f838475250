"""One training step of a model, noted op by op: forward, backward, and the optimizer's step.

Note [Fake tensors]: a model without values, or one that does not fit its device, is recorded with tensors that have
sizes and a device but no memory. Nothing is computed, and each op says what it would have made.
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_lms.fitting.recorder import RecordedOp, RecordedStorage, StepRecorder
from torch_lms.profile.devices import device_of, made_on
from torch_lms.profile.huggingface import as_in_training
from torch_lms.profile.interpreter import ProfilingInterpreter, graph_facts, trace_undone
from torch_lms.profile.node_facts import NodeFacts
from torch_lms.profile.optimizer_state import MakeOptimizer, make_step, trained_parameters
from torch_lms.profile.preserving import placed_on, preserved, run_or_explain
from torch_lms.profile.runtime import OpRecorder
from torch_lms.profile.steps import backward_of
from torch_lms.profile.storages import dense_parts, tensors_in
from torch_lms.profile.timing import RunTimer, Span
from torch_lms.profile.tracing import TracedModel

__all__ = ["RecordedStep", "record_step"]

_META = torch.device("meta")
_IMPLEMENTATIONS = {"capturable", "foreach", "fused"}


@dataclass(frozen=True)
class RecordedStep:
    """A step.

    Attributes:
        ops: by place.
        storages: all that is on the device at some place.
        nodes: of the model, in order.
        spans: which places belong to which node.
    """

    ops: list[RecordedOp]
    storages: list[RecordedStorage]
    nodes: list[NodeFacts]
    spans: list[Span]


def record_step(traced: TracedModel, device: torch.device, optimizer: Any, *, fake: bool) -> RecordedStep:
    """Records one step of a model with its sample, and leaves the model as it was.

    Args:
        traced: the model and its sample; one without a graph runs as it is.
        device: where it runs, or would run.
        optimizer: of this model, or what makes one of a list of parameters; None leaves its step out.
        fake: whether nothing is computed; see Note [Fake tensors].

    Raises:
        ProfileError: if the model does not run with the sample; names the user's line.
    """
    trained = [] if optimizer is None else list(trained_parameters(traced.model, optimizer))
    with ExitStack() as stack:
        stack.enter_context(preserved(traced.model, traced.sample))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        if fake:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            home = device_of(traced.model)
            traced = _twin(traced, device, mode)
            if traced.graph_module is not None and home != device:
                stack.enter_context(made_on(traced.graph_module, home, device))
            stack.enter_context(mode)
        else:
            stack.enter_context(placed_on(traced.model, device))
            traced = replace(traced, sample=traced.sample.to(device))
            stack.enter_context(trace_undone(traced))
        stack.enter_context(as_in_training(traced.model, traced.sample, []))
        run = _StepRun(traced, device)
        run_or_explain(traced.model, traced.sample, run.forward_and_backward)
    for name, parameter, make in trained:
        run.optimizer_step(name, parameter, make)
    return run.finish(optimized=bool(trained))


class _Places:
    """A clock that tells how many ops have run."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def mark(self) -> int:
        return len(self._recorder.ops)

    def lead(self) -> None:
        pass

    def elapsed_us(self, start: int, end: int) -> float:
        return 0.0

    def wait(self) -> None:
        pass


class _StepRun:
    """One call of `record_step`."""

    def __init__(self, traced: TracedModel, device: torch.device) -> None:
        self._traced = traced
        self._recorder = recorder = StepRecorder(device)
        self._timer = RunTimer(_Places(recorder))
        model, sample = traced.model, traced.sample
        self._parameters = {name: recorder.storage_of(value) for name, value in model.named_parameters()}
        for buffer in model.buffers():
            recorder.storage_of(buffer)
        self._inputs = [
            recorder.storage_of(part, lasting=False)
            for tensor in sample.tensors
            for part in dense_parts(tensor)
            if part.device == device
        ]
        self._gradients: dict[str, list[RecordedStorage]] = {}
        self._nodes: list[NodeFacts] = []

    def forward_and_backward(self) -> None:
        """As training does it: what the model returns is held until the backward is over."""
        tensors = self._traced.sample.leaves()
        with self._recorder, torch.enable_grad():
            output = self._forward(tensors)
            self._recorder.phase = "backward"
            backward = backward_of(output)
            if backward is not None:
                self._timer.backward(backward)
            del output, backward, tensors
            self._recorder.note_released()
            self._recorder.add_gradients_in_place()
        for name, parameter in self._traced.model.named_parameters():
            parts = [] if parameter.grad is None else dense_parts(parameter.grad)
            self._gradients[name] = [self._recorder.storage_of(part) for part in parts]

    def _forward(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        if self._traced.graph_module is not None:
            self._nodes = graph_facts(self._traced)
            return ProfilingInterpreter(self._traced, self._timer).run_flat(*tensors)
        recorder = OpRecorder(self._traced.model, self._traced.sample, self._timer)
        output = recorder.run(tensors)
        self._nodes = recorder.ops
        return output

    def optimizer_step(self, name: str, parameter: nn.Parameter, make: MakeOptimizer) -> None:
        """Records the step of one parameter, if it has a gradient, on copies of the two that have no memory."""
        if not self._gradients[name]:
            return
        copy = nn.Parameter(torch.empty_like(parameter, device=_META, requires_grad=False))
        copy.grad = torch.empty_like(copy)
        optimizer = make_step(partial(_plain, make), copy)
        recorder = self._recorder
        recorder.device, recorder.phase = _META, "other"
        recorder.alias(copy, self._parameters[name])
        recorder.alias(copy.grad, self._gradients[name][-1])
        for tensor in tensors_in(dict(optimizer.state[copy])):
            if tensor.device == _META:
                recorder.storage_of(tensor)
        with recorder:
            optimizer.step()
            recorder.note_released()

    def finish(self, *, optimized: bool) -> RecordedStep:
        """The step. The caller holds the sample, and the gradients until the optimizer is done with all of them."""
        recorder = self._recorder
        for storage in self._inputs:
            storage.released = None
        for parts in self._gradients.values():
            for storage in parts:
                storage.released = len(recorder.ops) - 1 if optimized else None
        return RecordedStep(recorder.ops, recorder.storages, self._nodes, self._timer.spans)


def _plain(make: MakeOptimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer in the implementation that runs anywhere; the others are for devices that have values."""
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        group.update(dict.fromkeys(_IMPLEMENTATIONS & group.keys(), False))
    return optimizer


def _twin(traced: TracedModel, device: torch.device, mode: FakeTensorMode) -> TracedModel:
    """The same model and sample in fake tensors on a device."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.requires_grad_(tensor.requires_grad)

    memo: dict[int, Any] = {}
    with mode:
        memo[id(traced.sample)] = traced.sample.mapped(fake)
        constants = () if traced.graph_module is None else traced.graph_module.buffers()
        for tensor in [*traced.model.parameters(), *traced.model.buffers(), *constants]:
            is_parameter = isinstance(tensor, nn.Parameter)
            made = fake(tensor)
            memo[id(tensor)] = nn.Parameter(made.detach(), tensor.requires_grad) if is_parameter else made
    return deepcopy(traced, memo)
