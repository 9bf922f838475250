"""One call of `profile`, step by step: sizes, times, and what is made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from torch_lms._torch_compat import named_parameters_with_ties
from torch_lms.errors import ProfileError
from torch_lms.profile.alone import NodesAlone, nodes_of_weights
from torch_lms.profile.alone_figures import AloneFigures, measure_alone
from torch_lms.profile.arguments import Sample
from torch_lms.profile.config import ProfileConfig
from torch_lms.profile.document import LinkProfile, NodeProfile, Profile
from torch_lms.profile.fused_attention import fused_attention
from torch_lms.profile.huggingface import as_in_training
from torch_lms.profile.interpreter import ProfilingInterpreter, graph_facts
from torch_lms.profile.links import measure_links
from torch_lms.profile.node_facts import PASSIVE_OPS, NodeFacts, Watcher
from torch_lms.profile.optimizer_state import measure_optimizer
from torch_lms.profile.optimizer_time import time_optimizer
from torch_lms.profile.piecewise import PieceByPiece, Pieces
from torch_lms.profile.preserving import forget_gradients, run_or_explain
from torch_lms.profile.progress import Progress
from torch_lms.profile.runtime import OpRecorder
from torch_lms.profile.sizes import NodeSizes, SizeWatcher, transforms_watched
from torch_lms.profile.steps import StepTime, backward_of, time_step, typical_step
from torch_lms.profile.storages import StorageNames, tensor_bytes
from torch_lms.profile.timing import NodeTimes, RunTimer, make_clock
from torch_lms.profile.tracing import TracedModel
from torch_lms.profile.whole_steps import as_in_steps
from torch_lms.profile.working_space import is_measurable

__all__ = ["ProfileRun"]

_NO_BACKWARD = "no output needs a gradient: there is no backward to time"


class ProfileRun:
    """One call of `profile`, step by step."""

    def __init__(
        self, model: nn.Module, sample: Sample, device: torch.device, config: ProfileConfig, progress: Progress
    ) -> None:
        self.model = model
        self.sample = sample
        self.device = device
        self.config = config
        self.progress = progress
        self.timed = device.type != "meta"
        self.notes = [f"under autocast to {config.autocast}"] if config.autocast is not None and self.timed else []
        self.nodes: list[NodeFacts] = []
        self.steps: list[StepTime] = []
        self.unhurried: tuple[NodeTimes, NodeTimes] | None = None
        self.alone = AloneFigures()

    def measure(self, traced: TracedModel, optimizer: Any) -> Profile:
        """Sizes, times, and puts it all together."""
        self.traced = traced
        graph_module = traced.graph_module
        timer = RunTimer(make_clock(self.device))
        with as_in_training(self.model, self.sample, []), nullcontext() if self.timed else fused_attention():
            if self.config.pieces and self.timed:
                watcher, storages = self._watch_sizes(partial(self._time_pieces, timer))
            else:
                with self.progress.phase("sizes"):
                    watcher, storages = self._watch_sizes(lambda watcher, _: self._run(watcher))
                if self.timed:
                    self._time(timer)
                if graph_module is not None:
                    self._measure_alone(graph_module, watcher)
            if self.timed and self.config.two_parts and not self.alone.in_parts:
                self.notes.append("the two parts of backwards are not timed one by one: half of the time each")
        with self.progress.phase("optimizer"):
            optimizer_bytes = measure_optimizer(self.model, optimizer)
            optimizer_us = self._time_optimizer(optimizer)
        with self.progress.phase("links"):
            links = measure_links(self.device) if self.config.links and self.timed else ()
        of_optimizer = {"optimizer_bytes": optimizer_bytes, "optimizer_us": optimizer_us}
        return self._document(watcher.sizes, timer, storages, of_optimizer, links)

    def _time_optimizer(self, optimizer: Any) -> Mapping[str, float] | None:
        """Of one that has made steps the state is known, though it may make none for copies: it is not timed then."""
        if not self.timed or self.config.pieces:
            return None
        try:
            return time_optimizer(self.model, optimizer, make_clock(self.device))
        except ProfileError as error:
            self.notes.append(f"the optimizer's step is not timed: {error}")
            return None

    def _watch_sizes(
        self, run: Callable[[SizeWatcher, StorageNames], Any], *, keeps: bool = False
    ) -> tuple[SizeWatcher, StorageNames]:
        """Keeps nothing for backward, unless the forward itself runs one."""
        graph_module = self.traced.graph_module
        of_weights = nodes_of_weights(graph_module.graph) if graph_module is not None else ()
        storages = StorageNames(self.model)
        watcher = SizeWatcher(storages, {node.name for node in of_weights}, keeps=keeps)
        try:
            with transforms_watched():
                run(watcher, storages)
        except ProfileError:
            if keeps or not watcher.inside:
                raise
            return self._watch_sizes(run, keeps=True)
        return watcher, storages

    def _time_pieces(self, timer: RunTimer, sizes: SizeWatcher, storages: StorageNames) -> None:
        """Sizes and times with one node at a time on the device; there is no whole step to time."""
        self.nodes = graph_facts(self.traced) if self.traced.graph_module is not None else []
        config = self.config
        with self.progress.phase("nodes", len(self.nodes)) as advance, torch.enable_grad():
            interpreter = PieceByPiece(
                self.traced,
                Pieces(
                    self.device, config.warmup_runs, config.timed_runs, storages, sizes, timer, advance, self._precision
                ),
            )
            run_or_explain(self.model, self.sample, partial(interpreter.run, *self.sample.leaves()))
        forget_gradients(self.model)
        self.alone = AloneFigures({name: (space, None) for name, space in interpreter.spaces.items()})
        self.notes += self.alone.notes()
        self.notes.append("profiled piece by piece: step_us is the sum of the nodes' times")
        self.steps = [StepTime(*(sum(direction.device_us.values()) for direction in timer.times()))]

    def _run(self, watcher: Watcher) -> Any:
        """One forward, node by node."""
        with torch.enable_grad(), self._precision():
            if self.traced.graph_module is not None:
                self.nodes = self.nodes or graph_facts(self.traced)
                interpreter = ProfilingInterpreter(self.traced, watcher)
                return run_or_explain(self.model, self.sample, partial(interpreter.run_flat, *self.sample.leaves()))
            recorder = OpRecorder(self.model, self.sample, watcher, self.nodes or None)
            output = run_or_explain(self.model, self.sample, partial(recorder.run, self.sample.leaves()))
            self.nodes = recorder.ops
            return output

    def _precision(self) -> AbstractContextManager[Any]:
        """Of a forward."""
        if self.config.autocast is None or not self.timed:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.config.autocast)

    def _time(self, timer: RunTimer) -> None:
        """All runs: the nodes one by one, then whole steps of the model itself; see `as_in_steps`."""
        warmup, runs = self.config.warmup_runs, self.config.warmup_runs + self.config.timed_runs
        clock = make_clock(self.device)
        with self.progress.phase("nodes", runs) as advance:
            for index in range(runs):
                self._time_nodes(timer, keep=index >= warmup)
                advance()
        if self.device.type != "cpu":
            unhurried = RunTimer(clock, leads=False)
            with self.progress.phase("nodes with waits", self.config.timed_runs) as advance:
                for _ in range(self.config.timed_runs):
                    self._time_nodes(unhurried, keep=True)
                    advance()
            self.unhurried = unhurried.times()
        with self.progress.phase("whole steps", runs) as advance:
            for _ in range(runs):
                step = partial(time_step, self.model, self.sample, self.sample.leaves(), clock, self._precision())
                began = time.perf_counter()
                self.steps.append(run_or_explain(self.model, self.sample, step))
                self._end_backward()
                self._rest(time.perf_counter() - began)
                advance()
        forget_gradients(self.model)
        del self.steps[:warmup]

    def _rest(self, after_s: float) -> None:
        """Lets the device rest as long as it does after so much work; processors are not limited by power alike."""
        share = self.config.rest_share or 0.0
        if self.device.type != "cpu":
            time.sleep(after_s * share / (1 - share))

    def _measure_alone(self, graph_module: fx.GraphModule, sizes: SizeWatcher) -> None:
        """What takes a node by itself: its working space and, if they are asked for, its backward's two parts."""
        in_parts = self.timed and bool(self.config.two_parts)
        if not in_parts and not is_measurable(self.device):
            return
        clock = make_clock(self.device) if in_parts else None
        measure = partial(measure_alone, self.device, clock, bool(self.config.accumulate))
        with_gradient = {name for name, one in sizes.sizes.items() if one.gradient_bytes}
        with self.progress.phase("nodes alone", len(graph_module.graph.nodes)) as advance:
            nodes = NodesAlone(graph_module, measure, with_gradient, self._precision, advance, sizes.inside)
            run_or_explain(self.model, self.sample, partial(nodes.run, *self.sample.leaves()))
        self.alone = AloneFigures(nodes.found, in_parts)
        self.notes += self.alone.notes()

    def _time_nodes(self, timer: RunTimer, keep: bool) -> None:
        """One forward and backward, node by node."""
        began = time.perf_counter()
        backward = backward_of(self._run(timer))
        if backward is not None:
            run_or_explain(self.model, self.sample, partial(timer.backward, backward))
        elif _NO_BACKWARD not in self.notes:
            self.notes.append(_NO_BACKWARD)
        self._end_backward()
        timer.finish_runs(keep)
        self._rest(time.perf_counter() - began)

    def _end_backward(self) -> None:
        if not self.config.accumulate:
            forget_gradients(self.model)

    def _document(
        self,
        sizes: Mapping[str, NodeSizes],
        timer: RunTimer,
        storages: StorageNames,
        of_optimizer: Mapping[str, Any],
        links: Sequence[LinkProfile],
    ) -> Profile:
        forward_us, backward_us = (direction.device_us for direction in timer.times())
        nodes = tuple(
            NodeProfile(
                **{**vars(facts), **vars(sizes.get(facts.name, NodeSizes()))},
                forward_us=0.0 if facts.op in PASSIVE_OPS else forward_us.get(facts.name, 0.0),
                backward_us=backward_us.get(facts.name, 0.0),
                **self.alone.fields(facts.name, backward_us.get(facts.name, 0.0)),
            )
            for facts in self.nodes
        )
        first, tied = _parameters(self.model)
        found = Profile(
            model=type(self.model).__name__,
            level=self.traced.level,
            device=_device_name(self.device),
            torch_version=str(torch.__version__),
            warmup_runs=self.config.warmup_runs if self.timed else 0,
            timed_runs=self.config.timed_runs if self.timed else 0,
            timed=self.timed,
            nodes=nodes,
            notes=(*self.traced.notes, *self.notes),
            parameter_bytes={name: tensor_bytes(value) for name, value in first.items()},
            buffer_bytes={name: tensor_bytes(value) for name, value in self.model.named_buffers()},
            tied=tied,
            trainable=frozenset(name for name, value in first.items() if value.requires_grad),
            storage_bytes=storages.bytes,
            **of_optimizer,
            step_us=typical_step(self.steps).step_us,
            links=tuple(links),
        )
        return _with_summary(self._in_steps(found))

    def _in_steps(self, found: Profile) -> Profile:
        return found if self.unhurried is None else as_in_steps(found, self.unhurried, typical_step(self.steps))


def _with_summary(found: Profile) -> Profile:
    """Adds notes on what the figures say of themselves."""
    if not found.timed:
        return replace(found, notes=(*found.notes, "the model is on the meta device: sizes only, all times are 0"))
    return found


def _parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Each parameter under its first name, and the other names of tied ones."""
    first: dict[int, str] = {}
    own: dict[str, nn.Parameter] = {}
    tied: dict[str, str] = {}
    for name, parameter in named_parameters_with_ties(model):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
            own[name] = parameter
    return own, tied


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)
