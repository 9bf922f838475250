"""What chunks waste, by our search for their size and by PatrickStar's, and what a parameter takes in all lists.

    python -m benchmarks.chunk_layout                     # a minute on a CPU
    python -m benchmarks.chunk_layout --tiny --output-dir /tmp/out

Waste depends on the tensors' sizes alone, and on which are frozen: models are made without memory. Bytes are those of a
GPT that trains, after its second backward; gradients are in the parameters' place, or have memory of their own. No
figure depends on the machine.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from benchmarks.chunked import in_chunks
from benchmarks.results import Result
from benchmarks.workloads import WORKLOADS, make_program
from torch_lms.chunk import ChunkedOptimizer
from torch_lms.chunk.interface import runs_of, tensors_of
from torch_lms.chunk.layout import best_chunk_numel, pack, patrickstar_chunk_numel

COLUMNS = [
    ("model", "Model", "{}"),
    ("parameters_m", "Parameters (10⁶)", "{:.0f}"),
    ("chunk_mi", "Chunk (Mi elements)", "{:.1f}"),
    ("chunks", "Chunks", "{}"),
    ("waste_percent", "Waste (%)", "{:.2f}"),
    ("patrickstar_percent", "by PatrickStar's search (%)", "{:.2f}"),
    ("bytes_each", "Bytes a parameter", "{:.2f}"),
    ("bytes_apart", "with gradients apart", "{:.2f}"),
]
_MODELS = ("gpt", "llama", "vit", "resnet", "t5", "qwen_moe", "whisper", "unet3d")
_TRAINED = {"layers": 4, "hidden": 512, "heads": 8, "tokens": 32, "vocabulary": 8192, "batch": 2}
_TRAINED_TINY = {**_TRAINED, "hidden": 128, "vocabulary": 512}
_CLAIMED, _GRADIENT = 14, 2  # bytes a parameter, as PatrickStar counts them


def laid_out(title: str, model: nn.Module) -> dict[str, Any]:
    """The row of a model."""
    tensors = tensors_of(model, torch.optim.AdamW(model.parameters()))
    runs = [[one.parameter.numel() for one in run] for run in runs_of(tensors)]
    layout, theirs = (pack(runs, search(runs)) for search in (best_chunk_numel, patrickstar_chunk_numel))
    return {
        "model": title,
        "parameters_m": sum(map(sum, runs)) / 1e6,
        "chunk_mi": layout.chunk_numel / 2**20,
        "chunks": layout.chunks,
        "waste_percent": 100 * layout.waste,
        "patrickstar_percent": 100 * theirs.waste,
    }


def bytes_each(*, tiny: bool, reuse: bool) -> float:
    """Of a parameter, while a GPT trains on the CPU."""
    program = make_program("gpt", "cpu", changed=_TRAINED_TINY if tiny else _TRAINED)
    optimizer = in_chunks(program, update_on="device", reuse_gradients=reuse)
    assert isinstance(optimizer, ChunkedOptimizer)
    program.loss().backward()
    optimizer.step()
    program.loss().backward()
    data, parameters = optimizer.data, list(program.model.parameters())
    in_place = {data.parameters.chunk(number).untyped_storage()._cdata for number in data.parameters.used}
    apart = (one.grad for one in parameters if one.grad is not None)
    apart_bytes = sum(one.nbytes for one in apart if one.untyped_storage()._cdata not in in_place)
    return (sum(data.allocated_bytes().values()) + apart_bytes) / sum(one.numel() for one in parameters)


def main() -> None:
    """All models, and the one that trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--output-dir", default="benchmarks/results")
    given = parser.parse_args()
    result = Result(name="chunk_layout", title="Chunks of models, and bytes a parameter with AdamW", columns=COLUMNS)
    for name in _MODELS:
        program = make_program(name, "meta", tiny=given.tiny)
        result.add(**laid_out(WORKLOADS[name].title, program.model))
        waste, theirs = (result.rows[-1][key] for key in ("waste_percent", "patrickstar_percent"))
        what = f"{WORKLOADS[name].title}: waste, %"
        result.check(what, f"at most PatrickStar's, {theirs:.3f}", round(waste, 3), waste <= theirs)
    trained = make_program("gpt", "meta", changed=_TRAINED_TINY if given.tiny else _TRAINED)
    each, apart = (bytes_each(tiny=given.tiny, reuse=reuse) for reuse in (True, False))
    result.add(**laid_out("GPT that trains", trained.model), bytes_each=each, bytes_apart=apart)
    most = _CLAIMED / (1 - result.rows[-1]["waste_percent"] / 100) + 1e-6
    for what, found, target in (("in place", each, most), ("apart", apart, most + _GRADIENT)):
        result.check(f"bytes a parameter, gradients {what}", f"{target:.3f}", round(found, 3), found <= target)
    result.write(given.output_dir)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
