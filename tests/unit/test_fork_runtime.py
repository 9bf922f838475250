"""The fork's runtime as far as it can be looked at without the fork: its interface, and how it is chosen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.unit.error_messages import check_message
from tests.unit.fresh_process import PACKAGE_ROOT, run_python
from torch_lms import _core, _fork

PACKAGE = PACKAGE_ROOT / "torch_lms"

# Modules that the fork's runtime never gets to, and functions behind `need_extension`.
NOT_REACHED = {"intercepts.py", "discovery.py"}
BEHIND_NEED_EXTENSION = {"enable", "disable", "enable_chaos", "attention", "memory_report"} | {
    "add_plan",
    "make_dropped_again",
    "measured_plan",
    "no_plan",
    "pages_on_demand",
    "plan_no_program",
    "plan_program",
    "take_recording",
    "take_times",
}


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def arguments_of(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    return [argument.arg for argument in function.args.args], [ast.unparse(value) for value in function.args.defaults]


def used_of_core(path: Path) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "core"
    }


def test_its_functions_are_called_as_the_extensions() -> None:
    declared = functions_of(PACKAGE / "_C.pyi")
    there = functions_of(PACKAGE / "_fork.py")
    own = {"is_complete", "is_here", "refuse"}
    assert {name for name in there if not name.startswith("_")} - own <= set(declared)
    for name in set(there) & set(declared):
        assert arguments_of(there[name]) == arguments_of(declared[name]), name


def test_it_has_everything_that_paging_by_hand_calls() -> None:
    needed: set[str] = set()
    for path in sorted((PACKAGE / "swap").glob("*.py")):
        if path.name not in NOT_REACHED:
            needed |= used_of_core(path)
    assert {"pageout", "prefetch", "stats", "shutdown"} <= needed
    assert sorted(name for name in needed - BEHIND_NEED_EXTENSION if not hasattr(_fork, name)) == []


def test_every_listed_name_is_there() -> None:
    assert [name for name in _fork.__all__ if not hasattr(_fork, name)] == []


def test_a_stock_pytorch_gets_the_extension() -> None:
    assert not _fork.is_here()
    assert _core.core.__name__ == "torch_lms._C"
    assert not _core.sees_every_access
    _core.need_extension("anything", "nothing")


def test_a_fork_of_other_patches_is_named(tmp_path: Path) -> None:
    (tmp_path / "swap.py").write_text("")
    program = f"import torch.cuda; torch.cuda.__path__.append({str(tmp_path)!r}); import torch_lms; torch_lms.pageout"
    ended = run_python("-c", program)
    assert ended.returncode == 1
    (last,) = [line for line in ended.stderr.splitlines() if line.startswith("ImportError: torch_lms")]
    check_message(last, found="earlier ones", do="build_scripts/build_wheel.sh")


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(_fork.errors.LmsError) as caught:
        _fork.refuse("something", "do another thing")
    check_message(str(caught.value), found="the fork's patches", do="do another thing")
