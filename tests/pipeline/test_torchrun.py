from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.pipeline.ranks import torchrun
from torch_lms.pipeline.torch_backend import is_available

pytest.importorskip("rich")
pytest.importorskip("matplotlib")


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="the command's GPT needs a newer PyTorch")
def test_torchrun_trains_a_gpt_and_draws_it(tmp_path: Path) -> None:
    words = [
        "-m",
        "torch_lms",
        "pipeline",
        "--device",
        "cpu",
        "--steps",
        "2",
        "--layers",
        "2",
        "--width",
        "32",
        "--tokens",
        "16",
    ]
    outputs = ["--output", str(tmp_path / "chart.svg"), "--code", str(tmp_path / "code")]
    done = torchrun(*words, *outputs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"step \d of 2: loss \d+\.\d+", done.stdout)) == 2
    assert re.search(r"a step: \d+\.\d+ ms, predicted \d+\.\d+ ms", done.stdout)
    assert "none measured" in done.stdout
    assert (tmp_path / "chart.svg").read_text().startswith("<?xml")
    for stage in range(2):
        assert "def forward(self" in (tmp_path / "code" / f"stage{stage}.py").read_text()


def test_without_torchrun_the_command_says_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    from torch_lms.cli.pipeline import main

    assert "RANK" not in os.environ
    assert main(["--device", "cpu"]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
