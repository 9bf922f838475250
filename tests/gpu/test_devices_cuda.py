"""Two devices: limits of their own, tensors that go from one to the other, and collectives between them."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import torch_lms
from torch_lms.swap import state

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

DEVICES = ["cuda:0", "cuda:1"]
MIB = 1 << 20


class Halves(nn.Module):
    """A model whose first half is on one device and whose second half is on the other."""

    def __init__(self) -> None:
        super().__init__()
        widths = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)]
        self.first = nn.Sequential(*widths[:3]).to(DEVICES[0])
        self.second = nn.Sequential(*widths[3:]).to(DEVICES[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).to(DEVICES[1]))


def train(model: nn.Module, batch: torch.Tensor) -> tuple[list[float], list[torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


def clean() -> None:
    torch.cuda.init()
    gc.collect()
    torch.cuda.empty_cache()
    for device in DEVICES:
        torch.cuda.reset_peak_memory_stats(device)


def train_halves() -> tuple[list[float], list[torch.Tensor], list[int]]:
    clean()
    torch.manual_seed(0)
    losses, parameters = train(Halves(), torch.randn(8192, 1024, device=DEVICES[0]))
    return losses, parameters, [torch.cuda.max_memory_allocated(device) for device in DEVICES]


def test_a_model_on_two_devices_keeps_the_limit_of_each(paged: ModuleType) -> None:
    losses, parameters, peaks = train_halves()
    limits = {device: peak * share // 4 for device, peak, share in zip(DEVICES, peaks, (2, 3), strict=True)}
    torch_lms.enable(limits)
    limited_losses, limited_parameters, limited_peaks = train_halves()
    assert torch_lms.stats().pageouts > 0
    assert losses == limited_losses
    assert all(torch.equal(one, other) for one, other in zip(parameters, limited_parameters, strict=True))
    assert all(peak <= limits[device] for device, peak in zip(DEVICES, limited_peaks, strict=True))


def test_threads_train_on_devices_of_their_own(paged: ModuleType) -> None:
    found: dict[str, tuple[list[float], list[torch.Tensor]]] = {}

    def run(device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        parts = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(3)]
        model = nn.Sequential(*parts)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02, generator=generator)
        batch = torch.randn(16384, 512, generator=generator)
        found[device] = train(model.to(device), batch.to(device))

    torch_lms.enable(dict.fromkeys(DEVICES, "768MiB"))
    threads = [threading.Thread(target=run, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch_lms.stats().pageouts > 0
    (losses, parameters), (other_losses, other_parameters) = (found[device] for device in DEVICES)
    assert losses == other_losses
    assert all(torch.equal(one, other) for one, other in zip(parameters, other_parameters, strict=True))


@pytest.mark.parametrize("current", [0, 1])
def test_paging_by_hand_minds_the_tensor_not_the_current_device(current: int, paged: ModuleType) -> None:
    tensors = [torch.full((4 * MIB,), float(index), device=device) for index, device in enumerate(DEVICES)]
    with torch.cuda.device(current):
        torch_lms.pageout(*tensors)
        torch_lms.wait()
        assert [state(tensor) for tensor in tensors] == ["paged_out"] * 2
        assert torch.equal(tensors[0].to(DEVICES[1]), torch.zeros_like(tensors[1]))
        torch_lms.prefetch(tensors[1])
        tensors[1].add_(1)
    assert [tensor.device.index for tensor in tensors] == [0, 1]
    assert [tensor.max().item() for tensor in tensors] == [0, 2]


DATA_PARALLEL = """
import json, os, sys, torch, torch_lms
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
init_process_group("nccl")
if sys.argv[1] != "none":
    torch_lms.enable({f"cuda:{rank}": int(sys.argv[1])})
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*blocks).cuda())
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(rank)
losses = []
for _ in range(4):
    loss = model(torch.randn(8192, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if rank == 0:
    found = {"losses": losses, "sum": sum(p.double().sum().item() for p in model.parameters())}
    print(json.dumps({**found, "peak": torch.cuda.max_memory_allocated(), "pageouts": torch_lms.stats().pageouts}))
destroy_process_group()
"""


def data_parallel(limit: str, folder: Path) -> dict[str, object]:
    program = folder / "data_parallel.py"
    program.write_text(DATA_PARALLEL)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, str(program), limit], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def test_data_parallel_training_under_a_limit_is_bit_equal(tmp_path: Path) -> None:
    plain = data_parallel("none", tmp_path)
    assert isinstance(plain["peak"], int)
    limit_bytes = plain["peak"] * 3 // 4
    limited = data_parallel(str(limit_bytes), tmp_path)
    assert limited["pageouts"]
    assert (limited["losses"], limited["sum"]) == (plain["losses"], plain["sum"])
    assert isinstance(limited["peak"], int)
    assert limited["peak"] <= limit_bytes
