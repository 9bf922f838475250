"""``python -m torch_lms profile``: what each node of a model costs in time and memory."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from torch_lms.cli.workload import MODELS, Workload
from torch_lms.errors import ProfileError
from torch_lms.profile import ProfileConfig, profile

__all__ = ["add_profile", "run_profile"]

_BATCH = 4


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the words of ``profile``."""
    parser.add_argument(
        "--model",
        default="gpt",
        help=f"{', '.join(MODELS)}, or module:callable, which returns a model, its arguments as a tuple, and perhaps "
        "those by name as a dict (%(default)s)",
    )
    parser.add_argument("--device", help="where it runs; meta measures sizes only; by default where the model is")
    parser.add_argument("--optimizer", help="of torch.optim, such as AdamW: its state is measured")
    parser.add_argument("--evaluate", action="store_true", help="in evaluation mode")
    runs = parser.add_argument_group("runs")
    runs.add_argument("--runs", type=int, default=50, help="that times are means of (%(default)s)")
    runs.add_argument("--warmup", type=int, default=5, help="runs before these (%(default)s)")
    runs.add_argument("--pieces", action="store_true", default=None, help="bring the model to the device node by node")
    runs.add_argument("--no-links", action="store_true", help="do not measure copies between devices")
    sizes = parser.add_argument_group("sizes", "Of the demo's models; by default those of the train command.")
    sizes.add_argument("--batch", type=int, default=_BATCH, help="excerpts or images of a microbatch (%(default)s)")
    for name in ("layers", "width", "heads", "tokens", "image-size"):
        sizes.add_argument(f"--{name}", type=int)
    results = parser.add_argument_group("results")
    results.add_argument("--json", type=Path, help="write the profile to this file, for the partition command")
    results.add_argument("--limit", type=int, metavar="NODES", help="show only so many, the slowest")


def run_profile(given: argparse.Namespace, console: Console) -> int:
    """Profiles, shows and writes.

    Raises:
        LmsError: for a model that cannot be found or does not run, or a device that is not there.
        ValueError: for words that make no sense.
    """
    if given.json is not None and not given.json.parent.is_dir():
        raise ValueError(f"expected a folder for {str(given.json)!r}, found none; create it first")
    config = ProfileConfig(
        warmup_runs=given.warmup,
        timed_runs=given.runs,
        device=given.device if ":" in given.model else None,
        pieces=given.pieces,
        links=not given.no_links,
    )
    optimizer = _optimizer(given.optimizer) if given.optimizer else None
    model, args, kwargs = _load(given.model) if ":" in given.model else _demo(given)
    model.train(not given.evaluate)
    found = profile(model, *args, optimizer=optimizer, config=config, **kwargs)
    console.print(found.table(given.limit))
    if given.json is not None:
        found.save(given.json)
        console.print(f"wrote {given.json}", markup=False, highlight=False)
    return 0


def _optimizer(name: str) -> type[torch.optim.Optimizer]:
    classes: dict[str, type[torch.optim.Optimizer]] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in classes:
        known = ", ".join(sorted(value.__name__ for value in classes.values()))
        raise ValueError(f"expected an optimizer among {known}, found {name!r}; name one of these")
    return classes[name.lower()]


def _demo(given: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """A model of the demo and a batch for it."""
    on_meta = given.device == "meta"
    device = "cpu" if on_meta else given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {name: getattr(given, name) for name in ("batch", "layers", "width", "heads", "tokens", "image_size")}
    workload = Workload.sized(model=given.model, device=device, steps=1, **sizes)
    batch = workload.build_batches()()
    model = workload.build_model()
    target = torch.device("meta" if on_meta else device)
    return model.to(target), tuple(tensor.to(target) for tensor in batch), {}


def _load(place: str) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """What the user's callable returns."""
    module_name, _, name = place.partition(":")
    try:
        target = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ProfileError(
            f"expected a callable at {place!r}, found none: {error}; name it as module:callable, from this folder or "
            "an installed package"
        ) from error
    made = target() if callable(target) else None
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ProfileError(
            f"expected {place!r} to return (model, args) or (model, args, kwargs), found {type(made).__name__}; "
            "return these"
        )
    model, args = made[:2]
    kwargs: dict[str, Any] = dict(made[2]) if len(made) == 3 else {}
    if isinstance(args, Mapping):
        return model, (), {**args, **kwargs}
    return model, tuple(args) if isinstance(args, (tuple, list)) else (args,), kwargs
