"""Sizes: what nodes give and keep, checked against what autograd itself keeps of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.profile.models import Branching, Convolutions, OneBranching, TiedLM, Unseen
from torch_lms._torch_compat import has_export, storage_bytes, storage_key
from torch_lms.profile import NodeProfile, Profile, ProfileConfig, profile

ONCE = ProfileConfig(warmup_runs=0, timed_runs=1, progress=False)
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def node_of(found: Profile, name: str) -> NodeProfile:
    return next(node for node in found.nodes if node.name == name)


def kept_by_autograd(model: nn.Module, *args: Any) -> int:
    """Bytes of all storages that a forward keeps, parameters and buffers left out."""
    own = {storage_key(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(storage_key(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*args)
    del output
    return sum(storage_bytes(tensor) for key, tensor in kept.items() if key not in own)


class Chain(nn.Module):
    """Linear layers around an activation; each keeps what the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.relu(self.up(x)))


def test_storages_that_two_nodes_keep_have_one_name() -> None:
    found = profile(Chain(), torch.ones(3, 4), config=ONCE)
    assert node_of(found, "up").saved == ("x",)
    assert node_of(found, "relu").saved == ("relu",)
    assert node_of(found, "down").saved == ("relu",)
    assert node_of(found, "down").saved_parameters == ("down.weight",)
    assert found.saved_bytes == 3 * 4 * 4 + 3 * 8 * 4


def test_outputs_and_gradients_are_counted_as_sent() -> None:
    found = profile(Chain(), torch.ones(3, 4), config=ONCE)
    assert (node_of(found, "x").output_bytes, node_of(found, "x").gradient_bytes) == (48, 0)
    assert (node_of(found, "up").output_bytes, node_of(found, "up").gradient_bytes) == (96, 96)
    wanting = profile(Chain(), torch.ones(3, 4, requires_grad=True), config=ONCE)
    assert node_of(wanting, "x").gradient_bytes == 48


def test_a_view_has_the_storage_of_its_base() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            part = self.linear(x).view(-1, 2)[1:]
            return part * part

    found = profile(Viewing(), torch.ones(3, 4), config=ONCE)
    part = node_of(found, "getitem")
    assert part.output_storages == ("linear",)
    assert part.output_bytes == 8 * 2 * 4
    assert node_of(found, "mul").saved == ("linear",)
    assert found.storage_bytes["linear"] == 3 * 6 * 4


def test_views_of_parameters_are_parameters() -> None:
    class Transposing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.matmul(self.weight.t().t())

    found = profile(Transposing(), torch.ones(3, 4, requires_grad=True), config=ONCE)
    assert node_of(found, "matmul").saved == ("x",)
    assert node_of(found, "matmul").saved_parameters == ("weight",)
    assert node_of(found, "t").parameters == ("weight",)
    assert set(found.storage_bytes) == {"x", "matmul"}


def test_freed_storages_never_share_a_name() -> None:
    class Freeing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(50):
                x = x + 1  # autograd keeps nothing: each sum's bytes are free for the next but one
            return x

    found = profile(Freeing(), torch.ones(1 << 12), config=ONCE)
    names = [name for node in found.nodes for name in node.output_storages]
    assert len(set(names)) == len(names) == 51


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Chain(), (torch.ones(3, 4),)),
        (TiedLM(), (IDS,)),
        (Convolutions(), (torch.ones(2, 3, 6, 6),)),
        (OneBranching(), (torch.ones(2, 4),)),
        (Branching(), (torch.ones(2, 4),)),
        (Unseen(), (torch.ones(2, 4),)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("pieces", [False, True])
def test_what_nodes_keep_sums_up_to_what_autograd_keeps(model: nn.Module, args: Any, pieces: bool) -> None:
    if pieces and isinstance(model, Unseen if has_export() else Branching):
        pytest.skip("no graph, no pieces")
    found = profile(model, *args, config=ProfileConfig(warmup_runs=0, timed_runs=1, pieces=pieces))
    assert found.saved_bytes == kept_by_autograd(model, *args)


def test_sizes_piece_by_piece_are_those_of_the_whole() -> None:
    for model, args in ((TiedLM(), (IDS,)), (Convolutions(), (torch.ones(2, 3, 6, 6),))):
        whole = profile(model, *args, config=ONCE)
        pieces = profile(model, *args, config=ProfileConfig(warmup_runs=0, timed_runs=1, pieces=True))
        assert pieces.storage_bytes == whole.storage_bytes
        for one, other in zip(pieces.nodes, whole.nodes, strict=True):
            for field in ("name", "output_bytes", "gradient_bytes", "saved", "output_storages", "saved_parameters"):
                assert getattr(one, field) == getattr(other, field), (one.name, field)


def test_tied_parameters_come_once() -> None:
    found = profile(TiedLM(), IDS, config=ONCE)
    assert found.tied == {"head.weight": "embed.weight"}
    assert "head.weight" not in found.parameter_bytes
    assert node_of(found, "head").parameters == ("embed.weight",)
    assert found.parameter_bytes["embed.weight"] == 160
    assert found.buffer_bytes == {"scale": 16}
    readers = [node.name for node in found.nodes if "scale" in node.buffers]
    assert len(readers) == 1


def test_frozen_parameters_are_not_trainable() -> None:
    model = Chain()
    model.up.requires_grad_(False)
    found = profile(model, torch.ones(3, 4), config=ONCE)
    assert found.trainable == {"down.weight", "down.bias"}
    assert node_of(found, "up").gradient_bytes == 0
    assert node_of(found, "up").saved == ()


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop"])
def test_optimizer_state_is_measured_like_after_a_step(name: str) -> None:
    model = Chain()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    fresh = profile(model, torch.ones(3, 4), optimizer=optimizer, config=ONCE)
    before = [parameter.clone() for parameter in model.parameters()]
    maker = getattr(torch.optim, name)
    made = profile(model, torch.ones(3, 4), optimizer=lambda parameters: maker(parameters, lr=0.1), config=ONCE)
    assert not any(state for state in optimizer.state.values() if name != "Adagrad")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    stepped = profile(model, torch.ones(3, 4), optimizer=optimizer, config=ONCE)
    expected = {
        key: sum(
            value.numel() * value.element_size() for value in optimizer.state[parameter].values() if _is_tensor(value)
        )
        for key, parameter in model.named_parameters()
    }
    assert fresh.optimizer_bytes == made.optimizer_bytes == stepped.optimizer_bytes == expected


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def test_a_scheduled_optimizer_is_measured_and_not_stepped() -> None:
    model = Chain()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    found = profile(model, torch.ones(3, 4), optimizer=optimizer, config=ONCE)
    assert found.optimizer_bytes is not None
    assert found.optimizer_bytes["up.weight"] >= 2 * 4 * 8 * 4
    assert not optimizer.state
    assert scheduler.last_epoch == 0


@pytest.mark.skipif(not hasattr(torch, "export"), reason="the meta device of old PyTorch lacks ops")
def test_on_the_meta_device_sizes_are_those_of_the_cpu() -> None:
    def build(device: str) -> Profile:
        model = Chain().to(device)
        return profile(model, torch.ones(3, 4), optimizer=torch.optim.AdamW, config=ONCE)

    meta, real = build("meta"), build("cpu")
    assert not meta.timed
    assert meta.device == "meta"
    assert any("meta" in note for note in meta.notes)
    assert meta.step_us == meta.forward_us == meta.backward_us == 0
    for field in ("parameter_bytes", "storage_bytes", "optimizer_bytes", "trainable"):
        assert getattr(meta, field) == getattr(real, field)
    for one, other in zip(meta.nodes, real.nodes, strict=True):
        assert (one.name, one.output_bytes, one.saved) == (other.name, other.output_bytes, other.saved)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.given, self.options = nn.Linear(64, 192), options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (one.view(2, 128, 4, 16).transpose(1, 2) for one in self.given(x).chunk(3, -1))
        if "enable_gqa" in self.options:
            key, value = key[:, :2], value[:, :2]
        found: torch.Tensor = functional.scaled_dot_product_attention(query, key, value, **self.options)
        return found.sum()


@pytest.mark.skipif(not has_export(), reason="the meta device of old PyTorch lacks ops")
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"mask": torch.float32}, {"mask": torch.bool}, {"enable_gqa": True}, {"dropout_p": 0.1}],
)
def test_on_the_meta_device_attention_keeps_what_a_kernel_keeps(options: dict[str, Any]) -> None:
    def attention(device: str) -> tuple[int, ...]:
        options_here = {name: value for name, value in options.items() if name != "mask"}
        if "mask" in options:
            options_here["attn_mask"] = torch.zeros(128, 128, dtype=options["mask"], device=device)
        elif device == "cpu":  # with dropout it has no kernel
            options_here.pop("dropout_p", None)
        found = profile(Attention(**options_here).to(device), torch.ones(2, 128, 64), config=ONCE)
        (node,) = [node for node in found.nodes if "attention" in node.name]
        saved_bytes = sum(found.storage_bytes[name] for name in node.saved)
        return node.output_bytes, saved_bytes, node.forward_working_bytes or 0, node.backward_working_bytes or 0

    for meta, real in zip(attention("meta"), attention("cpu"), strict=True):
        assert real <= meta <= real + 64  # the state of random numbers
