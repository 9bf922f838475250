"""Storages that go out at random between ops: nothing changes, and addresses that were given away stay good.

TORCH_SWAP_CPU=1 python -m pytest --noconftest tests/fork/test_random_pageouts.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("torch.cuda.swap") is None:
    pytest.skip("needs a PyTorch with the fork's patches", allow_module_level=True)
if os.environ.get("TORCH_SWAP_CPU") != "1":
    pytest.skip("needs TORCH_SWAP_CPU=1", allow_module_level=True)
pytest.importorskip("ninja")

HERE = Path(__file__).parent
BEGIN = "import random_pageouts\nrandom_pageouts.begin(seed={seed})\n"
END = """
found = random_pageouts.counts()
assert min(found['requests'], found['pageouts'], found['pageins']) > 20, found
"""


def run(program: str, seed: int | None = 0) -> str:
    """What a program prints, with page-outs or without."""
    begin, end = ("", "") if seed is None else (BEGIN.format(seed=seed), END)
    ended = subprocess.run(
        [sys.executable, "-c", "import torch\n" + begin + program + end],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


TRAINING = """
torch.manual_seed(0)
model = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(10, 3, 32)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
print([float(parameter.double().sum()).hex() for parameter in model.parameters()])
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_a_training_is_bit_equal(seed: int) -> None:
    assert run(TRAINING, seed) == run(TRAINING, None)


def test_addresses_that_were_given_away_stay_good() -> None:
    run(
        """
tensors = [torch.arange(1000.0) for _ in range(5)]
arrays = [tensors[0].numpy(), torch.utils.dlpack.from_dlpack(tensors[1]), tensors[2].storage()._storage[0:4000]]
addresses = [tensors[3].data_ptr(), tensors[4].storage().data_ptr()]
for _ in range(300):
    for tensor in tensors:
        tensor.add_(1)
assert arrays[0][999] == arrays[1][999].item() == 1299
assert bytes(arrays[2][3996:4000]) == bytes(tensors[0].storage()._storage[3996:4000])
assert addresses == [tensor.data_ptr() for tensor in tensors[3:]]
other = [torch.ones(1000) for _ in range(5)]
for _ in range(100):
    other = [tensor * 2 % 7 for tensor in other]
"""
    )


def test_functions_that_call_python_on_elements_are_left_alone() -> None:
    run(
        """
for _ in range(30):
    tensor = torch.arange(200.0).add(0)
    tensor.apply_(lambda value: (torch.ones(3) * value).sum().item())
    tensor.map_(torch.ones(200), lambda one, other: (torch.ones(2) * one).sum().item() + other)
    assert torch.equal(tensor, torch.arange(200.0) * 6 + 1)
"""
    )


def test_what_only_autograd_keeps_goes_out_between_the_steps_of_its_engine() -> None:
    run(
        """
hidden = torch.full((1000,), 0.5, requires_grad=True)
loss = hidden
for _ in range(50):
    loss = loss.sigmoid()
loss = loss.sum()
before = random_pageouts.counts()
loss.backward()
assert random_pageouts.counts()["occasions"] - before["occasions"] > 40
"""
    )


def test_threads_and_forked_children_go_on() -> None:
    run(
        """
import os, threading

def work():
    for _ in range(50):
        weight = torch.ones(100, requires_grad=True)
        (weight * 3).sum().backward()
        assert torch.equal(weight.grad, torch.full((100,), 3.0))
    done.append(1)

done = []
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
kept = [torch.full((100,), float(i)) for i in range(20)]
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if all(tensor.sum() == 100 * i for i, tensor in enumerate(kept)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    kept = [tensor + 0 for tensor in kept]
work()
for thread in threads:
    thread.join()
assert len(done) == 4
"""
    )
