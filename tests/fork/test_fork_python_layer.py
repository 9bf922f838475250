"""torch_lms on the fork's own runtime: runs in an environment whose PyTorch has been built from a patched source.

    TORCH_SWAP_CPU=1 PYTHONPATH=python python -m pytest --noconftest tests/fork/test_fork_python_layer.py

The flag pages main memory, so that all but the device is tested without a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("torch.cuda.swap") is None:
    pytest.skip("needs a PyTorch with the fork's patches", allow_module_level=True)
DEVICES = ["cpu"] if os.environ.get("TORCH_SWAP_CPU") == "1" else []
if torch.cuda.is_available():
    DEVICES.append("cuda")
if not DEVICES:
    pytest.skip("needs a GPU, or TORCH_SWAP_CPU=1", allow_module_level=True)

import torch_lms  # noqa: E402
from torch_lms import errors, swap  # noqa: E402

PACKAGE_ROOT = Path(torch_lms.__file__).parents[1]
NBYTES = 64 << 10
STATES = {"resident", "out_queued", "paging_out", "paged_out", "in_queued", "paging_in"}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """Nothing is out and no environment is open, before and after; counters begin at zero."""
    torch_lms.stats(reset=True)
    yield
    if torch.cuda.swap.is_swap_env_open():
        torch.cuda.close_swap_env()
    gc.collect()
    assert torch_lms.stats().paged_out_storages == 0


def filled(device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**30, (NBYTES // 4,), dtype=torch.int32, generator=generator).to(device)


def is_filled(tensor: torch.Tensor, seed: int = 0) -> bool:
    return torch.equal(tensor.cpu(), filled("cpu", seed))


def paged_out(*tensors: torch.Tensor) -> None:
    assert torch_lms.pageout(*tensors) == len(tensors)
    torch_lms.wait()
    assert [swap.state(tensor) for tensor in tensors] == ["paged_out"] * len(tensors)


def check_message(error: BaseException, *parts: str) -> None:
    """Expected, found, do, and these texts."""
    text = str(error)
    assert 0 <= text.find("expected ") < text.find("found "), text
    assert all(part in text for part in parts), text


def run_python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **variables},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


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
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


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
    out, back = WAYS[way](tensors), WAYS[way](tensors)
    assert torch_lms.pageout(*out) == 3
    torch_lms.wait()
    assert [swap.state(tensor) for tensor in tensors] == ["paged_out"] * 3
    assert [swap.state(untyped(tensor)) for tensor in tensors] == ["paged_out"] * 3
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
    assert (now.paged_out_storages, now.paged_out_bytes, now.host_used_bytes) == (0, 0, 0)
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


# --- errors ---------------------------------------------------------------------------------------------


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "foreign memory": lambda: torch.frombuffer(bytearray(NBYTES), dtype=torch.uint8),
    "meta": lambda: torch.empty(4, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_paged_out_is_refused_and_what_stood_before_it_goes(device: str, kind: str) -> None:
    tensor, wrong = filled(device), REFUSED[kind]()
    with pytest.raises(errors.PageoutError) as caught:
        torch_lms.pageout(tensor, wrong)
    check_message(caught.value)
    torch_lms.wait()
    assert swap.state(tensor) == "paged_out"
    assert is_filled(tensor)


def test_a_full_host_is_an_error_at_the_wait_and_the_storage_stays(device: str) -> None:
    tensor = torch.ones(4 << 20, device=device)
    env = torch_lms.SwapEnv(host_limit="2MiB")
    try:
        torch_lms.pageout(tensor)
        with env, pytest.raises(errors.HostPoolFullError, match="host_limit="):
            env.wait()
        assert swap.state(tensor) == "resident"
    finally:
        swap.SwapEnv(host_limit="50%")
    paged_out(tensor)
    assert torch.equal(tensor.cpu(), torch.ones(4 << 20))


def test_limits_are_understood_as_elsewhere() -> None:
    with pytest.raises(errors.LimitError):
        torch_lms.SwapEnv(host_limit="much")
    swap.SwapEnv(host_limit="50%")
    with torch_lms.SwapEnv() as env:
        env.pageout(filled(DEVICES[0]))
        limit = torch_lms.stats().host_limit_bytes
        assert abs(limit - torch.ops.storage_swap.host_memory_bytes() / 2) <= 1


def test_a_spill_directory_cannot_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(errors.LmsError) as caught:
        torch_lms.SwapEnv(spill_dir=tmp_path)
    check_message(caught.value, str(tmp_path), "TMPDIR")


@pytest.mark.skipif("cpu" not in DEVICES, reason="the CPU's backend has files")
def test_a_missing_directory_for_spill_files_is_a_spill_error() -> None:
    program = (
        "import torch, torch_lms\n"
        "tensor = torch.ones(9)\n"
        "torch_lms.pageout(tensor)\n"
        "try:\n    torch_lms.wait()\n"
        "except torch_lms.errors.SpillError as error:\n    print('spill', error)\n"
        "assert torch.equal(tensor, torch.ones(9))\n"
    )
    ended = run_python(program, TMPDIR="/nowhere/at/all")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("spill expected ")


def test_automatic_mode_is_refused_in_words() -> None:
    for enable in (lambda: torch_lms.enable("1GiB"), torch_lms.enable):
        with pytest.raises(errors.LmsError) as caught:
            enable()
        check_message(caught.value, "automatic mode", torch.__version__, "SwapEnv")
    torch_lms.disable()  # nothing to end
    assert not swap.is_enabled()


@pytest.mark.parametrize(
    ("call", "do"),
    [
        (lambda: torch_lms.pin(torch.ones(3)), "leave the tensor out"),
        (lambda: swap.unpin(torch.ones(3)), "nothing has been pinned"),
        (swap.count_cpu_allocations, "stock PyTorch"),
    ],
)
def test_what_the_fork_does_not_have_is_refused_in_words(call: Callable[[], object], do: str) -> None:
    with pytest.raises(errors.LmsError) as caught:
        call()
    check_message(caught.value, "the extension of torch_lms", do)


def test_chaos_mode_is_refused_in_words() -> None:
    ended = run_python("import torch_lms", TORCH_LMS_CHAOS="1")
    assert ended.returncode == 1
    assert "chaos mode" in ended.stderr
    assert "unset TORCH_LMS_CHAOS" in ended.stderr


def test_without_a_device_the_error_says_what_to_do() -> None:
    if torch.version.cuda is not None:
        pytest.skip("needs a build without CUDA")
    ended = run_python("import torch, torch_lms; torch_lms.pageout(torch.ones(3))", TORCH_SWAP_CPU="0")
    assert "torch_lms.errors.LmsError: expected a PyTorch built with CUDA" in ended.stderr


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
    with pytest.raises(errors.LmsError, match="automatic mode"):
        torch.cuda.set_enabled_lms(True)


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


# --- processes --------------------------------------------------------------------------------------------


@pytest.mark.skipif("cpu" not in DEVICES, reason="CUDA does not work in a forked child anyway")
def test_a_forked_child_is_told() -> None:
    program = (
        "import os, torch, torch_lms\n"
        "tensor = torch.ones(9)\n"
        "torch_lms.pageout(tensor); torch_lms.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for call in (lambda: torch_lms.pageout(tensor), torch_lms.wait):\n"
        "        try:\n            call()\n"
        "        except torch_lms.errors.LmsError as error:\n            assert 'spawn' in str(error)\n"
        "        else:\n            os._exit(3)\n"
        "    os._exit(0 if torch.equal(tensor, torch.ones(9)) else 4)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert torch.equal(tensor, torch.ones(9))\n"
    )
    ended = run_python(program)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("last", ["", "torch_lms.prefetch(tensors)", "torch.cuda.prefetch_init()"])
def test_a_program_that_ends_while_paging_ends_in_silence(device: str, last: str) -> None:
    program = (
        "import torch, torch_lms\n"
        f"tensors = [torch.ones(1 << 20, device={device!r}) for _ in range(20)]\n"
        "torch_lms.pageout(tensors)\n" + last
    )
    ended = run_python(program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# --- what needs no paging -----------------------------------------------------------------------------------


def test_profiles_partitions_and_pipelines_work_beside_it(device: str) -> None:
    from torch_lms import partition, pipeline, profile

    assert profile is not None
    assert pipeline is not None
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]).to(device)
    plain = copy.deepcopy(model)
    batch = torch.randn(4, 8, device=device)
    stages = partition.create_balanced_partition(model, [device, device], batch)
    hidden = batch
    with torch_lms.SwapEnv() as env:
        for stage in stages:
            env.pageout(stage.parameters())
            hidden = stage(hidden)
    assert torch.equal(hidden, plain(batch))
