"""Inference of a Llama 7B with random weights in about half of the memory that it takes: prefill, then token by token.

Weights do not change, so that after the first pass none has to be copied out again; what remains is to bring in what
does not fit, whose time the link bounds. In the same process: a plain run, one whose weights the program streams by
hand, and accelerate's `device_map` with as many layers resident as the limit has room for. Medians are of the second
half of the passes, when there is a plan if there will be one. The plain run comes twice: bits that it does not repeat
itself tell nothing of the others.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import torch_lms
from benchmarks.llama import Llama, LlamaShape
from benchmarks.results import Result
from benchmarks.streamed_weights import StreamedWeights
from benchmarks.training import GIB, digest, make_deterministic
from torch_lms.cli.link import LinkRate, measure_link
from torch_lms.memory_sizes import parse_bytes

COLUMNS = [
    ("mode", "Mode", "{}"),
    ("pass_", "Pass", "{}"),
    ("ms", "Time (ms)", "{:.0f}"),
    ("over_plain", "/ plain", "{:.2f}"),
    ("out_gib", "Out (GiB)", "{:.2f}"),
    ("in_gib", "In (GiB)", "{:.2f}"),
    ("dropped_gib", "Dropped without a copy (GiB)", "{:.2f}"),
    ("link_ms", "The link's time for these bytes (ms)", "{:.0f}"),
    ("least_ms", "Link bound (ms)", "{:.0f}"),
    ("over_target", "/ the greater of plain and bound", "{:.2f}"),
    ("peak_gib", "Peak (GiB)", "{:.2f}"),
]


MOST_OVER_TARGET = 1.2
SHAPES = {"7b": LlamaShape(), "tiny": LlamaShape(layers=6, hidden=512, inner=1376, heads=4, vocabulary=1024)}


@dataclass(frozen=True, kw_only=True)
class Session:
    """A model and what it is asked.

    Attributes:
        prompts: their token ids.
        model: whose cache has room for the prompts and ``new`` tokens.
        new: how many tokens are made.
        prefills: how often the prompts are read; each fills the cache anew.
    """

    device: str
    model: Llama
    prompts: torch.Tensor
    new: int
    prefills: int

    def run(self, mode: str) -> tuple[list[dict[str, Any]], list[str]]:
        """Every pass, timed and counted; and a digest of each one's logits."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        torch_lms.stats(reset=True)
        rows, logits = [], []
        for index in range(self.prefills):
            row, found = self.timed(self.prompts, 0)
            rows.append({"mode": mode, "pass_": f"prefill {index + 1}", **row})
            logits.append(found)
        for index in range(self.new):
            row, found = self.timed(logits[-1].argmax(-1, keepdim=True), self.prompts.shape[1] + index)
            rows.append({"mode": mode, "pass_": f"token {index + 1}", **row})
            logits.append(found)
        return rows, [digest([one]) for one in logits]

    def timed(self, ids_BT: torch.Tensor, begin: int) -> tuple[dict[str, Any], torch.Tensor]:
        """One pass."""
        before = counters()
        start = time.perf_counter()
        logits_BV = self.model(ids_BT, begin)
        logits_BV.isfinite().all().item()  # waits
        row: dict[str, Any] = {"ms": 1e3 * (time.perf_counter() - start)}
        after = counters()
        row |= {name: (after[name] - before[name]) / GIB for name in after}
        counted = torch_lms.stats()
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else counted.peak_allocated_bytes
        plan = torch_lms.current_plan()
        row |= {"planned": plan is not None, "plan": plan.signature if plan else ""}
        return {**row, "peak_gib": peak / GIB, "host_served": counted.host_served}, logits_BV


def counters() -> dict[str, int]:
    """Bytes so far; those that were dropped without a copy only where they are counted."""
    counted = torch_lms.stats()
    dropped = getattr(counted, "dropped_bytes", None)
    found = {"out_gib": counted.pageout_bytes, "in_gib": counted.pagein_bytes}
    return found if dropped is None else {**found, "dropped_gib": dropped}


def make_session(given: argparse.Namespace) -> Session:
    """A model of the shape that the flags name, without anything that a backward would need."""
    torch.manual_seed(0)
    shape = SHAPES[given.shape]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if given.device == "cuda" else torch.float32)
    try:
        with torch.device(given.device):
            model = Llama(shape, batch=given.batch, tokens=given.tokens + given.new).requires_grad_(requires_grad=False)
            ids = torch.randint(shape.vocabulary, (given.batch, given.tokens))
    finally:
        torch.set_default_dtype(default)
    return Session(device=given.device, model=model, prompts=ids, new=given.new, prefills=given.prefills)


def add_bounds(rows: list[dict[str, Any]], link: LinkRate | None, least_gib: float) -> None:
    """The link's time for the bytes of each pass, and for those that no pass can do without.

    Args:
        rows: of the limited run.
        link: its rates; nothing is added where it was not measured.
        least_gib: what exceeds the limit has to come in once in every pass.
    """
    for row in rows if link else []:
        assert link is not None
        row["link_ms"] = 1e3 * GIB * max(row["in_gib"] / link.to_device, row["out_gib"] / link.to_host)
        row["least_ms"] = 1e3 * GIB * least_gib / link.to_device


def add_medians(result: Result, rows: list[dict[str, Any]]) -> None:
    """A row for the second half of the passes of each kind, and one for the first."""
    for kind in ("prefill", "token"):
        passes = [row for row in rows if row["pass_"].startswith(kind)]
        later = passes[len(passes) // 2 :]
        if not later:
            continue
        heading = f"{kind}, second half: median"
        keys = [key for key, value in later[0].items() if isinstance(value, float)]
        medians: dict[str, Any] = {key: statistics.median(row[key] for row in later) for key in keys}
        plain_ms = [row["ms"] for row in result.rows if row["pass_"] == heading][:1] or [medians["ms"]]
        medians["over_plain"] = medians["ms"] / plain_ms[0]
        medians["over_target"] = medians["ms"] / max(plain_ms[0], medians.get("least_ms", 0.0))
        medians |= {"ms_all": [row["ms"] for row in passes], "planned": later[-1]["planned"]}
        medians["out_gib_all"] = [row["out_gib"] for row in passes]
        medians["plans"] = sorted({row["plan"] for row in passes} - {""})
        result.add(**passes[0])
        result.add(mode=rows[0]["mode"], pass_=heading, **medians)


def check(result: Result, rows: list[dict[str, Any]], limit_gib: float) -> None:
    """Nothing goes out after the first pass; the limit holds."""
    for kind, later in (
        ("prefills after the first", [row for row in rows if row["pass_"].startswith("prefill")][1:]),
        ("tokens", [row for row in rows if row["pass_"].startswith("token")]),
    ):
        out_gib = sum(row["out_gib"] for row in later)
        result.check(f"{kind}: bytes out (GiB)", "0", round(out_gib, 3), ok=out_gib == 0)
    peak_gib = max(row["peak_gib"] for row in rows)
    result.check("peak within the limit", f"{limit_gib:.2f} GiB", round(peak_gib, 3), ok=peak_gib <= limit_gib)
    served = rows[-1]["host_served"]
    result.check("accesses served from the host", "0", str(served), ok=served == 0)
    mode = rows[0]["mode"]
    for row in result.rows:
        if row["mode"] == mode and "least_ms" in row and "over_target" in row:
            ratio = row["over_target"]
            what = f"{row['pass_']}, over the greater of plain and the link's bound"
            result.check(what, f"{MOST_OVER_TARGET}", round(ratio, 3), ok=ratio <= MOST_OVER_TARGET)


def check_same(result: Result, name: str, given: argparse.Namespace, found: list[str], plain: list[str]) -> None:
    """Whether a run's logits are the plain run's, pass by pass; if not, which pass was the first to differ."""
    passes = [f"prefill {index + 1}" for index in range(given.prefills)]
    passes += [f"token {index + 1}" for index in range(given.new)]
    other = [which for which, one, same in zip(passes, found, plain, strict=True) if one != same]
    measured = f"False: {len(other)} of {len(passes)} passes differ, {other[0]} first" if other else "True"
    result.check(f"{name}: logits are bit-equal to plain's", "True", measured, ok=not other)


def run_plain(given: argparse.Namespace, result: Result) -> tuple[float, list[str]]:
    """Without a limit, twice; its peak in GiB, and the digests of its logits."""
    rows, reference = make_session(given).run("plain")
    add_medians(result, rows)
    release(given.device)
    _, again = make_session(given).run("plain")
    check_same(result, "plain, again", given, again, reference)
    return max(row["peak_gib"] for row in rows), reference


def run_limited(given: argparse.Namespace, result: Result, held_gib: float, link: LinkRate | None) -> list[str]:
    """Within the limit, in which the weights are made, too; the digests of its logits."""
    limit_gib = parse_bytes(given.limit) / GIB
    torch_lms.enable({given.device: given.limit})
    try:
        rows, found = make_session(given).run(f"limit {given.limit}")
    finally:
        torch_lms.disable()
    add_bounds(rows, link, max(held_gib - limit_gib, 1e-9))
    add_medians(result, rows)
    check(result, rows, limit_gib)
    return found


def layers_that_fit(given: argparse.Namespace, layers: Sequence[torch.nn.Module], held_gib: float, beside: int) -> int:
    """How many layers may stay, beside room for the weights of some that come and go."""
    layer_gib = sum(parameter.nbytes for parameter in layers[0].parameters()) / GIB
    limit_gib = parse_bytes(given.limit) / GIB
    return max(0, len(layers) - beside - math.ceil((held_gib - limit_gib) / layer_gib))


def run_streamed(given: argparse.Namespace, result: Result, held_gib: float, link: LinkRate | None) -> list[str]:
    """Weights that the program brings itself, as many resident as the limit allows; the digests of its logits."""
    session = make_session(given)
    layers = list(session.model.layers)
    peer = StreamedWeights(layers, resident=layers_that_fit(given, layers, held_gib, beside=2))  # two sets of buffers
    release(given.device)
    rows, found = session.run("weights streamed by hand")
    for row in rows:
        row["in_gib"] = peer.nbytes / GIB
    add_bounds(rows, link, max(held_gib - parse_bytes(given.limit) / GIB, 1e-9))
    add_medians(result, rows)
    return found


def run_accelerate(given: argparse.Namespace, result: Result, held_gib: float, link: LinkRate | None) -> list[str]:
    """Layers that do not fit stay on the host and are brought for each call; the digests of its logits.

    Raises:
        ImportError: if accelerate is not on the path.
    """
    from accelerate import dispatch_model

    session = make_session(given)
    layers = list(session.model.layers)
    resident = layers_that_fit(given, layers, held_gib, beside=1)
    device_map: dict[str, int | str] = {"embed": 0, "norm": 0, "head": 0}
    device_map |= {f"layers.{index}": 0 if index < resident else "cpu" for index in range(len(layers))}
    for layer in layers[resident:]:
        layer.cpu()  # what is there is taken for the host's copy
    dispatch_model(session.model, device_map)
    release(given.device)
    rows, found = session.run("accelerate, device_map")
    for row in rows:
        row["in_gib"] = sum(p.nbytes for p in layers[0].parameters()) * (len(layers) - resident) / GIB
    add_bounds(rows, link, max(held_gib - parse_bytes(given.limit) / GIB, 1e-9))
    add_medians(result, rows)
    return found


def release(device: str) -> None:
    """Gives back what the last run has left."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def run_all(given: argparse.Namespace, result: Result, link: LinkRate | None) -> None:
    """Plain, within the limit, and the peers; each with the same weights and prompts."""
    held_gib, reference = run_plain(given, result)
    release(given.device)
    wanted = given.only.split(",")
    runs = {"limited": run_limited, "streamed": run_streamed, "accelerate": run_accelerate}
    for name, run in runs.items():
        if name not in wanted or (name == "accelerate" and given.device == "cpu"):
            print(f"{name}: left out{', since it means nothing without CUDA' if name in wanted else ''}", flush=True)
            continue
        try:
            found = run(given, result, held_gib, link)
        except Exception as error:  # the other's figures are worth having
            traceback.print_exc()
            result.check(f"{name} ran", "True", f"{type(error).__name__}: {error}"[:300], ok=False)
        else:
            check_same(result, name, given, found, reference)
        release(given.device)
        result.write(given.output_dir)


def main() -> None:
    """Runs plain and limited and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", default="8GiB")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("--new", type=int, default=48, help="tokens that are made")
    parser.add_argument("--prefills", type=int, default=64)
    parser.add_argument("--only", default="limited,streamed,accelerate", help="comma-separated, besides the plain run")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU, to try it without a GPU")
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    if given.tiny:
        given.device, given.shape, given.limit, given.batch, given.tokens = "cpu", "tiny", "20MiB", 2, 64
        torch.set_num_threads(1)
    make_deterministic()  # as wherever bits are compared
    title = f"Inference of a Llama {given.shape.upper()}, {given.batch} x {given.tokens} tokens, within {given.limit}"
    result = Result(name="inference", title=title, columns=COLUMNS)
    link = measure_link() if given.device == "cuda" else None
    if link is None:
        torch_lms.swap.count_cpu_allocations()
    else:
        print(asdict(link), flush=True)
    with torch.no_grad():
        run_all(given, result, link)


if __name__ == "__main__":
    main()
