"""The command line's words and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import torch_lms
from torch_lms.cli.explain import add_explain
from torch_lms.cli.partition import add_partition
from torch_lms.cli.pipeline import add_pipeline
from torch_lms.cli.plan import add_plan
from torch_lms.cli.profile import add_profile
from torch_lms.cli.run import Paging
from torch_lms.cli.train import TrainOptions
from torch_lms.cli.workload import MODELS, Workload

__all__ = ["make_parser", "train_options"]


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``python -m torch_lms``."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_lms", description="Large Model Support for PyTorch: train within a memory limit."
    )
    parser.add_argument("--version", action="version", version=f"torch_lms {torch_lms.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands.add_parser("train", help="train without a limit and under one, and compare"))
    doctor = commands.add_parser("doctor", help="show what is installed and what works here")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_profile(commands.add_parser("profile", help="measure what each node of a model costs in time and memory"))
    add_plan(commands.add_parser("plan", help="whether a recorded cycle, or a model, fits a limit, and how"))
    add_explain(commands.add_parser("explain", help="show and draw a plan"))
    add_partition(commands.add_parser("partition", help="cut a profiled model into the stages of a pipeline"))
    add_pipeline(commands.add_parser("pipeline", help="train a GPT as a pipeline, under torchrun"))
    return parser


def train_options(given: argparse.Namespace) -> TrainOptions:
    """What the words of ``train`` ask for.

    Raises:
        ValueError: for words that cannot be understood; LimitError is one.
    """
    workload = Workload.sized(
        model=given.model,
        device=given.device,
        steps=given.steps,
        batch=given.batch,
        layers=given.layers,
        width=given.width,
        heads=given.heads,
        tokens=given.tokens,
        image_size=given.image_size,
        seed=given.seed,
        learning_rate=given.learning_rate,
    )
    paging = Paging(limit_bytes=0, min_bytes=given.min_bytes, host_limit=given.host_limit, spill_dir=given.spill_dir)
    return TrainOptions(
        workload=workload,
        limit=given.limit,
        paging=paging,
        output=given.output,
        json=given.json,
        anonymous_percent=given.anonymous_percent,
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument(
        "--limit", default="50%", help="a size such as 24GiB, or a percentage of the plain run's peak (%(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps (%(default)s)")
    _add_sizes(parser.add_argument_group("sizes", "By default such that activations need most of the memory."))
    _add_outputs(parser.add_argument_group("results"))
    paging = parser.add_argument_group("paging", "As the arguments of torch_lms.enable.")
    paging.add_argument("--min-bytes", help="smaller storages stay where they are")
    paging.add_argument("--host-limit", help="of the host memory, or disk space, for paged-out bytes")
    paging.add_argument("--spill-dir", help="the directory for the CPU's spill files")


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--batch", type=int, help="excerpts or images a step")
    group.add_argument("--layers", type=int, help="GPT: blocks; ResNet: blocks in each of its three stages")
    group.add_argument("--width", type=int, help="GPT: hidden size; ResNet: channels of the first stage")
    group.add_argument("--heads", type=int, help="GPT: attention heads")
    group.add_argument("--tokens", type=int, help="GPT: bytes an excerpt")
    group.add_argument("--image-size", type=int, help="ResNet: rows, and columns, of an image")
    group.add_argument("--seed", type=int, default=0, help="of parameters and data (%(default)s)")
    group.add_argument("--learning-rate", type=float, help="of AdamW")


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output", type=Path, help="draw memory over time: a .png, .svg or .pdf file")
    group.add_argument("--json", type=Path, help="write all figures to this file")
    group.add_argument(
        "--anonymous-percent",
        type=float,
        metavar="PERCENT",
        help="fail if anonymous memory peaks above this share of the plain run's",
    )
