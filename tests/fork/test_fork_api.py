"""The fork in Python: runs in an environment whose PyTorch has been built from a patched source.

    TORCH_SWAP_CPU=1 python -m pytest --noconftest -o pythonpath= tests/fork/test_fork_api.py

The flag pages main memory, so that all but the device is tested without a GPU.
"""

from __future__ import annotations

import copy
import io
import os
import signal
from collections.abc import Iterator

import pytest

from tests.fork.lean_profile import in_full_builds

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "pageout_manual") or "swap" not in dir(torch.cuda),
    reason="needs a PyTorch with the fork's patches",
)

DEVICES = ["cpu"] if os.environ.get("TORCH_SWAP_CPU") == "1" else []
if torch.cuda.is_available():
    DEVICES.append("cuda")
if not DEVICES:
    pytestmark = pytest.mark.skip(reason="needs a GPU, or TORCH_SWAP_CPU=1")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device, with an open environment."""
    torch.cuda.create_swap_env()
    yield request.param
    if torch.cuda.swap.is_swap_env_open():
        torch.cuda.close_swap_env()


def paged_out(tensor: torch.Tensor) -> torch.Tensor:
    """Pages a tensor out and waits for it."""
    tensor.pageout_manual()
    torch.cuda.before_prefetch_wait_all()
    assert torch.cuda.swap.state(tensor) == "paged_out"
    return tensor


ACCESSES = {
    "operator": lambda t: t + 0,
    "clone": lambda t: t.clone(),
    "view": lambda t: t.view(-1).clone().view_as(t),
    "out": lambda t: torch.add(t, 0, out=torch.empty_like(t)),
    "item": lambda t: torch.tensor([[value.item() for value in row] for row in t]),
    "numpy": lambda t: torch.from_numpy(t.cpu().numpy().copy()),
    "dlpack": lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: torch.load(_saved(t)),
    "storage": lambda t: torch.tensor(t.storage().tolist()).view(t.shape),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "data_ptr": lambda t: t if t.data_ptr() else None,
    "set_": lambda t: torch.empty(0, device=t.device).set_(t.storage(), 0, t.shape, t.stride()),
    "equal": lambda t: t if torch.equal(t, t) else None,
}


def _saved(tensor: torch.Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("access", sorted(ACCESSES))
def test_every_access_finds_the_bytes(device: str, access: str) -> None:
    expected = torch.arange(64, dtype=torch.float32).view(8, 8)
    tensor = paged_out(expected.clone().to(device))
    found = ACCESSES[access](tensor)
    assert found is not None
    assert torch.equal(found.cpu(), expected)


def test_a_view_brings_back_the_whole_storage(device: str) -> None:
    tensor = paged_out(torch.arange(1024.0, device=device))
    assert tensor[1000].item() == 1000
    assert torch.cuda.swap.state(tensor) == "resident"


def test_an_in_place_change_is_kept(device: str) -> None:
    tensor = paged_out(torch.zeros(1024, device=device))
    tensor.add_(3)
    paged_out(tensor)
    assert torch.equal(tensor.cpu(), torch.full((1024,), 3.0))


def test_a_paged_out_tensor_can_be_resized(device: str) -> None:
    tensor = paged_out(torch.arange(16.0, device=device))
    tensor.resize_(4096)
    assert torch.equal(tensor[:16].cpu(), torch.arange(16.0))


def test_saved_activations_give_the_same_gradients(device: str) -> None:
    def gradients(page: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).to(device)
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if page:
                tensor.pageout_manual()
                saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = layers(torch.randn(32, 64, device=device)).square().sum()
        if page:
            torch.cuda.before_prefetch_wait_all()
            torch.cuda.prefetch_init()
            for tensor in reversed(saved):
                tensor.need_prefetch()
            torch.cuda.prefetch_all()
        loss.backward()
        return [parameter.grad for parameter in layers.parameters()]

    assert all(map(torch.equal, gradients(False), gradients(True)))


def test_the_manuals_spelling_prefetches_too(device: str) -> None:
    tensor = paged_out(torch.arange(1024.0, device=device))
    torch.cuda.prefetch_init()
    tensor.need_prefech()
    assert torch.cuda.swap.state(tensor) == "in_queued"
    torch.cuda.prefetch_all()
    torch.cuda.prefetch_init()
    assert torch.cuda.swap.state(tensor) == "resident"


def test_a_pageout_is_no_change_to_autograd(device: str) -> None:
    weight = torch.ones(64, device=device, requires_grad=True)
    product = weight * 2
    version = product._version
    product.pageout_manual()
    assert product._version == version
    assert product.requires_grad
    product.square().sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.full((64,), 8.0))


def test_quantized_tensors_page_too(device: str) -> None:
    values = torch.linspace(-1, 1, 4096)
    with in_full_builds():
        tensor = torch.quantize_per_tensor(values.to(device), 0.01, 10, torch.qint8)
    paged_out(tensor)
    expected = torch.quantize_per_tensor(values, 0.01, 10, torch.qint8)
    torch.cuda.prefetch_init()
    tensor.need_prefetch()
    torch.cuda.prefetch_all()
    assert torch.equal(tensor.int_repr().cpu(), expected.int_repr())


def test_tensors_without_memory_are_refused_in_words(device: str) -> None:
    with pytest.raises(RuntimeError, match="found one on meta"):
        torch.empty(3, device="meta").pageout_manual()
    with in_full_builds():
        sparse = torch.eye(3, device=device).to_sparse()
    for call in (sparse.pageout_manual, lambda: torch.cuda.swap.state(sparse)):
        with pytest.raises(RuntimeError, match=r"values\(\)"):
            call()


@pytest.mark.skipif("cpu" not in DEVICES, reason="CUDA does not work in a forked child")
def test_in_a_forked_child_calls_raise_and_what_is_out_can_be_read() -> None:
    torch.cuda.create_swap_env()
    tensor = paged_out(torch.ones(4096))
    calls = (
        torch.cuda.create_swap_env,
        torch.cuda.prefetch_init,
        torch.cuda.before_prefetch_wait_all,
        torch.cuda.prefetch_all,
        torch.cuda.close_swap_env,
        tensor.pageout_manual,
        tensor.need_prefetch,
    )
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        raised = 0
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                raised += "'spawn'" in str(error)
        os._exit(0 if raised == len(calls) and torch.equal(tensor, torch.ones(4096)) else 3)
    assert os.waitpid(child, 0)[1] == 0
    torch.cuda.close_swap_env()
    assert torch.equal(tensor, torch.ones(4096))


def test_errors_of_every_call_have_their_kind() -> None:
    operators = torch.ops.storage_swap
    for call in (operators.prefetch_all, operators.prefetch_init, operators.wait_pageouts, operators.close_env):
        operators.take_error_kind()
        with pytest.raises(RuntimeError):
            call()
        assert operators.take_error_kind() == "Error"


@pytest.mark.skipif("cpu" not in DEVICES, reason="foreign device memory needs another library")
def test_foreign_memory_is_refused() -> None:
    tensor = torch.frombuffer(bytearray(64), dtype=torch.uint8)
    torch.cuda.create_swap_env()
    try:
        with pytest.raises(RuntimeError, match="does not belong to PyTorch's allocator"):
            tensor.pageout_manual()
    finally:
        torch.cuda.close_swap_env()


def test_nothing_works_without_an_environment(device: str) -> None:
    torch.cuda.close_swap_env()
    tensor = torch.zeros(16, device=device)
    for call in (tensor.pageout_manual, tensor.need_prefetch, torch.cuda.prefetch_all, torch.cuda.close_swap_env):
        with pytest.raises(RuntimeError, match="create_swap_env"):
            call()


def test_a_second_environment_is_refused(device: str) -> None:
    with pytest.raises(RuntimeError, match="close_swap_env"):
        torch.cuda.create_swap_env()


def test_a_wrong_host_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="host_limit"):
        torch.cuda.create_swap_env(host_limit=-1)


def test_closing_leaves_everything_on_the_device(device: str) -> None:
    tensors = [torch.full((256,), float(i), device=device) for i in range(8)]
    for tensor in tensors:
        tensor.pageout_manual()
    torch.cuda.close_swap_env()
    for i, tensor in enumerate(tensors):
        assert torch.cuda.swap.state(tensor) == "resident"
        assert torch.equal(tensor.cpu(), torch.full((256,), float(i)))


def test_documentation_and_overrides_know_the_methods() -> None:
    for name in ("pageout_manual", "need_prefetch", "need_prefech"):
        method = getattr(torch.Tensor, name)
        assert method.__doc__
        assert method in torch.overrides.get_testing_overrides()
    for name in torch.cuda.swap.__all__:
        assert getattr(torch.cuda, name).__doc__
