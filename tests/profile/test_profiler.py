from __future__ import annotations

import gc
import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.profile.models import Branching, Convolutions, Fresh, OneBranching, TiedLM, Unseen
from torch_lms._torch_compat import has_dispatch_modes, has_export
from torch_lms.devices import find_device
from torch_lms.errors import ProfileError
from torch_lms.profile import Profile, ProfileConfig, interpreter, profile, profile_run, profiler, trace
from torch_lms.profile.devices import made_on
from torch_lms.profile.piecewise import PieceByPiece, Pieces
from torch_lms.profile.regions import Region
from torch_lms.profile.sizes import SizeWatcher
from torch_lms.profile.storages import StorageNames
from torch_lms.profile.timing import RunTimer, make_clock

QUICK = ProfileConfig(warmup_runs=1, timed_runs=3, progress=False)
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
IMAGES = torch.ones(2, 3, 6, 6)
CASES = [
    pytest.param(TiedLM, (IDS,), False, id="operator"),
    pytest.param(Convolutions, (IMAGES,), False, id="in_place"),
    pytest.param(OneBranching, (torch.ones(2, 4),), False, id="opened"),
    pytest.param(Branching, (torch.ones(2, 4),), False, id="recorded"),
    pytest.param(Unseen, (torch.ones(2, 4),), False, id="runtime"),
    pytest.param(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (torch.ones(2, 4),), False, id="dropout"),
    pytest.param(TiedLM, (IDS,), True, id="pieces"),
    pytest.param(Convolutions, (IMAGES,), True, id="pieces_in_place"),
]


class Counting(nn.Module):
    """Counts its runs, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs = SimpleNamespace(forwards=0, backwards=0)  # an attribute of its own would be put back
        self.linear.register_forward_pre_hook(self._count)
        self.linear.weight.register_hook(self._count_backward)

    def _count(self, *_args: Any) -> None:
        self.runs.forwards += 1

    def _count_backward(self, *_args: Any) -> None:
        self.runs.backwards += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class SeesGradients(nn.Module):
    """Notes with each forward whether a gradient was there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.runs = SimpleNamespace(seen=[])  # a list of its own would be put back
        self.register_forward_pre_hook(lambda *_: self.runs.seen.append(self.weight.grad is not None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


@pytest.mark.parametrize("accumulate", [None, False, True])
def test_whole_steps_add_to_gradients_if_asked_to(accumulate: bool | None) -> None:
    model = SeesGradients()
    model.weight.grad = own = torch.full((4,), 3.0)
    profile(model, torch.ones(2, 4), config=replace(QUICK, accumulate=accumulate))
    assert model.runs.seen[-3:] == [bool(accumulate)] * 3
    assert model.weight.grad is own
    assert torch.equal(own, torch.full((4,), 3.0))


@pytest.mark.parametrize(("build", "args", "pieces"), CASES)
def test_nodes_are_in_topological_order_and_timed(build: Any, args: Any, pieces: bool) -> None:
    found = profile(build(), *args, config=ProfileConfig(warmup_runs=0, timed_runs=2, pieces=pieces))
    seen: set[str] = set()
    for node in found.nodes:
        assert set(node.inputs) <= seen, node.name
        seen.add(node.name)
        assert node.forward_us >= 0
        assert node.backward_us >= 0
        if node.gradient_bytes and node.op.startswith("call"):
            assert node.forward_us > 0, node.name
        assert set(node.saved) | set(node.output_storages) <= set(found.storage_bytes)
    assert found.timed
    assert found.step_us > 0
    assert found.backward_us > 0
    assert Profile.from_json(found.to_json()) == found


class Writing(nn.Module):
    """Changes what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.layer(x) * mask


@pytest.mark.parametrize("pieces", [False, True])
def test_the_sample_is_left_as_it_was(pieces: bool) -> None:
    x, mask = torch.rand(4, 8), torch.ones(1, 8).expand(4, 8)  # to the latter nobody could write
    before, version = x.clone(), mask._version
    profile(Writing(), x, mask, config=replace(QUICK, pieces=pieces))
    assert torch.equal(x, before)
    assert mask._version == version


@pytest.mark.parametrize(("build", "args", "pieces"), CASES)
def test_model_is_left_as_it_was(build: Any, args: Any, pieces: bool, chaos: bool) -> None:
    model = build()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    gradients = [parameter.grad for parameter in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = [tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]]
    state = torch.get_rng_state()
    profile(model, *args, config=ProfileConfig(warmup_runs=0, timed_runs=1, pieces=pieces), optimizer=torch.optim.Adam)
    assert torch.equal(torch.get_rng_state(), state)
    assert chaos or pointers == [tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert bool((gradient == 3).all())


def test_runs_are_as_many_as_configured() -> None:
    model = Counting()
    found = profile(model, torch.ones(2, 4), config=ProfileConfig(warmup_runs=2, timed_runs=5, progress=False))
    # The pass for sizes, 2 + 5 runs of the nodes, 2 + 5 of whole steps, each node alone and the pass for that.
    alone = int(has_dispatch_modes())
    assert (model.runs.forwards, model.runs.backwards) == (1 + 7 + 7 + 2 * alone, 7 + 7 + alone)
    assert (found.warmup_runs, found.timed_runs) == (2, 5)


def test_a_loss_among_the_outputs_is_where_the_backward_starts() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4, 4)
            self.unused = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.unused(x), "loss": self.used(x).sum()}

    nodes = {node.name: node for node in profile(WithLoss(), torch.ones(2, 4), config=QUICK).nodes}
    assert nodes["used"].backward_us > 0
    assert nodes["unused"].backward_us == 0


def test_without_gradient_there_is_no_backward_and_a_note() -> None:
    model = TiedLM().requires_grad_(False)
    found = profile(model, IDS, config=QUICK)
    assert found.backward_us == 0
    assert found.trainable == frozenset()
    assert found.saved_bytes == 0
    assert sum("no backward" in note for note in found.notes) == 1


def test_profile_inside_no_grad_measures_training() -> None:
    with torch.no_grad():
        found = profile(TiedLM(), IDS, config=QUICK)
    assert found.saved_bytes > 0
    assert found.backward_us > 0


def test_dropout_is_there_in_training_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    training = profile(model.train(), torch.ones(2, 4), config=QUICK)
    evaluating = profile(model.eval(), torch.ones(2, 4), config=QUICK)
    assert training.saved_bytes > evaluating.saved_bytes


def test_a_traced_model_is_not_traced_again() -> None:
    model = TiedLM()
    traced = trace(model, (IDS,))
    found = profile(traced, IDS, config=QUICK)
    assert traced.graph_module is not None
    assert [node.name for node in found.nodes] == [node.name for node in traced.graph_module.graph.nodes]


def test_ops_in_modules_are_known_at_runtime_level() -> None:
    found = profile(Unseen(), torch.ones(2, 4), config=QUICK)
    assert found.level == "runtime"
    linear = next(node for node in found.nodes if node.name == "linear")
    assert (linear.module, linear.inputs, linear.parameters) == ("inner", ("x",), ("inner.weight", "inner.bias"))
    output = found.nodes[-1]
    assert (output.op, output.inputs) == ("output", ("relu",))


def test_ops_that_change_from_run_to_run_are_told() -> None:
    class Wandering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return x.exp() if x.detach().numpy().sum() and self.runs % 2 else x.sin()

    with pytest.raises(ProfileError, match="same ops in each run"):
        profile(Wandering(), torch.ones(2, requires_grad=True), config=QUICK)


def test_batches_that_do_not_match_name_line_and_shapes() -> None:
    class TwoInputs(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b  # here

    lines, start = inspect.getsourcelines(TwoInputs)
    line = start + next(index for index, text in enumerate(lines) if "# here" in text)
    with pytest.raises(ProfileError) as caught:
        profile(TwoInputs(), torch.ones(4, 2), torch.ones(3, 2), config=QUICK)
    message = str(caught.value)
    assert "a: float32[4, 2]" in message
    assert "b: float32[3, 2]" in message
    assert re.search(rf"test_profiler\.py:{line}|node 'add'", message)


@pytest.mark.parametrize("device", ["cuda:77", "nonsense", "xpu:3"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ProfileError, match=f"expected a device.*{device}"):
        profile(TiedLM(), IDS, config=ProfileConfig(device=device))
    with pytest.raises(ProfileError, match=device):
        find_device(device, ProfileError)


def test_a_model_on_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ProfileError, match="cpu, meta"):
        profile(model, torch.ones(1, 2), config=QUICK)


def test_a_model_without_values_cannot_be_timed() -> None:
    with pytest.raises(ProfileError, match="meta device"):
        profile(nn.Linear(2, 2, device="meta"), torch.ones(1, 2), config=ProfileConfig(device="cpu"))


def test_a_model_with_values_is_not_on_the_meta_device() -> None:
    with pytest.raises(ProfileError, match="on the meta device to measure sizes only, found Linear on cpu"):
        profile(nn.Linear(2, 2), torch.ones(1, 2), config=replace(QUICK, device="meta"))


@pytest.mark.parametrize("values", [{"timed_runs": 0}, {"warmup_runs": -1}])
def test_numbers_of_runs_are_checked(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(values.values())))):
        ProfileConfig(**values)


def test_an_optimizer_that_makes_no_step_for_copies_is_not_timed() -> None:
    """Its state is read; a copy of a parameter has no sparse gradient."""
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    found = profile(table, torch.tensor([1, 2]), optimizer=optimizer, config=QUICK)
    assert found.optimizer_us is None
    assert found.optimizer_bytes is not None
    assert found.optimizer_bytes["weight"] >= 2 * 4 * 5 * 4
    assert any("step is not timed" in note and "SparseAdam" in note for note in found.notes)


@pytest.mark.parametrize("optimizer", ["adam", 3])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    with pytest.raises(ProfileError, match=repr(optimizer)):
        profile(TiedLM(), IDS, optimizer=optimizer, config=QUICK)


def test_a_graph_is_needed_to_run_piece_by_piece() -> None:
    with pytest.raises(ProfileError, match="piece by piece"):
        profile(Unseen(), torch.ones(2, 4), config=ProfileConfig(pieces=True, timed_runs=1))


@pytest.mark.parametrize(("build", "args"), [(Convolutions, (IMAGES,)), (Fresh, (torch.ones(2, 4),))])
def test_values_piece_by_piece_are_those_of_the_model(build: Any, args: Any) -> None:
    torch.manual_seed(0)
    model = build().eval()
    traced = trace(model, args)
    storages = StorageNames(model)
    timer = RunTimer(make_clock(torch.device("cpu")))
    pieces = Pieces(torch.device("cpu"), 1, 2, storages, SizeWatcher(storages), timer, lambda: None)
    with torch.enable_grad():
        found = PieceByPiece(traced, pieces).run(*traced.arguments(args))
    assert torch.equal(found, model(*args))


def test_a_model_that_is_larger_than_the_device_is_profiled_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "fits", lambda model, device: False)
    with pytest.warns(UserWarning, match="TiedLM is larger than what is free on cpu:1: it is profiled piece by piece"):
        found = profile(TiedLM(), IDS, config=replace(QUICK, device="cpu:1"))
    assert found.device == "cpu:1"
    assert any("TiedLM is larger than what is free on cpu:1" in note for note in found.notes)
    assert any("piece by piece" in note for note in found.notes)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA out of memory. Tried to allocate 1 GiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuFFT error: CUFFT_ALLOC_FAILED",
    ],
)
def test_a_step_that_does_not_fit_whole_is_profiled_piece_by_piece(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def placed_on(model: nn.Module, device: torch.device) -> Any:
        raise RuntimeError(words)

    monkeypatch.setattr(profiler, "placed_on", placed_on)
    traced = trace(TiedLM(), (IDS,))
    with pytest.warns(UserWarning, match="needs more memory than is free on cpu:1: it is profiled piece by piece"):
        found = profile(traced, IDS, config=replace(QUICK, device="cpu:1"))
    assert any("needs more memory than is free on cpu:1" in note for note in found.notes)
    assert all(node.forward_us > 0 for node in found.nodes if node.gradient_bytes and node.op.startswith("call"))
    with pytest.raises(RuntimeError, match=re.escape(words)):
        profile(traced, IDS, config=replace(QUICK, device="cpu:1", pieces=False))


@pytest.mark.parametrize(
    ("build", "args"),
    [
        (TiedLM, (IDS,)),
        (Convolutions, (IMAGES,)),
        (Fresh, (torch.ones(2, 4),)),
        (OneBranching, (torch.ones(2, 4),)),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.LogSoftmax(-1)), (torch.ones(4, 8),)),
    ],
)
def test_piece_by_piece_nodes_need_the_same_space(build: Any, args: Any) -> None:
    def spaces(pieces: bool) -> list[tuple[int | None, int | None]]:
        torch.manual_seed(0)  # one that branches by its values takes the same branch
        found = profile(build(), *args, config=replace(QUICK, pieces=pieces))
        return [(node.forward_working_bytes, node.backward_working_bytes) for node in found.nodes]

    whole = spaces(False)
    assert spaces(True) == whole
    assert any(forward for forward, _ in whole) == has_dispatch_modes()


def test_piece_by_piece_equal_work_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[str] = []
    original = RunTimer.watch

    def watch(timer: RunTimer, name: str, run: Any) -> Any:
        watched.append(name)
        return original(timer, name, run)

    monkeypatch.setattr(RunTimer, "watch", watch)
    layers = [nn.Linear(4, 4), nn.Tanh(), *(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2)]
    config = replace(QUICK, pieces=True, sources=("symbolic",))
    found = profile(nn.Sequential(*layers), torch.ones(2, 4), config=config)
    runs = QUICK.warmup_runs + QUICK.timed_runs
    assert watched == [name for name in ("_0", "_1", "_2", "_5") for _ in range(runs)]
    times_us = {node.name: (node.forward_us, node.backward_us) for node in found.nodes}
    assert times_us["_2"] == times_us["_3"] == times_us["_4"] > (0, 0)


class Unforgetting(nn.Linear):
    """Stays whole, for it branches; its gradients are not for others to forget."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if float(x.sum()) else -x)

    def zero_grad(self) -> None:  # type: ignore[override]
        raise AssertionError("not called")


@pytest.mark.skipif(not has_export(), reason="torch.export opens what stays whole")
@pytest.mark.parametrize("pieces", [False, True])
def test_gradients_that_were_there_are_there_after_a_profile(pieces: bool) -> None:
    model, x = nn.Sequential(Unforgetting(4, 4), nn.Tanh()), torch.ones(2, 4)
    model(x).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in before if gradient is not None]
    found = profile(model, x, config=replace(QUICK, pieces=pieces, sources=("opened",)))
    assert "call_module" in {node.op for node in found.nodes if node.parameters}
    assert [id(parameter.grad) for parameter in model.parameters()] == [id(gradient) for gradient in before]
    assert all(torch.equal(one.grad, two) for one, two in zip(model.parameters(), values, strict=True))


class NoRoomToDouble(torch.autograd.Function):
    """Finds no memory in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")


class Doubling(nn.Module):
    """Doubles what a layer has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NoRoomToDouble.apply(self.layer(x)).sum()


def test_nothing_of_a_step_that_did_not_fit_is_there_when_pieces_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[torch.Tensor] = []

    def in_graphs() -> list[torch.Tensor]:
        return [found for found in gc.get_objects() if type(found) is torch.Tensor and found.grad_fn is not None]

    def time_pieces(*_: Any) -> None:
        left.extend(found for found in in_graphs() if all(found is not one for one in before))
        raise ProfileError("seen")

    monkeypatch.setattr(profile_run.ProfileRun, "_time_pieces", time_pieces)
    gc.collect()
    before = in_graphs()  # of other tests
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="needs more memory"), pytest.raises(ProfileError, match="seen"):
            profile(Doubling(), torch.ones(2, 4), config=replace(QUICK, device="cpu:1"))
    finally:
        gc.enable()
    assert not left


@pytest.mark.parametrize("pieces", [None, True])
def test_under_autocast_the_forward_has_its_type(pieces: bool | None) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.ones(32, 64)
    plain = profile(model, x, config=replace(QUICK, pieces=pieces))
    found = profile(model, x, config=replace(QUICK, pieces=pieces, autocast=torch.bfloat16))
    sizes = [[node.output_bytes for node in one.nodes if node.op.startswith("call")] for one in (plain, found)]
    assert sizes[1] == [nbytes // 2 for nbytes in sizes[0]]
    assert "under autocast to torch.bfloat16" in found.notes


@pytest.mark.skipif(not has_export(), reason="old PyTorch does not tell the storages of meta tensors")
def test_on_the_meta_device_there_is_no_autocast() -> None:
    model = nn.Linear(4, 4, device="meta")
    found = profile(model, torch.ones(2, 4, device="meta"), config=replace(QUICK, autocast=torch.float16))
    assert not any("autocast" in note for note in found.notes)


class Making(nn.Module):
    """Makes tensors where its argument is, part of them without gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 2:  # the graph is torch.export's
            raise ValueError("two rows")
        with torch.no_grad():
            offset = torch.arange(4, device=x.device) + torch.ones(4, device=x.device)
        return x + offset + torch.zeros(4, device=x.device)


@pytest.mark.skipif(not has_export(), reason="this PyTorch has no torch.export")
def test_a_graph_makes_its_tensors_where_it_is_profiled_and_afterwards_where_it_did() -> None:
    x = torch.ones(2, 4)
    traced = trace(Making(), (x,))
    graph_module = traced.graph_module
    assert graph_module is not None

    def code() -> list[str]:
        regions = [module for module in graph_module.modules() if isinstance(module, Region)]
        assert len(regions) == 1
        return [str(graph_module.code), regions[0].generated.source]

    before = code()
    assert all("device(type='cpu')" in text for text in before)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    with made_on(graph_module, cpu, meta):
        assert not any("device(type='cpu')" in text for text in code())
        assert graph_module(x.to("meta")).is_meta
    assert code() == before
    assert torch.equal(graph_module(x), Making()(x))
    assert profile(traced, x, config=replace(QUICK, device="cpu:1")).device == "cpu:1"


def test_a_graph_is_looked_through_once_however_often_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[fx.Graph] = []
    find = interpreter.find_constraints

    def count(graph: fx.Graph, modules: Any) -> Any:
        looked.append(graph)
        return find(graph, modules)

    monkeypatch.setattr(interpreter, "find_constraints", count)
    profile(TiedLM(), IDS, config=replace(QUICK, timed_runs=3))
    assert len(looked) == 1


def test_progress_is_shown_on_the_error_stream(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    profile(TiedLM(), IDS, config=ProfileConfig(warmup_runs=0, timed_runs=2, progress=True))
    shown = capsys.readouterr()
    assert shown.out == ""
    for phase in ("tracing", "nodes", "whole steps"):
        assert f"TiedLM: {phase}" in shown.err
