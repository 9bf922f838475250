"""torch_lms on the fork's own runtime: runs in an environment whose PyTorch has been built from a patched source.

    TORCH_SWAP_CPU=1 python -m pytest --noconftest tests/fork/test_fork_python_*.py

The flag pages main memory, so that all but the device is tested without a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fork.python_layer import (
    NBYTES,
    STATES,
    device,
    filled,
    is_filled,
    paged_out,
    settled,
    swap,
    torch,
    torch_lms,
)
from torch_lms import errors

__all__ = ["device", "settled"]  # fixtures


# --- what is chosen ---------------------------------------------------------------------------------


def test_the_fork_is_the_runtime_and_no_extension_is_loaded() -> None:
    from torch_lms import _core, _fork

    assert _core.core is _fork
    assert "torch_lms._C" not in sys.modules


def test_nothing_of_pytorch_is_wrapped(device: str) -> None:
    paged_out(filled(device))
    for method in (torch.Tensor.numpy, torch.Tensor.data_ptr, torch.Tensor.__dlpack__):
        assert not hasattr(method, "__wrapped__")


def test_every_public_name_is_there() -> None:
    for module in (torch_lms, swap):
        names = set(module.__all__) - {"chunked", "fit"}  # which are refused in words
        assert [name for name in names if not hasattr(module, name)] == []


# --- paging by hand -----------------------------------------------------------------------------------


def typed(tensor: torch.Tensor) -> Any:
    return tensor.storage()


def untyped(tensor: torch.Tensor) -> Any:
    return tensor.storage()._storage


WAYS: dict[str, Callable[[list[torch.Tensor]], tuple[Any, ...]]] = {
    "one by one": lambda tensors: tuple(tensors),
    "a list": lambda tensors: (tensors,),
    "a generator": lambda tensors: ((tensor for tensor in tensors),),
    "typed storages": lambda tensors: tuple(map(typed, tensors)),
    "storages": lambda tensors: (list(map(untyped, tensors)),),
    "views": lambda tensors: tuple(tensor[3:5] for tensor in tensors),
    "each twice": lambda tensors: (*tensors, *tensors),
}


@pytest.mark.parametrize("way", WAYS)
def test_everything_that_is_named_goes_out_and_comes_back(device: str, way: str) -> None:
    tensors = [filled(device, seed) for seed in range(3)]
    # Held before: from v1.13 on, making Python's object for a storage looks at its data.
    out, back, storages = WAYS[way](tensors), WAYS[way](tensors), [untyped(tensor) for tensor in tensors]
    assert torch_lms.pageout(*out) == 3
    torch_lms.wait()
    assert [swap.state(tensor) for tensor in tensors] == ["paged_out"] * 3
    assert [swap.state(storage) for storage in storages] == ["paged_out"] * 3
    assert torch_lms.prefetch(*back) == 3
    torch_lms.wait()
    assert [swap.state(tensor) for tensor in tensors] == ["resident"] * 3
    assert all(is_filled(tensor, seed) for seed, tensor in enumerate(tensors))


@pytest.mark.parametrize("call", [torch_lms.pageout, torch_lms.prefetch])
def test_nothing_named_is_nothing_done(call: Callable[..., int]) -> None:
    assert call() == call([]) == 0
    assert not torch.cuda.swap.is_swap_env_open()


def test_what_is_out_resident_or_empty_is_not_counted(device: str) -> None:
    tensor, empty = filled(device), torch.empty(0, device=device)
    assert torch_lms.prefetch(tensor) == 0
    paged_out(tensor)
    assert torch_lms.pageout(tensor, empty) == 0
    assert torch_lms.prefetch(tensor) == 1
    torch_lms.wait()
    assert torch_lms.prefetch(tensor, empty) == 0


def test_states_are_the_six_words(device: str) -> None:
    tensor = filled(device)
    assert swap.state(tensor) == "resident"
    torch_lms.pageout(tensor)
    assert swap.state(tensor) in STATES
    torch_lms.wait()
    assert not swap.is_resident(tensor)
    assert swap.state(tensor) == "paged_out"  # asking moves nothing
    assert is_filled(tensor)
    assert swap.is_resident(tensor)


@pytest.mark.parametrize("call", [torch_lms.pageout, torch_lms.prefetch, swap.state])
@pytest.mark.parametrize("wrong", [3, "tensor", None])
def test_what_is_no_tensor_is_a_type_error(call: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected"):
        call(wrong)


def test_threads_page_and_wait_at_the_same_time(device: str) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            tensor = filled(device, seed)
            for _ in range(50):
                torch_lms.pageout(tensor)
                torch_lms.wait()
                torch_lms.prefetch(tensor)
                assert is_filled(tensor, seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_thread_may_wait_while_another_one_prefetches(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_lms import _fork

    failures: list[BaseException] = []

    def wait() -> None:
        try:
            torch_lms.wait()
        except BaseException as error:
            failures.append(error)

    def call(operator: str, *arguments: Any) -> Any:
        result = original(operator, *arguments)
        if operator == "prefetch":
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
        return result

    original = _fork._call
    tensor = filled(device)
    paged_out(tensor)
    monkeypatch.setattr(_fork, "_call", call)
    torch_lms.prefetch(tensor)
    assert failures == []
    assert is_filled(tensor)


# --- environments ----------------------------------------------------------------------------------------


def test_an_environment_pages_in_everything_on_exit_and_is_closed(device: str) -> None:
    tensor = filled(device)
    with torch_lms.SwapEnv() as env:
        assert env.pageout(tensor) == 1
        env.wait()
        assert swap.state(tensor) == "paged_out"
    assert swap.state(tensor) == "resident"
    assert not torch.cuda.swap.is_swap_env_open()
    assert is_filled(tensor)


def test_an_inner_environment_leaves_the_outer_one_usable(device: str) -> None:
    tensor = filled(device)
    with torch_lms.SwapEnv() as outer:
        outer.pageout(tensor)
        with torch_lms.SwapEnv() as inner:
            inner.wait()
        assert swap.state(tensor) == "resident"
        outer.pageout(tensor)
        outer.wait()
        assert swap.state(tensor) == "paged_out"
    assert swap.state(tensor) == "resident"


def test_the_programs_own_environment_stays_open(device: str) -> None:
    tensor, other = filled(device), filled(device, 1)
    paged_out(other)
    torch.cuda.close_swap_env()  # the one that this has opened
    torch.cuda.create_swap_env()
    other.pageout_manual()
    with torch_lms.SwapEnv() as env:
        env.pageout(tensor)
        env.wait()
    assert torch.cuda.swap.is_swap_env_open()
    assert swap.state(tensor) == swap.state(other) == "resident"
    other.pageout_manual()
    torch.cuda.close_swap_env()
    assert is_filled(other, 1)


def test_an_exception_inside_closes_the_environment_and_passes(device: str) -> None:
    tensor, env = filled(device), torch_lms.SwapEnv()

    def page_and_raise() -> None:
        with env:
            env.pageout(tensor)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        page_and_raise()
    assert swap.state(tensor) == "resident"
    with pytest.raises(errors.EnvError):
        env.pageout(tensor)


def test_prefetches_can_be_held_back(device: str) -> None:
    tensor = filled(device)
    with torch_lms.SwapEnv():
        paged_out(tensor)
        torch.cuda.prefetch_init()
        tensor.need_prefetch()
        assert swap.state(tensor) == "in_queued"
        with pytest.raises(errors.LmsError, match="prefetch_all"):
            torch_lms.wait()
        torch.cuda.prefetch_all()
        torch_lms.wait()
        assert swap.state(tensor) == "resident"
    assert is_filled(tensor)


# --- training -------------------------------------------------------------------------------------------


def gradients(device: str, env: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64).to(device) for _ in range(4)]
    model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1], torch.nn.Tanh(), layers[2], layers[3])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        activations = []
        hidden = torch.randn(32, 64).to(device)
        for layer in model:
            hidden = layer(hidden)
            activations.append(hidden)
            if env is not None:
                env.pageout(hidden, layer.parameters())
        loss = hidden.square().mean()
        if env is not None:
            env.wait()
            env.prefetch(reversed(activations[::2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_a_paged_training_is_bit_equal(device: str) -> None:
    plain = gradients(device, None)
    with torch_lms.SwapEnv() as env:
        paged = gradients(device, env)
    assert torch_lms.stats().pageouts > 20
    assert all(map(torch.equal, plain, paged))


# --- statistics -----------------------------------------------------------------------------------------


def test_every_counter_counts_what_it_says(device: str) -> None:
    first, second, third = (filled(device, seed) for seed in range(3))
    with torch_lms.SwapEnv():
        paged_out(first, second, third)
        now = torch_lms.stats()
        assert (now.pageouts, now.pageout_bytes) == (3, 3 * NBYTES)
        assert (now.paged_out_storages, now.paged_out_bytes) == (3, 3 * NBYTES)
        assert 3 * NBYTES <= now.host_used_bytes <= now.host_bytes <= now.host_limit_bytes
        assert now.tracked_storages >= 3
        assert is_filled(first)
        torch_lms.prefetch(second)
        torch_lms.wait()
        del third
        now = torch_lms.stats()
    assert (now.passive_pageins, now.prefetches, now.prefetch_hits) == (1, 1, 1)
    assert (now.pageins, now.pagein_bytes) == (2, 2 * NBYTES)
    assert (now.paged_out_storages, now.paged_out_bytes) == (0, 0)
    held = 2 * NBYTES if device == "cuda" else 0  # copies that have just ended: the next page-out takes them
    assert now.host_used_bytes <= held
    assert (now.host_served, now.pagein_failures, now.limit_bytes) == (0, 0, 0)


def test_reset_gives_what_was_and_counts_anew(device: str) -> None:
    tensor = filled(device)
    with torch_lms.SwapEnv():
        paged_out(tensor)
        assert torch_lms.stats(reset=True).pageouts == 1
        now = torch_lms.stats()
    assert (now.pageouts, now.pageout_bytes, now.paged_out_storages) == (0, 0, 1)
    assert all(type(value) is int and value >= 0 for value in dataclasses.asdict(now).values())


def test_the_forks_own_statistics_are_the_same(device: str) -> None:
    tensor = filled(device)
    with torch_lms.SwapEnv():
        paged_out(tensor)
        own = torch.cuda.swap.stats()
        ours = dataclasses.asdict(torch_lms.stats())
    assert own.items() <= ours.items()


# --- the names of MLMS and IBM LMS ------------------------------------------------------------------------


def test_attach_keeps_the_forks_names_and_adds_the_others(device: str) -> None:
    kept = {name: getattr(torch.cuda, name) for name in torch.cuda.swap.__all__}
    method = torch.Tensor.pageout_manual
    swap.mlms.attach()
    assert torch.Tensor.pageout_manual is method
    assert all(getattr(torch.cuda, name) is function for name, function in kept.items())
    torch.cuda.set_limit_lms("1GiB")
    assert torch.cuda.get_limit_lms() == "1GiB"
    assert not torch.cuda.get_enabled_lms()


@pytest.mark.parametrize("functions", [torch.cuda, swap.mlms])
def test_the_manuals_flow(device: str, functions: Any) -> None:
    pageout = getattr(functions, "pageout_manual", torch.Tensor.pageout_manual)
    need_prefetch = getattr(functions, "need_prefetch", torch.Tensor.need_prefetch)
    tensors = [filled(device, seed) for seed in range(3)]
    functions.create_swap_env()
    for tensor in tensors:
        pageout(tensor)
    functions.before_prefetch_wait_all()
    assert [swap.state(tensor) for tensor in tensors] == ["paged_out"] * 3
    functions.prefetch_init()
    for tensor in tensors:
        need_prefetch(tensor)
    assert [swap.state(tensor) for tensor in tensors] == ["in_queued"] * 3
    functions.prefetch_all()
    functions.close_swap_env()
    assert [swap.state(tensor) for tensor in tensors] == ["resident"] * 3
    assert all(is_filled(tensor, seed) for seed, tensor in enumerate(tensors))
    assert not torch.cuda.swap.is_swap_env_open()


# --- what needs no paging -----------------------------------------------------------------------------------


def test_doctor_tells_of_the_fork_and_tries_it(device: str) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "torch_lms", "doctor", "--json"]
    env = {**os.environ, "PYTHONPATH": str(Path(torch_lms.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "fork" in found["Runtime"]["runtime"]
    assert set(found[f"Tried on {device}"].values()) == {"ok"}


def test_profiles_partitions_and_pipelines_work_beside_it(device: str) -> None:
    from torch_lms import pipeline, profile

    assert profile is not None
    assert pipeline is not None
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]).to(device)
    plain = copy.deepcopy(model)
    batch = torch.randn(4, 8, device=device)
    stages = torch_lms.create_balanced_partition(model, [device, device], batch)
    hidden = batch
    with torch_lms.SwapEnv() as env:
        for stage in stages:
            env.pageout(stage.parameters())
            hidden = stage(hidden)
    assert torch.equal(hidden, plain(batch))


def test_an_open_environment_is_not_looked_at_by_requests(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_lms import _fork

    called: list[str] = []
    original = _fork._call

    def call(operator: str, *arguments: Any) -> Any:
        called.append(operator)
        return original(operator, *arguments)

    tensor = filled(device)
    paged_out(tensor)
    monkeypatch.setattr(_fork, "_call", call)
    torch_lms.prefetch(tensor)
    torch_lms.pageout(tensor)
    assert called == ["prefetch_all", "prefetch", "pageout"]
    monkeypatch.undo()
    torch.cuda.close_swap_env()
    assert torch_lms.prefetch(tensor) == 0  # opens another one
    assert torch.cuda.swap.is_swap_env_open()
