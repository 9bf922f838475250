"""A profile for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_lms.errors import ProfileError
from torch_lms.memory_sizes import size_text
from torch_lms.profile.document import Profile

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["profile_table"]


def profile_table(profile: Profile, limit: int | None = None) -> RenderableType:
    """What a profile sums up to, and its nodes in order, for rich to print.

    Args:
        profile: what to show.
        limit: show only that many nodes, the slowest; None shows all.

    Raises:
        ProfileError: if `rich` is not installed.
    """
    try:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ProfileError("expected rich for tables, found none; install it: pip install rich") from error
    table = Table(title=f"{profile.model} on {profile.device}, level {profile.level}")
    for heading in ("node", "what", "module"):
        table.add_column(heading, overflow="fold")
    for heading in ("fwd us", "bwd us", "output", "saved", "params"):
        table.add_column(heading, justify="right", no_wrap=True)
    nodes = [node for node in profile.nodes if node.op not in ("get_attr", "output")]
    if limit is not None and limit < len(nodes):
        slowest = sorted(nodes, key=lambda node: node.forward_us + node.backward_us, reverse=True)[:limit]
        nodes = [node for node in nodes if node in slowest]
    for node in nodes:
        saved = sum(profile.storage_bytes[name] for name in node.saved)
        parameters = sum(profile.parameter_bytes[name] for name in node.parameters)
        times = [f"{time:.1f}" if profile.timed else "-" for time in (node.forward_us, node.backward_us)]
        sizes = [size_text(nbytes) for nbytes in (node.output_bytes, saved, parameters)]
        table.add_row(node.name, _short(node.target), node.module, *times, *sizes)
    return Group(table, *(Text(line) for line in _summary(profile)))


def _short(target: str) -> str:
    """An op without its namespace."""
    for prefix in ("aten.", "torch.nn.functional.", "torch._C._nn.", "torch.", "builtins.", "_operator."):
        target = target[len(prefix) :] if target.startswith(prefix) else target
    return target[: -len(".default")] if target.endswith(".default") else target


def _summary(profile: Profile) -> list[str]:
    optimizer = sum((profile.optimizer_bytes or {}).values())
    lines = [
        f"parameters {size_text(sum(profile.parameter_bytes.values()))}, "
        f"kept for backward {size_text(profile.saved_bytes)}, "
        f"optimizer {size_text(optimizer) if profile.optimizer_bytes is not None else 'not given'}"
    ]
    if profile.timed:
        summed = profile.forward_us + profile.backward_us
        apart = "" if profile.node_scale == 1 else f" (timed one by one: {summed / profile.node_scale:.0f} us)"
        runs = f"medians of {profile.timed_runs} runs after {profile.warmup_runs}"
        lines.append(
            f"nodes: forward {profile.forward_us:.0f} us, backward {profile.backward_us:.0f} us, sum {summed:.0f} us"
            f"{apart}; whole step {profile.step_us:.0f} us ({runs})"
        )
    lines += [
        f"link {link.source} to {link.target}: {link.bytes_per_us / 1e3:.1f} GB/s, {link.latency_us:.1f} us"
        for link in profile.links
    ]
    return lines + [f"note: {note}" for note in profile.notes]
