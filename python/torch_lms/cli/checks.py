"""What a run under a limit must have kept to."""

from __future__ import annotations

from dataclasses import dataclass

from torch_lms.cli.run import RunResult
from torch_lms.memory_sizes import GIB

__all__ = ["Check", "check_runs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One promise and what was found, in words."""

    what: str
    expected: str
    found: str
    ok: bool


def check_runs(
    plain: RunResult, limited: RunResult, *, limit_bytes: int, anonymous_percent: float | None = None
) -> list[Check]:
    """Compares a limited run with the plain one.

    Args:
        plain: the run without a limit.
        limited: the same workload under the limit.
        limit_bytes: what the limited run's tensors must fit into.
        anonymous_percent: the limited run's peak of anonymous memory must be at most this many percent of the
            plain run's; not checked without.
    """
    checks = [
        _check_losses(plain, limited),
        _check_gradients(plain, limited),
        Check(
            what="peak tensor bytes",
            expected=f"at most {limit_bytes / GIB:.3f} GiB",
            found=f"{limited.peak_tensor_bytes / GIB:.3f} GiB",
            ok=limited.peak_tensor_bytes <= limit_bytes,
        ),
    ]
    if anonymous_percent is not None:
        found = 100 * limited.peak_anonymous_bytes / plain.peak_anonymous_bytes
        checks.append(
            Check(
                what="peak anonymous memory",
                expected=f"at most {anonymous_percent:g} % of plain",
                found=f"{found:.1f} %",
                ok=found <= anonymous_percent,
            )
        )
    return checks


def _check_losses(plain: RunResult, limited: RunResult) -> Check:
    bits, others = ([loss.hex() for loss in run.losses] for run in (plain, limited))  # NaN does not equal itself
    equal = bits == others
    pairs = enumerate(zip(bits, others, strict=False), 1)
    first = next((step for step, (one, other) in pairs if one != other), None)
    return Check(
        what="losses",
        expected=f"{len(plain.losses)} bit-equal",
        found="equal" if equal else f"{len(limited.losses)}, the first other one in step {first}",
        ok=equal,
    )


def _check_gradients(plain: RunResult, limited: RunResult) -> Check:
    other = [name for name in plain.digests if plain.digests[name] != limited.digests.get(name)]
    return Check(
        what="gradients and parameters",
        expected=f"{len(plain.digests)} bit-equal",
        found="equal" if not other else f"{len(other)} other ones, such as {other[0]}",
        ok=not other and len(plain.digests) == len(limited.digests),
    )
