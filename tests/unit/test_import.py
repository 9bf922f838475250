"""What is imported, from where, under which names; and what a missing core says."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import torch_lms
from tests.unit.error_messages import check_message
from tests.unit.fresh_process import PACKAGE_ROOT, run_python
from torch_lms import errors, swap

PACKAGE = PACKAGE_ROOT / "torch_lms"
PUBLIC_NAMES = [
    "SwapEnv",
    "chunked",
    "create_balanced_partition",
    "current_plan",
    "disable",
    "enable",
    "fit",
    "memory_summary",
    "pageout",
    "pin",
    "prefetch",
    "stats",
    "wait",
]

# Each may import those in front of it, never those behind it.
LAYERS = [
    *("errors", "memory_sizes", "ranks", "plan", "_torch_compat", "shared_bytes", "devices", "_fork", "_core"),
    *("swap", "chunk", "profile", "fitting", "schedules", "partition"),
    *("stages", "device_links", "balanced", "pipeline", "cli"),
]


def test_the_package_has_exactly_its_public_names() -> None:
    assert sorted(torch_lms.__all__) == PUBLIC_NAMES
    assert all(callable(getattr(torch_lms, name)) for name in PUBLIC_NAMES)
    namespace: dict[str, object] = {}
    exec("from torch_lms import *", namespace)
    assert sorted(set(namespace) - {"__builtins__"}) == PUBLIC_NAMES


def test_every_name_of_all_is_there_and_is_listed() -> None:
    for module in (torch_lms, swap, errors):
        assert len(module.__all__) == len(set(module.__all__))
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert set(module.__all__) <= set(dir(module))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'torch_lms' has no attribute 'page_out'"):
        torch_lms.page_out  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_is_an_lms_error_and_a_runtime_error() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(kind, errors.LmsError) and issubclass(kind, RuntimeError) for kind in kinds)


@pytest.fixture(scope="module")
def imported_in_silence() -> subprocess.CompletedProcess[str]:
    return run_python(
        "-W",
        "error",
        "-c",
        "import sys, torch; before = set(sys.modules); import torch_lms; at_once = set(sys.modules) - before\n"
        "import torch_lms.swap\n"
        "print(sorted(name for name in at_once if name.startswith('torch_lms')))\n"
        "print(sorted(name for name in sys.modules if name.startswith('torch_lms.cli')))\n"
        "print(torch.Tensor.numpy.__module__ if hasattr(torch.Tensor.numpy, '__wrapped__') else 'as it was')",
    )


def test_import_warns_of_nothing(imported_in_silence: subprocess.CompletedProcess[str]) -> None:
    assert imported_in_silence.returncode == 0, imported_in_silence.stderr
    assert imported_in_silence.stderr == ""


def test_import_alone_loads_no_core_and_changes_nothing(imported_in_silence: subprocess.CompletedProcess[str]) -> None:
    at_once, of_the_command_line, numpy = imported_in_silence.stdout.splitlines()
    assert at_once == "['torch_lms']"
    assert of_the_command_line == "[]"
    assert numpy == "as it was"


@pytest.fixture(scope="module")
def package_without_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("without_core")
    shutil.copytree(PACKAGE, root / "torch_lms", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return root


def test_a_missing_core_says_how_to_install_it(package_without_core: Path) -> None:
    ended = run_python("-c", "import torch_lms; torch_lms.errors; torch_lms.enable", root=package_without_core)
    assert ended.returncode == 1
    (last,) = [line for line in ended.stderr.splitlines() if line.startswith("ImportError: torch_lms")]
    check_message(last, found="none that loads with this PyTorch", do="pip install --no-build-isolation .")


def test_what_fits_is_told_without_a_core(package_without_core: Path) -> None:
    program = (
        "import torch, torch_lms; print(torch_lms.fit(torch.nn.Linear(2, 2), torch.ones(2, 2), limit=4096).method)"
    )
    ended = run_python("-c", program, root=package_without_core)
    assert (ended.stdout, ended.returncode) == ("keep\n", 0), ended.stderr


# --- layers -------------------------------------------------------------------------------------------------


def layer_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def imported_by(path: Path) -> set[str]:
    """The layers of torch_lms that a file imports, at its top or inside."""
    layers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            layers |= {layer_of(alias.name) for alias in node.names if alias.name.startswith("torch_lms.")}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "torch_lms":
            layers |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("torch_lms."):
            layers.add(layer_of(node.module or ""))
    return layers


@pytest.mark.parametrize("layer", LAYERS[:-1])
def test_no_layer_imports_one_above_it(layer: str) -> None:
    files = [PACKAGE / f"{layer}.py"] if (PACKAGE / f"{layer}.py").exists() else sorted((PACKAGE / layer).rglob("*.py"))
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    assert {str(path): imported_by(path) & above for path in files if imported_by(path) & above} == {}


def modules_imported_by(path: Path) -> set[str]:
    """The modules of torch_lms that a file imports, at its top or inside, or for its types alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & module_files().keys()


def module_files() -> dict[str, Path]:
    """Of all modules but packages, by name."""
    files = (path for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    return {".".join(path.relative_to(PACKAGE_ROOT).with_suffix("").parts): path for path in files}


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({name: modules_imported_by(path) for name, path in module_files().items()}).prepare()


def test_the_parts_of_plan_are_told_lower_ones_first() -> None:
    table = (PACKAGE / "plan/README.md").read_text().partition("## Parts, lower ones first")[2].partition("\n## ")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    row_of = {f"torch_lms.plan.{name}": number for number, names in enumerate(rows) for name in names}
    files = {name: path for name, path in module_files().items() if name.startswith("torch_lms.plan.")}
    assert row_of.keys() == files.keys()
    upward = [
        (name, other)
        for name, path in files.items()
        for other in modules_imported_by(path) & files.keys()
        if row_of[other] > row_of[name]
    ]
    assert upward == []


def test_planners_need_no_pytorch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import torch_lms.plan, torch_lms.schedules, torch_lms.partition, torch_lms.partition.compare"
    )
    ended = run_python("-c", program)
    assert ended.returncode == 0, ended.stderr


def test_every_module_imports_absolutely() -> None:
    relative = [
        str(path)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_the_layers_are_those_of_the_package() -> None:
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__", "__main__"} <= set(LAYERS)
