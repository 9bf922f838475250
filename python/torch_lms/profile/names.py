"""Names that the code of a graph can have."""

from __future__ import annotations

import keyword
from functools import lru_cache

from torch import fx, nn

from torch_lms.errors import ProfileError

__all__ = ["check_name"]


def check_name(kind: str, target: object) -> None:
    """Refuses what a node names and its graph's code cannot write, or its graph module has for itself.

    Args:
        kind: of the node; only attributes, modules and arguments have names of the model's.
        target: of the node.

    Raises:
        ProfileError: if the name cannot be.
    """
    if kind not in ("get_attr", "call_module", "placeholder"):
        return
    first, *others = str(target).split(".")
    for part in (first, *others):
        if keyword.iskeyword(part) or (part is first and kind != "placeholder" and part in _of_graph_modules()):
            whose = "a keyword of Python" if keyword.iskeyword(part) else "an attribute of torch.fx.GraphModule"
            raise ProfileError(
                f"expected names that a graph can have, found {target!r}, where {part!r} is {whose}; rename it in the "
                "model"
            )


@lru_cache(maxsize=1)
def _of_graph_modules() -> frozenset[str]:
    return frozenset(dir(fx.GraphModule({}, fx.Graph()))) - frozenset(dir(nn.Module()))
