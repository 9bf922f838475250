"""What is installed, what the machine offers, and what works here."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass

import torch
from rich.console import Console

import torch_lms
from torch_lms._core import core, sees_every_access
from torch_lms.cli.host import available_bytes, memory_bytes, spill_place
from torch_lms.cli.link import measure_link
from torch_lms.cli.report import section_table
from torch_lms.cli.trials import try_layers
from torch_lms.memory_sizes import in_gib

__all__ = ["Diagnosis", "diagnose", "doctor"]

_LINK_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Facts by section and name; ``ok`` is False if something that should work does not."""

    sections: dict[str, dict[str, str]]
    ok: bool


def doctor(console: Console, *, as_json: bool = False) -> int:
    """Shows the diagnosis, as tables or as JSON.

    Returns:
        0 if everything that should work here works; otherwise 1.
    """
    diagnosis = diagnose()
    if as_json:
        print(json.dumps({"ok": diagnosis.ok, **diagnosis.sections}, indent=1))
    else:
        for title, rows in diagnosis.sections.items():
            console.print(section_table(title, rows))
        console.print("all is well" if diagnosis.ok else "[bold red]something does not work: see above[/]")
    return 0 if diagnosis.ok else 1


def diagnose() -> Diagnosis:
    """Looks at the installation and the machine, and tries what should work."""
    sections = {"Versions": _versions(), "Runtime": _runtime(), "Host": _host(), "CUDA devices": _cuda_devices()}
    ok = True
    for device in _pageable_devices():
        trials = try_layers(device)
        sections[f"Tried on {device}"] = {trial.what: trial.found for trial in trials}
        ok = ok and all(trial.ok for trial in trials)
    sections["Transfers"] = {device: _link(device) for device in _pageable_cuda_devices()} or {
        "link": "not measured: no CUDA device that can be paged"
    }
    return Diagnosis(sections=sections, ok=ok)


def _versions() -> dict[str, str]:
    return {
        "torch_lms": torch_lms.__version__,
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}, {os.cpu_count()} CPUs",
    }


def _runtime() -> dict[str, str]:
    if sees_every_access:
        swap = getattr(torch.cuda, "swap")  # noqa: B009  # of a patched PyTorch
        cpu = "yes (TORCH_SWAP_CPU=1)" if os.environ.get("TORCH_SWAP_CPU") == "1" else "no: set TORCH_SWAP_CPU=1 for it"
        return {
            "runtime": "the fork's own, in PyTorch: by hand, every access pages in",
            "file": swap.__file__ or "built in",
            "built with CUDA": "yes" if core.has_cuda else "no",
            "CPU tensors are paged": cpu,
        }
    return {
        "runtime": "the extension",
        "file": core.__file__ or "built in",
        "built with CUDA": "yes" if core.has_cuda else "no: only CPU tensors are paged",
        "materializer": "yes" if core.has_materializer else "no: it needs torch 2.13 or later",
        "chaos mode": "on" if os.environ.get("TORCH_LMS_CHAOS") == "1" else "off",
    }


def _host() -> dict[str, str]:
    place = spill_place()
    remark = ": in main memory, so paging CPU tensors to it spares nothing; set spill_dir=" if place.in_memory else ""
    return {
        "memory, or control group's limit": in_gib(memory_bytes()),
        "memory available": in_gib(available_bytes()),
        "spill directory": f"{place.directory} ({place.filesystem}{remark})",
        "free for spill files": in_gib(place.free_bytes),
    }


def _cuda_devices() -> dict[str, str]:
    devices = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{properties.name}, {in_gib(properties.total_memory)}"
    return devices or {"devices": "none"}


def _pageable_devices() -> list[str]:
    main_memory = not sees_every_access or os.environ.get("TORCH_SWAP_CPU") == "1"
    return [*(["cpu"] if main_memory else []), *_pageable_cuda_devices()]


def _pageable_cuda_devices() -> list[str]:
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] if core.has_cuda else []


def _link(device: str) -> str:
    rate = measure_link(_LINK_BYTES, device=device)
    return (
        f"{rate.to_host / 1e9:.1f} GB/s to the host, {rate.to_device / 1e9:.1f} GB/s to the device, "
        f"{rate.both / 1e9:.1f} GB/s both ways at once"
    )
