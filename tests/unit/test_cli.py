"""The command line: words, data, models, pictures and tables; and the commands themselves, small."""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import torch_lms
from benchmarks.render_tables import fill, render_results, render_table
from tests.unit.fresh_process import run_python
from torch_lms.cli import main
from torch_lms.cli.arguments import make_parser, train_options
from torch_lms.cli.checks import check_runs
from torch_lms.cli.host import spill_place
from torch_lms.cli.images import ImageBatches
from torch_lms.cli.models import GPT, GPTShape, ResNet, ResNetShape
from torch_lms.cli.report import RunProgress, check_table, comparison_table, step_table
from torch_lms.cli.run import Paging, RunFailedError, RunResult, StepDone, run_in_fresh_process
from torch_lms.cli.text import TextBatches, read_text
from torch_lms.cli.timeline import GIB, MemorySampler, Sample, Timeline, anonymous_bytes, draw_timelines
from torch_lms.cli.train import TrainOptions
from torch_lms.cli.workload import Workload
from torch_lms.errors import LimitError

TINY = ["--layers=2", "--width=32", "--heads=2", "--tokens=32", "--batch=64", "--steps=2", "--device=cpu"]


def options_of(*words: str) -> TrainOptions:
    return train_options(make_parser().parse_args(["train", *words]))


def tiny_workload(**changes: Any) -> Workload:
    return replace(options_of(*TINY).workload, **changes)


def result_of(losses: list[float], digests: dict[str, str] | None = None, tensor_bytes: int = GIB) -> RunResult:
    timeline = Timeline(samples=[Sample(seconds=0.0, tensor_bytes=tensor_bytes, anonymous_bytes=2 * tensor_bytes)])
    return RunResult(
        steps=[StepDone(step=step, loss=loss, seconds=float(step)) for step, loss in enumerate(losses, 1)],
        digests=digests or {"weight": "a"},
        peak_tensor_bytes=tensor_bytes,
        peak_anonymous_bytes=2 * tensor_bytes,
        timeline=timeline,
        stats=dict.fromkeys(("pageout_bytes", "pagein_bytes", "passive_pageins", "prefetch_hits"), 0),
    )


# --- words -------------------------------------------------------------------------------------------


def test_train_has_sizes_for_each_model() -> None:
    gpt, resnet = (options_of(f"--model={model}", "--device=cpu").workload for model in ("gpt", "resnet"))
    assert gpt.tokens > 1
    assert resnet.image_size > 1
    assert gpt.learning_rate == resnet.learning_rate > 0


def test_sizes_that_are_given_win() -> None:
    workload = options_of(*TINY, "--seed=7").workload
    assert (workload.layers, workload.width, workload.steps, workload.seed) == (2, 32, 2, 7)
    assert "width 32" in workload.describe()


@pytest.mark.parametrize("limit", ["half", "-3GiB", "0%", "50 percent"])
def test_wrong_limit_is_refused_before_anything_runs(limit: str) -> None:
    with pytest.raises(LimitError, match="expected a size"):
        options_of(f"--limit={limit}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--output=memory.bmp"], "ends in .png"),
        (["--json=no/such/folder/train.json"], "create it first"),
        (["--device=meta"], "cpu or cuda"),
        (["--device=cuda:99"], "expected"),
        (["--steps=0"], "positive sizes"),
        (["--width=30", "--heads=4"], "heads divide"),
        (["--learning-rate=0"], "positive learning rate"),
        (["--learning-rate=inf"], "positive learning rate"),
        (["--seed=-1"], "expected a seed from 0"),
        (["--min-bytes=some"], "expected a size such as"),
        (["--min-bytes=50%"], "expected a size in bytes here"),
        (["--host-limit=0"], "expected a size of at least one byte"),
        (["--spill-dir=no/such/folder"], "expected a directory in --spill-dir, found none at 'no/such/folder'"),
        (["--anonymous-percent=nan"], "expected a share above 0 for --anonymous-percent, found nan"),
    ],
)
def test_wrong_words_are_refused_with_what_to_do(words: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        options_of("--device=cpu", *words)


def test_wrong_words_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--limit=half"])
    assert stopped.value.code == 2
    assert "expected a size such as '24GiB'" in capsys.readouterr().err


def test_who_stops_a_command_that_only_begins_sees_no_traceback() -> None:
    program = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'rich.console': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from torch_lms.cli import main\n"
        "sys.exit(main(['doctor']))"
    )
    ended = run_python("-c", program)
    assert (ended.returncode, ended.stderr) == (130, "torch_lms: stopped, as asked\n")


# --- data and models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["profile"], ["plan", "--limit", "1GiB", "--model", "gpt"]])
def test_a_device_that_is_not_there_is_told(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--device", "xyz"])
    assert "expected a device that is there, found 'xyz'" in capsys.readouterr().err


def a_linear_layer() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    return torch.nn.Linear(3, 3), (torch.randn(2, 3),)


def test_a_given_model_is_measured_on_the_meta_device(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "--model", f"{__name__}:a_linear_layer", "--device", "meta"]
    assert main(words) == 0
    assert "the model is on the meta device" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "--device", "cpu", "--layers", "1", "--width", str(1 << 50), "--heads", "1"])
    assert "expected a model that cpu has room for, found" in capsys.readouterr().err


def a_layer_of_too_much() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    raise KeyError("width")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("..:made", "expected a callable at '..:made', found none: TypeError"),
        ("no_module_of_this_name:made", "found none: ModuleNotFoundError"),
        ("os:_exit", "found TypeError: _exit() missing required argument"),
        (f"{__name__}:a_layer_of_too_much", f"found KeyError: 'width' ({__file__}, line"),
    ],
)
def test_a_model_that_is_not_made_is_told(place: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--model", place]) == 1
    assert expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("word", ["--tflops", "--memory-gb-per-s", "--link-gb-per-s"])
def test_rates_that_are_no_numbers_are_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"--tflops": "1", "--memory-gb-per-s": "1", "--link-gb-per-s": "1", word: "nan"}
    sizes = ["--layers", "1", "--width", "16", "--heads", "1", "--tokens", "8", "--batch", "2"]
    words = ["plan", "--limit", "1GiB", "--model", "gpt", *sizes]
    assert main([*words, *(one for pair in rates.items() for one in pair)]) == 1
    assert "expected rates above 0" in capsys.readouterr().err


def test_text_is_python() -> None:
    text = read_text(max_bytes=1 << 16)
    assert len(text) == 1 << 16
    assert b"import " in text


def test_text_needs_sources(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected Python sources"):
        read_text(folder=tmp_path)


def test_text_batches_predict_the_next_byte_and_repeat_with_the_seed() -> None:
    first, again, other = (TextBatches(bytes(range(64)), batch=4, tokens=16, seed=seed) for seed in (1, 1, 2))
    tokens_BT, next_BT = first.draw()
    assert tokens_BT.shape == next_BT.shape == (4, 16)
    assert torch.equal(tokens_BT + 1, next_BT)
    assert torch.equal(tokens_BT, again.draw()[0])
    assert not torch.equal(tokens_BT, other.draw()[0])


def test_text_batches_reach_the_whole_text_and_no_further() -> None:
    with pytest.raises(ValueError, match="more than 16 bytes"):
        TextBatches(b"x" * 16, batch=1, tokens=16, seed=0)
    assert TextBatches(bytes(range(17)), batch=1, tokens=16, seed=0).draw()[1][0, -1] == 16


def test_image_batches_repeat_with_the_seed() -> None:
    first, again = (ImageBatches(batch=4, size=8, seed=3) for _ in range(2))
    images_BCYX, classes_B = first.draw()
    assert images_BCYX.shape == (4, 3, 8, 8)
    assert classes_B.shape == (4,)
    assert torch.equal(images_BCYX, again.draw()[0])


def test_gpt_sees_no_later_token() -> None:
    torch.manual_seed(0)
    model = GPT(GPTShape(layers=2, hidden=16, heads=2, tokens=8, vocabulary=32))
    hidden: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    ids_BT = torch.arange(16).view(2, 8)
    changed_BT = ids_BT.clone()
    changed_BT[:, 5] = 31
    for ids in (ids_BT, changed_BT):
        assert model(ids, ids_BT).shape == ()
    assert torch.equal(hidden[0][:, :5], hidden[1][:, :5])
    assert not torch.equal(hidden[0][:, 5:], hidden[1][:, 5:])


def test_resnet_halves_the_image_at_each_stage() -> None:
    model = ResNet(ResNetShape(layers=2, channels=4, classes=10))
    shapes: list[tuple[int, ...]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[1:])))
    loss = model(torch.randn(2, 3, 16, 16), torch.tensor([0, 9]))
    assert loss.isfinite()
    assert shapes == [(4, 16, 16)] * 2 + [(8, 8, 8)] * 2 + [(16, 4, 4)] * 2


# --- memory over time, checks and tables ------------------------------------------------------------------


def test_sampler_sees_anonymous_memory_come() -> None:
    before = anonymous_bytes()
    with MemorySampler(torch.device("cpu"), period_s=0.001) as sampler:
        new = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not what malloc has kept
        new.write(bytes(1 << 20) * 64)
        now = anonymous_bytes()
        new.close()
    assert now - before > 32 << 20
    assert sampler.timeline.samples
    assert all(sample.anonymous_bytes > 0 for sample in sampler.timeline.samples)


def test_thinned_timeline_keeps_the_peak() -> None:
    samples = [Sample(seconds=0.1 * at, tensor_bytes=at % 97, anonymous_bytes=at % 97) for at in range(1000)]
    thinned = Timeline(samples=samples).thinned(most=50)
    assert len(thinned.samples) == 50
    assert max(sample.tensor_bytes for sample in thinned.samples) == 96
    assert Timeline(samples=samples).thinned(most=1000).samples == samples


@pytest.mark.parametrize("name", ["memory.png", "memory.svg"])
def test_picture_is_drawn(tmp_path: Path, name: str) -> None:
    runs = {"plain": result_of([1.0]).timeline, "limited": result_of([1.0], tensor_bytes=GIB // 2).timeline}
    draw_timelines(runs, limit_bytes=GIB // 2, title="title", path=tmp_path / name)
    head = (tmp_path / name).read_bytes()[:64]
    assert head.startswith((b"\x89PNG", b"<?xml"))


def test_equal_runs_pass_the_checks() -> None:
    plain = result_of([2.0, 1.0])
    limited = result_of([2.0, 1.0], tensor_bytes=GIB // 2)
    checks = check_runs(plain, limited, limit_bytes=GIB // 2, anonymous_percent=50)
    assert len(checks) == 4
    assert all(check.ok for check in checks)


def test_a_loss_that_is_no_number_equals_itself() -> None:
    plain, limited = (result_of([3.0, float("nan")]) for _ in range(2))
    assert all(check.ok for check in check_runs(plain, limited, limit_bytes=2 * GIB))


def test_each_difference_is_found() -> None:
    limited = result_of([2.0, 1.5], {"weight": "b"})
    checks = check_runs(result_of([2.0, 1.0]), limited, limit_bytes=GIB - 1, anonymous_percent=99)
    assert not any(check.ok for check in checks)
    assert "step 2" in checks[0].found
    assert "weight" in checks[1].found


def test_tables_and_progress_show_the_figures() -> None:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # the console's, to its end
    plain, limited = result_of([2.0, 1.0]), result_of([2.0, 1.0], tensor_bytes=GIB // 2)
    with RunProgress(console, name="plain", steps=2) as progress:
        progress.show(plain.steps[0])
    console.print(comparison_table(plain, limited, limit_bytes=GIB // 2))
    console.print(check_table(check_runs(plain, limited, limit_bytes=1)))
    shown = console.export_text()
    for expected in ("step 1/2: loss 2.0000", "Peak tensor bytes (GiB)", "0.500", "MISSED", "ok"):
        assert expected in shown


def test_filesystem_is_that_of_the_longest_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nmemory {tmp_path} tmpfs rw 0 0\nother {tmp_path}x xfs rw 0 0\n")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    place = spill_place(mounts)
    assert place.filesystem == "tmpfs"
    assert place.in_memory


# --- the commands ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_train_under_a_limit_is_bit_equal(model: str, tmp_path: Path) -> None:
    words = [*TINY, "--image-size=16", f"--model={model}", "--limit=70%", "--min-bytes=16KiB"]
    assert main(["train", *words, f"--output={tmp_path / 'memory.svg'}", f"--json={tmp_path / 'train.json'}"]) == 0
    document = json.loads((tmp_path / "train.json").read_text())
    assert document["runs"]["limited"]["stats"]["pageout_bytes"] > 0
    assert document["runs"]["plain"]["stats"]["pageout_bytes"] == 0
    assert all(check["ok"] for check in document["checks"])
    assert (tmp_path / "memory.svg").stat().st_size > 0


def test_the_steps_of_a_limited_run_show_when_a_plan_is_there() -> None:
    plain = result_of([3.0, 2.0, 1.0])
    steps = [replace(step, planned=step.step > 2, recomputed_bytes=step.step * GIB) for step in plain.steps]
    console = Console(record=True, width=100)
    console.print(step_table(plain, replace(plain, steps=steps)))
    lines = [line for line in console.export_text().splitlines() if "on demand" in line or "planned" in line]
    assert ["planned" in line for line in lines] == [False, False, True]
    assert "3.000" in lines[-1]


@pytest.mark.slow
def test_failed_run_tells_its_error() -> None:
    with pytest.raises(RunFailedError, match=r"expected room in aten::") as failed:
        run_in_fresh_process(tiny_workload(), Paging(limit_bytes=1), lambda done: None)
    assert "Traceback" not in str(failed.value)


@pytest.mark.slow
def test_doctor_finds_everything_in_order() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_LMS_CHAOS"}
    environment["PYTHONPATH"] = str(Path(torch_lms.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "torch_lms", "doctor", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(done.stdout)
    assert facts["ok"] is True
    assert facts["Tried on cpu"]["prefetch"] == "ok"
    assert facts["Versions"]["torch"] == torch.__version__


# --- tables in the README ----------------------------------------------------------------------------------------


DOCUMENT = {
    "title": "A title",
    "command": "python x.py",
    "environment": {"gpu": "a GPU", "torch": "2.11"},
    "columns": [["mode", "Mode", "{}"], ["ms", "Step (ms)", "{:.1f}"], ["equal", "Equal", "{}"]],
    "rows": [{"mode": "plain", "ms": 1.25}, {"mode": "limited", "ms": 2, "equal": True}],
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "a.json").write_text(json.dumps(DOCUMENT))
    (tmp_path / "b.json").write_text(json.dumps({**DOCUMENT, "title": "Another"}))
    return tmp_path


def test_readme_table_has_only_what_is_named(results: Path) -> None:
    text = render_results(results, ["a"])
    assert "| plain | 1.2 |  |\n| limited | 2.0 | yes |" in text
    assert "`python x.py` on 1 x a GPU, torch 2.11." in text
    assert "Another" not in text
    some = render_results(results, ["b:mode,equal"])
    assert "| Mode | Equal |\n| --- | --- |\n| limited | yes |\n\n" in some


@pytest.mark.parametrize(("names", "found"), [(["c"], "found none"), (["a:mode,size"], "found size")])
def test_readme_table_of_what_is_not_there(names: list[str], found: str, results: Path) -> None:
    with pytest.raises(ValueError, match=found):
        render_results(results, names)


def test_numbers_are_set_to_the_right() -> None:
    table = render_table([("name", "Name", "{}"), ("ms", "ms", "{:.0f}")], [{"name": "a|b", "ms": 1}])
    assert table == "| Name | ms |\n| --- | ---: |\n| a\\|b | 1 |"


def test_filling_twice_changes_nothing_more(results: Path) -> None:
    text = "a\n<!-- results:begin a -->\nold\n<!-- results:end -->\nb\n<!-- results:begin b -->\n<!-- results:end -->\n"
    once = fill(text, results)
    assert once == fill(once, results)
    assert re.findall(r"^(?!\|).+", once, re.MULTILINE) == [
        "a",
        "<!-- results:begin a -->",
        "**A title**",
        "`python x.py` on 1 x a GPU, torch 2.11.",
        "<!-- results:end -->",
        "b",
        "<!-- results:begin b -->",
        "**Another**",
        "`python x.py` on 1 x a GPU, torch 2.11.",
        "<!-- results:end -->",
    ]
    assert fill("no markers", results) == "no markers"
    with pytest.raises(ValueError, match="pairs"):
        fill("<!-- results:begin a -->\n", results)
