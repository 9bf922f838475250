"""Inference of a Llama 7B with random weights in about half of the memory that it takes: prefill, then token by token.

Weights do not change, so that after the first pass none has to be copied out again; what remains is to bring in what
does not fit, whose time the link bounds. In the same process: a plain
run, and one whose weights the program streams by hand.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch

import torch_lms
from benchmarks.llama import Llama, LlamaShape
from benchmarks.results import Result
from benchmarks.streamed_weights import StreamedWeights
from benchmarks.training import GIB, digest
from torch_lms.cli.link import LinkRate, measure_link
from torch_lms.swap import parse_bytes

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
    ("over_least", "/ bound", "{:.2f}"),
    ("peak_gib", "Peak (GiB)", "{:.2f}"),
]


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

    def run(self, mode: str) -> tuple[list[dict[str, Any]], str]:
        """Every pass, timed and counted; and a digest of all logits."""
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
        return rows, digest(logits)

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
        row["over_least"] = row["ms"] / row["least_ms"]


def add_medians(result: Result, rows: list[dict[str, Any]]) -> None:
    """A row for the passes of each kind after the first."""
    for kind, heading in (("prefill", "prefill, later"), ("token", "token, later")):
        later = [row for row in rows if row["pass_"].startswith(kind)][1:]
        if later:
            keys = [key for key, value in later[0].items() if isinstance(value, float)]
            medians = {key: statistics.median(row[key] for row in later) for key in keys}
            plain_ms = [row["ms"] for row in result.rows if row["pass_"] == f"{heading}: median"][:1] or [medians["ms"]]
            medians["over_plain"] = medians["ms"] / plain_ms[0]
            result.add(mode=rows[0]["mode"], pass_=f"{heading}: median", **medians)


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


def run_plain(given: argparse.Namespace, result: Result) -> tuple[float, str]:
    """Without a limit; its peak in GiB, and the digest of its logits."""
    rows, reference = make_session(given).run("plain")
    add_medians(result, rows)
    return max(row["peak_gib"] for row in rows), reference


def run_limited(given: argparse.Namespace, result: Result, held_gib: float, link: LinkRate | None) -> str:
    """Within the limit, in which the weights are made, too; the digest of its logits."""
    limit_gib = parse_bytes(given.limit) / GIB
    torch_lms.enable({given.device: given.limit})
    try:
        rows, found = make_session(given).run(f"limit {given.limit}")
    finally:
        torch_lms.disable()
    add_bounds(rows, link, max(held_gib - limit_gib, 1e-9))
    for row in rows:
        result.add(**row)
    add_medians(result, rows)
    check(result, rows, limit_gib)
    return found


def run_peer(given: argparse.Namespace, result: Result, held_gib: float, link: LinkRate | None) -> str:
    """Weights that the program brings itself, as many resident as the limit allows; the digest of its logits."""
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    session = make_session(given)
    layers = list(session.model.layers)
    layer_gib = sum(parameter.nbytes for parameter in layers[0].parameters()) / GIB
    limit_gib = parse_bytes(given.limit) / GIB
    resident = len(layers) - 2 - math.ceil((held_gib - limit_gib) / layer_gib)  # two sets of buffers
    peer = StreamedWeights(layers, resident=max(resident, 0))
    release(given.device)
    rows, found = session.run("weights streamed by hand")
    for row in rows:
        row["in_gib"] = peer.nbytes / GIB
    add_bounds(rows, link, max(held_gib - limit_gib, 1e-9))
    add_medians(result, rows)
    return found


def release(device: str) -> None:
    """Gives back what the last run has left."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def run_all(given: argparse.Namespace, result: Result, link: LinkRate | None) -> None:
    """Plain, by hand, and within the limit; each with the same weights and prompts."""
    held_gib, reference = run_plain(given, result)
    release(given.device)
    for name, run in (("limited run", run_limited), ("peer", run_peer)):
        try:
            found = run(given, result, held_gib, link)
        except Exception as error:  # the other's figures are worth having
            traceback.print_exc()
            result.check(f"{name} ran", "True", f"{type(error).__name__}: {error}"[:300], ok=False)
        else:
            same = found == reference
            result.check(f"{name}: logits are bit-equal to plain's", "True", str(same), ok=same)
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
    parser.add_argument("--new", type=int, default=16, help="tokens that are made")
    parser.add_argument("--prefills", type=int, default=4)
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
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
