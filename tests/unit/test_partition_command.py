"""``python -m torch_lms partition``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_lms.cli import main
from torch_lms.partition import algorithm_names
from torch_lms.profile.document import NodeProfile, Profile


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Six equal layers with a parameter and an activation each."""
    nodes = [NodeProfile(name="x", op="placeholder", target="x", output_bytes=1 << 20)]
    for index in range(6):
        nodes.append(
            NodeProfile(
                name=f"layers_{index}", op="call_module", target=f"layers.{index}", inputs=(nodes[-1].name,),
                module=f"layers.{index}", forward_us=100.0, backward_us=200.0, output_bytes=1 << 20,
                gradient_bytes=1 << 20, parameters=(f"layers.{index}.weight",), saved=(f"s{index}",),
            )
        )  # fmt: skip
    nodes.append(NodeProfile(name="output", op="output", target="output", inputs=(nodes[-1].name,)))
    weights = {f"layers.{index}.weight": 1 << 22 for index in range(6)}
    document = Profile(
        model="Six", level="module", notes=(), device="cpu", torch_version="2", warmup_runs=1, timed_runs=1, timed=True,
        nodes=tuple(nodes), parameter_bytes=weights, tied={}, trainable=frozenset(weights),
        storage_bytes={f"s{index}": 1 << 20 for index in range(6)}, optimizer_bytes=None, step_us=1800.0, links=(),
    )  # fmt: skip
    path = tmp_path / "profile.json"
    document.save(path)
    return path


def test_partition_shows_and_writes_stages(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, picture = tmp_path / "stages.json", tmp_path / "stages.png"
    words = ["--stages=3", "--cap=1GiB", "--compare", f"--json={written}", f"--output={picture}", "--link-gb-per-s=50"]
    assert main(["partition", str(profile), *words]) == 0
    shown = capsys.readouterr().out
    assert "auto: dp" in shown
    assert "stage 2: stage2, 2 nodes from layers_4 to layers_5, 0.600 ms a microbatch" in shown
    document = json.loads(written.read_text())
    assert document["stage_of"]["layers_3"] == 1
    assert len(document["algorithms"]) == len(algorithm_names())
    assert picture.stat().st_size > 0


def test_stages_without_room_give_segments_up(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    much = Profile.load(profile)
    replace(much, storage_bytes=dict.fromkeys(much.storage_bytes, 8 << 20)).save(profile)
    tight = ["partition", str(profile), "--stages=2", "--cap=220MiB", "--schedule=gpipe", f"--json={tmp_path}/cut.json"]
    assert main(tight) != 0
    assert "the least cap" in capsys.readouterr().err
    swaps = ["--relieve", "--host-gb-per-s=200"]
    for words in (["--relieve"], swaps):
        assert main([*tight, *words]) == 0
        shown = capsys.readouterr().out
        assert "computed again" in shown
        assert "swapped" not in shown  # only where the other is not enough
        assert json.loads((tmp_path / "cut.json").read_text())["stage_relief"]
    once = [replace(node, writes=("running_mean",)) for node in much.nodes]  # not to be computed again
    replace(Profile.load(profile), nodes=tuple(once)).save(profile)
    assert main([*tight, "--relieve"]) != 0
    assert "the least cap" in capsys.readouterr().err
    assert main([*tight, *swaps]) == 0
    assert "swapped" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_a_device_may_be_named_for_several_stages(
    profile: Path, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", str(profile), "--devices=a,b,a,b", f"--schedule={schedule}"]) == 0
    shown = capsys.readouterr().out
    assert "stage 2: a, " in shown
    assert "stage 3: b, " in shown


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--stages=7"], 1, "expected at most as many stages as nodes"),
        (["--stages=2", "--cap=1MiB"], 1, "the least cap that works for every device is"),
        (["--stages=2", "--algorithm=best"], 1, "expected an algorithm among"),
        (["--stages=2", "--optimizer=lion"], 1, "expected an optimizer among"),
        (["--stages=2", "--speed=1,2,3"], 2, "expected 1 or 2 values for --speed, found 3"),
        (["--devices=a,a,b,b", "--schedule=interleaved"], 1, "expected the 2 devices in turn"),
        ([], 2, "expected --devices or --stages"),
        (["--devices=cpu", "--stages=2"], 2, "expected as many --devices as --stages, found 1 and 2"),
        (["--stages=0"], 2, "expected at least one stage"),
        (["--devices=,"], 2, "a name for each device"),
        (["--stages=2", "--output=stages"], 2, "expected a picture that ends in"),
        (["--devices=cuda:0,cuda:0,cpu", "--speed=0"], 1, "expected a positive and finite speed"),
        (["--stages=2", "--speed=inf"], 1, "expected a positive and finite speed"),
        (["--stages=7"], 1, "found 7 stages for 6"),
        (["--stages=99999999"], 2, "expected at most as many stages as the profile has nodes, found 99999999 for 8"),
    ],
)
def test_partition_refuses_what_cannot_be(
    profile: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, message: str
) -> None:
    try:
        found = main(["partition", str(profile), *words])
    except SystemExit as end:
        found = int(end.code or 0)
    assert found == status
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_profile_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", str(tmp_path / "none.json"), "--stages=2"]) == 1
    assert "expected a profile in" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--link-gb-per-s", "0"], ["--relieve", "--host-gb-per-s", "0"]])
def test_a_link_without_a_rate_is_none(profile: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", str(profile), "--stages", "2", *words]) == 1
    assert "expected a positive rate" in capsys.readouterr().err


@pytest.mark.parametrize("latency", ["nan", "inf", "-1"])
def test_a_link_has_a_latency(profile: Path, latency: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--link-gb-per-s", "1", f"--link-latency-us={latency}"]
    assert main(["partition", str(profile), "--stages", "2", *words]) == 1
    assert "a finite latency of at least 0" in " ".join(capsys.readouterr().err.split())


def test_files_that_cannot_be_written_are_told(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["partition", str(profile), "--stages", "2", "--json"]
    with pytest.raises(SystemExit):
        main([*words, str(profile / "nowhere" / "stages.json")])
    assert "expected a folder for" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, str(profile.parent)])
    assert "expected a file to write" in capsys.readouterr().err
    assert main([*words, "/proc/stages.json"]) == 1
    assert "expected files that can be read and written" in capsys.readouterr().err


def test_a_profile_that_is_no_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.json").write_bytes(b"\xff\xfe")
    assert main(["partition", str(tmp_path / "profile.json"), "--stages", "2"]) == 1
    assert "expected a profile in" in capsys.readouterr().err


def test_who_stops_a_command_sees_no_traceback(
    profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_lms.cli.partition.partition", stop)
    assert main(["partition", str(profile), "--stages", "2"]) == 130
    assert "torch_lms: stopped" in capsys.readouterr().err


def test_a_speed_that_is_no_number_names_its_word(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["partition", str(profile), "--stages=2", "--speed=1,fast"])
    assert "expected numbers for --speed, found 'fast'" in capsys.readouterr().err
