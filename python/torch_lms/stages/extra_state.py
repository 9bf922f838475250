"""State dicts of modules whose code was opened: what they have beside tensors is what it was when the model was cut."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from torch_lms.profile.sameness import is_same

__all__ = ["EXTRA_STATE", "KeepsExtraState", "has_extra_state", "state_dict_hooks"]

EXTRA_STATE = "_extra_state"  # as PyTorch calls it in state dicts
_KEPT = "_kept_extra_state"
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def has_extra_state(module: nn.Module) -> bool:
    """Whether the module's own `get_extra_state` adds to its state dict."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def state_dict_hooks(module: nn.Module) -> bool:
    """Whether hooks change the module's state dict, or what is loaded."""
    return any(getattr(module, name, None) for name in _HOOKS)


class KeepsExtraState(nn.Module):
    """Stands for a module, whose extra state it has in its state dict: a constant, as the code is made for it."""

    def keep_extra_state(self, state: Any) -> None:
        """Takes what `get_extra_state` of the module gave."""
        vars(self)[_KEPT] = copy.deepcopy(state)  # the module may change it

    def share_extra_state(self, other: nn.Module) -> None:
        """Takes that of another part of the same module, if it has some."""
        if _KEPT in vars(other):
            vars(self)[_KEPT] = vars(other)[_KEPT]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call, unused-ignore]
        if _KEPT in vars(self):
            destination[prefix + EXTRA_STATE] = vars(self)[_KEPT]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        told = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, *told)  # type: ignore[no-untyped-call, unused-ignore]
        name = prefix + EXTRA_STATE
        if _KEPT not in vars(self):
            return
        if name not in state_dict:
            missing_keys += [name] if strict else []
            return
        unexpected_keys[:] = [one for one in unexpected_keys if one != name]
        if not is_same(state_dict[name], vars(self)[_KEPT]):
            error_msgs.append(
                f"expected {name!r} as it was when the model was cut, since the code of stages is made for it, found "
                "another; load the state dict into the model and cut it again"
            )
