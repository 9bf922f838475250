"""The model that the words of a command name: one of the demo's, or what a callable of the user's returns."""

from __future__ import annotations

import argparse
import importlib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from torch_lms.cli.workload import MODELS, Workload
from torch_lms.errors import ProfileError

__all__ = ["add_model", "check_folders", "check_picture", "device_to_profile", "given_model", "given_optimizer"]

_BATCH = 4
_PICTURES = (".png", ".svg", ".pdf")


def add_model(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    """Gives a parser the words for a model, its optimizer, its device and its sizes."""
    shown = "" if default is None else " (%(default)s)"
    parser.add_argument(
        "--model",
        default=default,
        help=f"{', '.join(MODELS)}, or module:callable, which returns a model, its arguments as a tuple, and perhaps "
        f"those by name as a dict{shown}",
    )
    parser.add_argument("--device", help="where it runs; meta measures sizes only; by default where the model is")
    parser.add_argument("--optimizer", help="of torch.optim, such as AdamW: its state is measured")
    parser.add_argument("--evaluate", action="store_true", help="in evaluation mode")
    parser.add_argument(
        "--pieces", action="store_true", default=None, help="bring the model to the device node by node"
    )
    sizes = parser.add_argument_group("sizes", "Of the demo's models; by default those of the train command.")
    sizes.add_argument("--batch", type=int, default=_BATCH, help="excerpts or images of a microbatch (%(default)s)")
    for name in ("layers", "width", "heads", "tokens", "image-size"):
        sizes.add_argument(f"--{name}", type=int)


def given_model(given: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """The model, and its arguments by place and by name.

    Raises:
        ProfileError: if there is no such callable, or it returns something else.
        ValueError: for words that make no sense.
    """
    _check_device(given.device)
    model, args, kwargs = _load(given.model) if ":" in given.model else _demo(given)
    if given.device == "meta":
        model, args, kwargs = model.to("meta"), _on_meta(args), _on_meta(kwargs)
    return model.train(not given.evaluate), args, kwargs


def device_to_profile(given: argparse.Namespace) -> str | None:
    """Where the model goes to be profiled; None if it is to stay where `given_model` has put it."""
    device: str | None = given.device
    return device if ":" in given.model and device != "meta" else None


def check_folders(*paths: Path | None) -> None:
    """Before anything runs: whether there are folders for the files that are to be written.

    Raises:
        ValueError: if not, or one of the files is a folder.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"expected a folder for {str(path)!r}, found none; create it first")
        if path is not None and path.is_dir():
            raise ValueError(f"expected a file to write, found the folder {str(path)!r}; name a file in it")


def check_picture(path: Path | None) -> None:
    """Before anything runs: whether a file's name says how it is to be drawn.

    Raises:
        ValueError: if not.
    """
    if path is not None and path.suffix not in _PICTURES:
        raise ValueError(f"expected a picture that ends in {', '.join(_PICTURES)}, found {str(path)!r}")


def given_optimizer(given: argparse.Namespace) -> type[torch.optim.Optimizer] | None:
    """The class that ``--optimizer`` names.

    Raises:
        ValueError: if there is none.
    """
    if not given.optimizer:
        return None
    classes: dict[str, type[torch.optim.Optimizer]] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if given.optimizer.lower() not in classes:
        known = ", ".join(sorted(value.__name__ for value in classes.values()))
        raise ValueError(f"expected an optimizer among {known}, found {given.optimizer!r}; name one of these")
    return classes[given.optimizer.lower()]


def _demo(given: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """A model of the demo and a batch for it."""
    device = "cpu" if given.device == "meta" else given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {name: getattr(given, name) for name in ("batch", "layers", "width", "heads", "tokens", "image_size")}
    workload = Workload.sized(model=given.model, device=device, steps=1, **sizes)
    batch = workload.build_batches()()
    try:
        return workload.build_model(), tuple(tensor.to(device) for tensor in batch), {}
    except RuntimeError as error:  # of the allocator
        reason = str(error).partition("\n")[0]
        raise ValueError(f"expected a model that {device} has room for, found {reason}; take smaller sizes") from error


def _check_device(device: str | None) -> None:
    try:
        torch.empty(0, device=device or "cpu")
    except (RuntimeError, AssertionError) as error:  # the latter of a PyTorch without CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"expected a device that is there, found {device!r}: {reason}; name another, as cpu"
        ) from error


def _on_meta(values: Any) -> Any:
    return tree_map(lambda one: one.to("meta") if isinstance(one, torch.Tensor) else one, values)


def _told(error: Exception) -> str:
    """An error, and the line that it comes from."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def _load(place: str) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """What the user's callable returns."""
    module_name, _, name = place.partition(":")
    try:
        target = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as error:  # whatever a module does when it is imported
        raise ProfileError(
            f"expected a callable at {place!r}, found none: {_told(error)}; name it as module:callable, from this "
            "folder or an installed package"
        ) from error
    try:
        made = target() if callable(target) else None
    except Exception as error:
        raise ProfileError(
            f"expected {place!r} to return a model when it is called without arguments, found {_told(error)}; correct "
            "it, or name another callable"
        ) from error
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
