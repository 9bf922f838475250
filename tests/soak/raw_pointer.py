"""A function of another extension takes a pointer, allocates, then goes through it: the bytes are the tensor's.

No room for the allocation is right as well: nothing else could go.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.utils.cpp_extension

import torch_lms
from tests.soak.program import finish, parse

MIB = 1 << 20
TENSOR_MIB = {"cpu": 16, "cuda": 64}
OTHERS = 4
HERE = Path(__file__).parent


def build(device: str) -> ModuleType:
    """The extension, compiled unless it has been.

    Without NDEBUG the layout of some of PyTorch's classes would differ from that of its own build.
    """
    name = "raw_pointer" if device == "cpu" else "raw_pointer_cuda"
    folder = HERE.parents[1] / "build" / "soak_extensions" / f"{name}-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja's program
    cuda = device == "cuda"
    return torch.utils.cpp_extension.load(
        f"torch_lms_soak_{name}",
        [str(HERE / f"{name}.cpp")],
        extra_cflags=["-O1", "-DNDEBUG"],
        extra_ldflags=["-lcudart", "-lc10_cuda"] if cuda else [],
        with_cuda=cuda,
        build_directory=str(folder),
    )


def try_once(extension: ModuleType, device: str, limit_mib: int, *, write: bool) -> str | None:
    """One call within a limit that the allocation would exceed: what is wrong, if anything is.

    Raises:
        torch.OutOfMemoryError: if there is no room.
    """
    numel = TENSOR_MIB[device] * MIB // 4
    torch_lms.enable({device: f"{limit_mib}MiB"}, min_bytes="64KiB")
    others: list[torch.Tensor] = []
    try:
        tensor = torch.ones(numel, device=device)  # the only one that can go
        for _ in range(OTHERS):
            others.append(torch.ones(numel, device=device).add_(0))
            torch_lms.pin(others[-1])
        if not write:
            found = extension.read_after_allocation(tensor)
            return None if found == numel else f"{limit_mib} MiB: read a sum of {found} in place of {numel}"
        extension.write_after_allocation(tensor, 3.0)
        right = _is_all(tensor, 3) and all(_is_all(other, 1) for other in others)
        return None if right else f"{limit_mib} MiB: what was written through the pointer is not there"
    finally:
        for other in others:
            torch_lms.swap.manual.unpin(other)
        torch_lms.disable()


def _is_all(tensor: torch.Tensor, value: int) -> bool:
    """Whether every element has one value; without a tensor of as many elements."""
    return tensor.min().item() == value and tensor.max().item() == value


def main() -> None:
    given = parse(__doc__)
    extension = build(given.device)
    size = TENSOR_MIB[given.device]
    limits = [size * (OTHERS + 1) + extra for extra in (4, size // 2, size - 2, size + 2, 2 * size)]
    wrong, calls, without_room = [], 0, 0
    while calls < 2 * len(limits) or not given.is_over():
        limit = limits[(calls // 2) % len(limits)]
        try:
            failure = try_once(extension, given.device, limit, write=bool(calls % 2))
        except torch.OutOfMemoryError:
            without_room += 1
        else:
            wrong += [failure] if failure else []
        calls += 1
        if given.device == "cuda":
            torch.cuda.empty_cache()
    finish(f"{calls} calls on {given.device}, {without_room} of them found no room", wrong)


if __name__ == "__main__":
    main()
