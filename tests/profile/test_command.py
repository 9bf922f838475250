"""``python -m torch_lms profile``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("torch_lms._C", reason="the command line needs the compiled core")
pytest.importorskip("rich")

from torch_lms.cli import main
from torch_lms.profile import Profile

RUNS = ["--runs=2", "--warmup=0"]
TINY = ["--layers=1", "--width=8", "--batch=1"]


def small() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.ones(3, 4)


def by_name() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return nn.Linear(4, 2), {"input": torch.ones(3, 4)}


def mismatched() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(nn.Linear(4, 8)), (torch.ones(3, 5),)


def nothing() -> None:
    pass


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_models", sys.modules[__name__])


@pytest.mark.parametrize(
    "words",
    [
        ["--model=gpt", "--heads=2", "--tokens=16", "--device=cpu", *TINY],
        ["--model=resnet", "--image-size=8", "--device=meta", *TINY],
        ["--model=my_models:small", "--optimizer=adamw"],
        ["--model=my_models:by_name", "--evaluate", "--pieces", "--no-links"],
    ],
)
def test_profile_is_shown_and_written(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    assert main(["profile", *RUNS, *words, f"--json={path}"]) == 0
    shown = capsys.readouterr().out
    found = Profile.load(path)
    assert f"{found.model} on {found.device}" in shown
    assert found.timed == ("--device=meta" not in words)
    assert (found.optimizer_bytes is not None) == ("--optimizer=adamw" in words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model=my_models:mismatched"], "float32[3, 5]"),
        (["--model=my_models:absent"], "module:callable"),
        (["--model=no_such_module:f"], "no_such_module"),
        (["--model=my_models:nothing"], "(model, args)"),
    ],
)
def test_errors_end_with_status_1(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *RUNS, *words]) == 1
    assert told in capsys.readouterr().err.replace("\n", " ").replace("  ", " ")


@pytest.mark.parametrize(
    "words",
    [
        ["--optimizer=magic"],
        ["--runs=0"],
        ["--limit=-3"],
        ["--json=/no/such/folder/p.json"],
        ["--model=llama"],
        ["--model=my_models:small", "--device=cuda:77"],
    ],
)
def test_words_without_sense_end_with_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *words])
    assert ended.value.code == 2
