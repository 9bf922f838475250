"""What a module runs besides its class's own forward: hooks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from torch_lms.errors import ProfileError

__all__ = ["has_backward_hooks", "is_pytorchs", "refuse_backward_hooks"]


def is_pytorchs(module: nn.Module) -> bool:
    """Whether all that a call of it does is known: its class is one of PyTorch's layers, and it has no hooks.

    Modules inside are not looked at. Parametrizations do not count: some of them change their buffers.
    """
    own = module.__module__.startswith(("torch.nn.modules.", "torch.ao.nn."))
    return own and not module._forward_hooks and not module._forward_pre_hooks


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether it has hooks that run in its backward, of any kind."""
    return bool(module._backward_hooks or getattr(module, "_backward_pre_hooks", None))


def refuse_backward_hooks(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Says that a graph has no module whose backward would run hooks.

    Args:
        modules: with their paths, those that the graph opens.

    Raises:
        ProfileError: if one has such hooks.
    """
    for path, module in modules:
        if has_backward_hooks(module):
            name = f"{path!r}, a {type(module).__name__}," if path else f"the {type(module).__name__} itself"
            raise ProfileError(
                f"expected a module without hooks for its backward where a graph opens it, found some at {name}; "
                "register them at modules inside, which stay whole, or remove them"
            )
