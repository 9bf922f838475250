"""GPTs whose model data is larger than the device, in chunks over both memories.

    python -m benchmarks.chunked_large --only '8B,13B,16B'    # an H200 with 128 GiB of host memory
    python -m benchmarks.chunked_large --tiny --output-dir /tmp/out

Every row trains in 16 bits with 32-bit masters and fused AdamW, its blocks checkpointed, updates in backward; where
masters are is left to `torch_lms.chunked`. Model TFLOP/s count six operations for each parameter and token: what is
computed again is not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import peers
from benchmarks.chunked import in_chunks
from benchmarks.plan_worker import Run
from benchmarks.results import Check, Result
from benchmarks.sweep import Row, Sweep, add_arguments, run_rows
from benchmarks.workloads import Program

COLUMNS = [
    ("mode", "Model", "{}"),
    ("parameters", "Parameters (10⁹)", "{:.1f}"),
    ("data_gib", "Model data (GiB)", "{:.0f}"),
    ("on_host_gib", "On the host (GiB)", "{:.0f}"),
    ("peak_gib", "Peak (GiB)", "{:.0f}"),
    ("step_ms", "Step (ms)", "{:.0f}"),
    ("tflops", "Model TFLOP/s", "{:.0f}"),
]
HOST_LIMIT = "100GiB"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT.

    Attributes:
        sizes: of the workload.
        least_tflops: model TFLOP/s to reach; None for none.
    """

    sizes: dict[str, int]
    least_tflops: float | None = None


MODELS = {
    "8B": Model(sizes={"layers": 39, "hidden": 4096, "heads": 32, "batch": 16}, least_tflops=370),
    "13B": Model(sizes={"layers": 40, "hidden": 5120, "heads": 40, "batch": 16}, least_tflops=330),
    "16B": Model(sizes={"layers": 35, "hidden": 6144, "heads": 48, "batch": 8}),
}


def judge(rows: Sequence[Row]) -> Iterator[Check]:
    """The checks of the rows; adds to them their rates."""
    for row in rows:
        row["tflops"] = 6 * row["parameters"] * row["samples"] * row["tokens"] / row["step_ms"]  # 1e9 a ms
        falls = row["losses"][-1] < row["losses"][0]
        yield Check(what=f"{row['mode']}: the loss falls", target="True", measured=str(falls), ok=falls)
        least = MODELS[row["key"]].least_tflops
        if least is not None and row["device"] != "cpu":
            reached = row["tflops"] >= least
            what, target = f"{row['mode']}: model TFLOP/s", f"at least {least:g}"
            yield Check(what=what, target=target, measured=round(row["tflops"], 1), ok=reached)


def facts_of(program: Program, optimizer: object) -> Row:
    """What a row says of its model, and where its data has come to lie."""
    data = optimizer.data  # type: ignore[attr-defined]
    lists = data.allocated_bytes()
    on_host = sum(data.kept_bytes(chunk) for chunk, there in enumerate(data.on_host) if there)
    return {
        "parameters": sum(one.numel() for one in program.model.parameters()) / 1e9,
        "data_gib": sum(lists.values()) / (1 << 30),
        "on_host_gib": on_host / (1 << 30),
        "update_on": data.update_on,
    }


def measure_row(sweep: Sweep, key: str) -> None:
    """Trains one model."""
    given = sweep.given
    options: dict[str, Any] = {"step_in_backward": True, "host_limit": None if given.tiny else HOST_LIMIT}
    run = Run(
        workload="gpt",
        device=sweep.device,
        tiny=given.tiny,
        changed={} if given.tiny else MODELS[key].sizes,
        change=peers.checkpoint_blocks,
        optimizer=True,
        optimize=partial(in_chunks, **options),
        facts=facts_of,
        deterministic=False,
        with_digest=False,
        steps=given.steps,
    )
    sweep.run(key, f"GPT {key}", run)


def main() -> None:
    """Runs the rows that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, seconds=400)
    parser.set_defaults(steps=3)
    given = parser.parse_args()
    title = "GPTs in mixed precision with AdamW in chunks, blocks checkpointed, updates in backward"
    run_rows(Result(name="chunked_large", title=title, columns=COLUMNS), given, list(MODELS), judge, measure_row)


if __name__ == "__main__":
    main()
