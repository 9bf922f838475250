"""What the ranks of the tests do."""

from __future__ import annotations

import copy
import os
import select
import signal
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn import functional

from torch_lms.errors import LmsError, PipelineError
from torch_lms.pipeline.config import PipelineConfig
from torch_lms.pipeline.runner import Pipeline
from torch_lms.pipeline.torch_backend import is_available
from torch_lms.stages.cutting import split
from torch_lms.stages.stage import Stage
from torch_lms.stages.state_dicts import merge_state_dicts

VOCABULARY, WIDTH, TOKENS, BATCH, SEED = 13, 8, 5, 4, 70


class Block(nn.Module):
    """Attention with dropout, then an MLP that works in place and holds a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.relu = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
        q, k, v = (self.mix(x).narrow(-1, start * width, width) for start in range(3))
        scores = (q @ k.transpose(1, 2)).masked_fill(mask, -1e9).softmax(-1)
        return x + self.norm(self.relu(self.drop(scores) @ v))


class TinyGPT(nn.Module):
    """A mask and a width cross borders, weights are tied, and the loss may be the model's own."""

    def __init__(self, own_loss: bool, layers: int = 3) -> None:
        super().__init__()
        self.own_loss = own_loss
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        mask = torch.ones_like(x @ x.transpose(1, 2), dtype=torch.bool).triu(1)
        width = x.size(-1)
        for block in self.blocks:
            x = block(x, mask, width)
        logits = self.head(x).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten()) if self.own_loss else logits  # type: ignore[union-attr]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, targets.flatten())


def made(own_loss: bool) -> TinyGPT:
    torch.manual_seed(3)
    return TinyGPT(own_loss)


def cut(model: nn.Module, stages: int) -> list[Stage]:
    concrete = {} if getattr(model, "own_loss", True) else {"targets": None}
    traced = fx.symbolic_trace(model, concrete_args=concrete)
    nodes = [node.name for node in traced.graph.nodes if node.op.startswith("call_")]
    return split(traced, {name: index * stages // len(nodes) for index, name in enumerate(nodes)}, model=model)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    return ids, ids.roll(-1, 1)


def single_device(microbatches: int, steps: int = 2) -> tuple[TinyGPT, list[torch.Tensor]]:
    """The same training in one process, a microbatch after the other."""
    model = made(own_loss=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        parts = []
        for index, (ids, targets) in enumerate(zip(*(tensor.chunk(microbatches) for tensor in batch()), strict=False)):
            torch.manual_seed(SEED + step * microbatches + index)
            loss = model(ids, targets) / microbatches if microbatches > 1 else model(ids, targets)
            loss.backward()
            parts.append(loss.detach())
        optimizer.step()
        losses.append(torch.stack(parts).sum())
    return model, losses


def check_equal(schedule: str, executor: str, stages: int, microbatches: int, own_loss: bool) -> None:
    """Two steps of the pipeline are those of one device; bit for bit with one microbatch."""
    model, losses = single_device(microbatches)
    config = PipelineConfig(schedule=schedule, executor=executor, microbatches=microbatches, seed=SEED)
    ids, targets = batch()
    with Pipeline(cut(made(own_loss), stages), loss=None if own_loss else loss_of, config=config) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        for expected in losses:
            optimizer.zero_grad()
            loss = pipeline.step(ids, targets) if own_loss else pipeline.step(ids, target=targets)
            optimizer.step()
            assert (loss is not None) == (pipeline.stages[-1].index == stages - 1)
            if loss is not None:
                close(loss, expected, microbatches)
        states: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
        dist.all_gather_object(states, pipeline.state_dict())
    merged = merge_state_dicts(states)
    assert merged.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        close(merged[name], value, microbatches)


def close(found: torch.Tensor, expected: torch.Tensor, microbatches: int) -> None:
    if microbatches == 1:
        assert torch.equal(found, expected), (found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def equal_to_single_device(rank: int, world: int) -> None:
    """Every schedule of every executor that there is."""
    cases = [("gpipe", "own", 2, 1, True), ("1f1b", "own", 2, 4, True), ("gpipe", "own", 2, 4, False)]
    if is_available():
        cases += [("gpipe", "torch", 2, 1, False), ("1f1b", "torch", 2, 4, True), ("1f1b", "torch", 2, 1, True)]
        cases += [
            ("interleaved", "torch", 4, 4, True),
            ("zero_bubble", "torch", 4, 4, True),
            ("interleaved", "torch", 4, 2, False),
        ]
        cases += [("zero_bubble", "torch", 2, 2, False)]
    for case in cases:
        check_equal(*case)
        if rank == 0:
            print("equal", *case, flush=True)


def measured_steps(rank: int, world: int) -> None:
    """All ranks get all events, in an order that the schedule allows."""
    for executor in ["own", "torch"] if is_available() else ["own"]:
        config = PipelineConfig(microbatches=4, executor=executor, seed=SEED)
        with Pipeline(cut(made(True), 2), config=config) as pipeline:
            pipeline.step(*batch())
            before = [parameter.grad.clone() for parameter in pipeline.parameters()]
            for parameter in pipeline.parameters():
                parameter.grad = None
            pipeline._step = 0
            step = pipeline.measured(*batch())
            events = step.events
            assert step.peak_memory_bytes == (None, None)
            assert all(torch.equal(old, new.grad) for old, new in zip(before, pipeline.parameters(), strict=False))
            ran, meant = sorted(event.action for event in events), sorted(action for _, action in pipeline.schedule)
            assert ran == meant, (executor, list(map(str, ran)), list(map(str, meant)))
            for own, actions in enumerate(pipeline.schedule.ranks):
                ran = sorted((event for event in events if event.rank == own), key=lambda event: event.start_us)
                assert [event.action for event in ran] == list(actions)


class SharedByAll(nn.Module):
    """One weight in every stage, and in some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * self.scale)) * self.scale
        return x.square().mean()


def weight_shared_by_all_stages(rank: int, world: int) -> None:
    """Stages 0 and 2 are on rank 0, 1 and 3 on rank 1; gradients of two steps add up."""
    torch.manual_seed(0)
    model, x = SharedByAll(), torch.rand(4, 4)
    stages = cut(model, 4)
    config = PipelineConfig(schedule="interleaved", microbatches=2)
    with Pipeline(stages, config=config) as pipeline:
        assert all("scale" in stage.shared for stage in pipeline.stages)
        for _ in range(2):
            pipeline.step(x)
            for part in x.chunk(2):
                (model(part) / 2).backward()
        for stage in pipeline.stages:
            for name, value in stage.named_parameters():
                torch.testing.assert_close(value.grad, model.get_parameter(name).grad)
        before = {stage.index: stage.get_parameter("scale").grad.clone() for stage in pipeline.stages}
        for stage in pipeline.stages:
            stage.get_parameter("scale").requires_grad_(False)
        pipeline.step(x)
        assert all(torch.equal(stage.get_parameter("scale").grad, before[stage.index]) for stage in pipeline.stages)


class ReadTwice(nn.Module):
    """An embedding whose gradient is sparse, at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x + self.embed(ids)).square().mean()


def sparse_gradient_of_what_is_shared(rank: int, world: int) -> None:
    """Both ranks say so."""
    with (
        Pipeline(cut(ReadTwice(), 2), config=PipelineConfig(microbatches=2)) as pipeline,
        pytest.raises(PipelineError, match="which several stages share, found one of"),
    ):
        pipeline.step(torch.arange(8).view(4, 2))


def gradients_under_zero_bubble(
    model: nn.Module, x: torch.Tensor, stage_of: Callable[[str], int], microbatches: int
) -> None:
    """They are the model's own, for each weight of this rank's stages.

    Args:
        model: what `fx.symbolic_trace` takes.
        x: its argument.
        stage_of: the stage of a node, by its name.
        microbatches: that the argument is cut into.
    """
    traced = fx.symbolic_trace(model)
    nodes = [node.name for node in traced.graph.nodes if node.op.startswith("call_")]
    stages = split(traced, {name: stage_of(name) for name in nodes}, model=model)
    with Pipeline(stages, config=PipelineConfig(schedule="zero_bubble", microbatches=microbatches)) as pipeline:
        pipeline.step(x)
        for part in x.chunk(microbatches):
            (model(part) / microbatches).backward()
        for stage in pipeline.stages:
            for name, value in stage.named_parameters():
                torch.testing.assert_close(value.grad, model.get_parameter(name).grad, msg=name)


class MeetTwice(nn.Module):
    """In the last stage `both` meets what came in twice, each time beside a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.first, self.second, self.both = (nn.Parameter(torch.rand(4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        x = x + self.first * self.both
        x = torch.tanh(x) + self.second * self.both
        return x.square().mean()


def weights_that_meet_values_twice(rank: int, world: int) -> None:
    """Under zero bubble each counts once: PyTorch puts `both` into two groups of weights."""
    torch.manual_seed(0)
    gradients_under_zero_bubble(MeetTwice(), torch.rand(4, 4), lambda name: int(name != "start"), microbatches=2)


class SendsWeights(nn.Module):
    """The second stage sends on a value that is made of a weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.sent, self.last = (nn.Parameter(torch.rand(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        sent = torch.sin(self.sent)
        x = torch.tanh(x) * self.last
        return (x * sent).square().mean()


def weights_that_are_sent_on(rank: int, world: int) -> None:
    """Under zero bubble they meet what came in where the stage ends."""
    torch.manual_seed(0)
    stage_of = {"start": 0, "sin": 1, "tanh": 1, "mul": 1, "mul_1": 2, "square": 2, "mean": 3}
    gradients_under_zero_bubble(SendsWeights(), torch.rand(8, 4), stage_of.__getitem__, microbatches=4)


def losses_of_other_types(rank: int, world: int) -> None:
    """A model's loss has the model's type."""
    batch = torch.rand(8, 4, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        model = SharedByAll().to(dtype)
        expected = copy.deepcopy(model)(batch.to(dtype))
        with Pipeline(cut(model, 2), config=PipelineConfig(microbatches=1, executor="torch")) as pipeline:
            loss = pipeline.step(batch.to(dtype))
            assert loss is None or (loss.dtype == dtype and torch.equal(loss, expected.detach())), (loss, expected)


def _fails_in_stage() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ArithmeticError("no more numbers")


def _dies_in_stage() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _train_until(function: Callable[[], None], executor: str) -> None:
    """The last rank's stage fails in the second step."""
    model = made(True)
    stages = cut(model, dist.get_world_size())
    with Pipeline(stages, config=PipelineConfig(microbatches=4, executor=executor)) as pipeline:
        pipeline.step(*batch())
        run = pipeline.stages[0]._run

        def run_after(stage: Stage, *values: torch.Tensor, **feeds: torch.Tensor) -> object:
            function()
            return run(stage, *values, **feeds)

        pipeline.stages[0]._run = run_after
        pipeline.step(*batch())


def dies_under_torch(rank: int, world: int) -> None:
    _train_until(_dies_in_stage, "torch")


def fails_under_own(rank: int, world: int) -> None:
    _train_until(_fails_in_stage, "own")


def batch_that_does_not_divide(rank: int, world: int) -> None:
    """Only rank 0 has a batch to complain of; the others hear of it."""
    with Pipeline(cut(made(False), 2), loss=loss_of, config=PipelineConfig(microbatches=3, executor="own")) as pipeline:
        ids, targets = batch()
        pipeline.step(*([ids] if rank == 0 else []), target=targets[:3] if rank else None)


def device_that_is_not_there(rank: int, world: int) -> None:
    with pytest.raises(LmsError, match="cuda:77" if rank == 1 else "rank 1 failed.*cuda:77"):
        Pipeline(cut(made(True), 2), device="cuda:77" if rank == 1 else "cpu")


def more_stages_than_fit(rank: int, world: int) -> None:
    for stages, message in [(3, "found 3"), (4, "one stage on each rank"), (1, "found 1")]:
        with pytest.raises(LmsError, match=message):
            Pipeline(cut(made(True), stages))


def stages_in_pytorch_alone(rank: int, world: int) -> None:
    """A stage is what torch.distributed.pipelining takes as it is."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    inputs: Sequence[torch.Tensor] = torch.rand(4, 4), torch.rand(4, 4)
    functional.mse_loss(model(inputs[0]), inputs[1]).backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    stage = cut(model, 2)[rank]
    schedule = ScheduleGPipe(PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=functional.mse_loss)
    if rank == 0:
        schedule.step(inputs[0])
    else:
        schedule.step(target=inputs[1])
    for name, value in stage.named_parameters():
        torch.testing.assert_close(value.grad, expected[name])


def all_is_well(rank: int, world: int) -> None:
    """Everything after which the ranks go on."""
    equal_to_single_device(rank, world)
    measured_steps(rank, world)
    more_stages_than_fit(rank, world)
    device_that_is_not_there(rank, world)
    if is_available():
        stages_in_pytorch_alone(rank, world)
        weight_shared_by_all_stages(rank, world)
        sparse_gradient_of_what_is_shared(rank, world)
        losses_of_other_types(rank, world)
        weights_that_meet_values_twice(rank, world)
        weights_that_are_sent_on(rank, world)


def dies_with_a_child(rank: int, world: int) -> None:
    """A forked child, like a data loader's, outlives the rank that dies, and ends after the other rank has."""
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    config = PipelineConfig(microbatches=4, executor="own", heartbeat_timeout_s=5)
    with Pipeline(cut(made(True), 2), config=config) as pipeline:
        if rank == 1:
            if os.fork() == 0:
                signal.alarm(80)  # whatever happens
                select.select([os.pidfd_open(pids[0])], [], [])
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        pipeline.step(*batch())


def keeper_of_the_store_dies(rank: int, world: int) -> None:
    """Rank 0 keeps the store, and with it what the ranks know of each other."""
    with Pipeline(cut(made(True), world), config=PipelineConfig(microbatches=4, executor="own")) as pipeline:
        pipeline.step(*batch())
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        pipeline.step(*batch())
