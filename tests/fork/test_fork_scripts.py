"""The fork's scripts: what they say of wrong arguments, wrong trees and missing tools."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = ("get_source", "apply_patches", "export_patches", "check_patches", "build_c10", "build_wheel")
SCRIPTS += ("install_cuda", "cuda_kit", "pack_build")
BASICS = ("bash", "awk", "basename", "cat", "cmp", "cut", "dirname", "env", "find", "grep", "mkdir", "mktemp")
BASICS += ("readlink", "rm", "sed", "sha256sum", "sort", "tr", "uname")


def run(name: str, *arguments: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a script, with only the programs in `path` if it is given."""
    environment = {**os.environ, **({"PATH": str(path)} if path else {})}
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, PROJECT / "build_scripts" / f"{name}.sh", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


def programs(folder: Path, *names: str) -> Path:
    """A folder with links to these programs, for a PATH without any others."""
    folder.mkdir()
    for name in (*BASICS, *names):
        found = shutil.which(name)
        if found is not None:
            (folder / name).symlink_to(found)
    return folder


def fake_tree(folder: Path, *files: str) -> Path:
    """A git repository with the tag 'upstream' and these files."""
    folder.mkdir()
    for name in ("README", *files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not PyTorch\n")
    git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@example.com"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "source"], ["tag", "upstream"]):
        subprocess.run([*git, *command], check=True)
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_shows_the_usage(name: str) -> None:
    shown = run(name, "--help")
    assert shown.returncode == 0
    assert f"build_scripts/{name}.sh" in shown.stdout
    assert "set -euo" not in shown.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unknown_option_is_named(name: str) -> None:
    failed = run(name, "--frobnicate")
    assert failed.returncode == 1
    assert "--frobnicate" in failed.stderr
    assert "--help" in failed.stderr


@pytest.mark.parametrize(
    "name", ["get_source", "apply_patches", "build_c10", "build_wheel", "install_cuda", "cuda_kit", "pack_build"]
)
def test_missing_arguments_are_named(name: str) -> None:
    failed = run(name)
    assert failed.returncode == 1
    assert failed.stderr.startswith("torch-lms: expected")


@pytest.mark.parametrize("name", ["get_source", "apply_patches", "export_patches", "check_patches"])
def test_a_version_without_a_series_is_refused(name: str, tmp_path: Path) -> None:
    failed = run(name, "v0.1.0", *([tmp_path / "tree"] if name != "check_patches" else []))
    assert failed.returncode == 1
    assert "v1.12.0 v1.13.1, found 'v0.1.0'" in failed.stderr


def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    failed = run("get_source", "v1.13.1", tmp_path)
    assert failed.returncode == 1
    assert "does not exist yet" in failed.stderr


@pytest.mark.parametrize(("version", "way"), [("v1.12.0", "package"), ("v1.13.1", "wheel"), ("v1.13.1", "nowhere")])
def test_a_way_that_a_version_cannot_be_had_by_is_refused(version: str, way: str, tmp_path: Path) -> None:
    failed = run("get_source", version, tmp_path / "tree", "--from", way)
    assert failed.returncode == 1
    assert "torch-lms: expected" in failed.stderr
    assert not (tmp_path / "tree").exists()


@pytest.mark.parametrize(
    ("name", "tool", "has"),
    [
        ("get_source", "git", ()),
        ("apply_patches", "git", ()),
        ("export_patches", "git", ()),
        ("check_patches", "git", ()),
        ("build_c10", "cmake", ()),
        ("build_c10", "ninja", ("cmake",)),
        ("build_wheel", "cmake", ()),
        ("build_wheel", "ninja", ("cmake",)),
        ("install_cuda", "apt-get", ()),
    ],
)
def test_a_missing_tool_is_named_with_its_package(name: str, tool: str, has: tuple[str, ...], tmp_path: Path) -> None:
    for program in has:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    own = {"check_patches": [], "build_c10": ["t"], "build_wheel": ["t"], "install_cuda": [tmp_path / "cuda"]}
    arguments = own.get(name, ["v1.13.1", tmp_path / "t"])
    failed = run(name, *arguments, path=programs(tmp_path / "bin", *has))
    assert failed.returncode == 1
    assert f"expected the program {tool}" in failed.stderr
    assert "apt-get install" in failed.stderr


def test_a_tree_that_is_not_configured_is_not_packed(tmp_path: Path) -> None:
    failed = run("pack_build", fake_tree(tmp_path / "tree", "setup.py"), tmp_path / "packed")
    assert failed.returncode == 1
    assert "expected a configured tree" in failed.stderr
    assert "--configure-only" in failed.stderr
    assert not (tmp_path / "packed").exists()


def test_a_folder_that_is_no_source_tree_is_refused(tmp_path: Path) -> None:
    failed = run("apply_patches", "v1.13.1", tmp_path)
    assert failed.returncode == 1
    assert "get_source.sh" in failed.stderr


def test_other_text_than_upstreams_is_refused_and_left_alone(tmp_path: Path) -> None:
    tree = fake_tree(tmp_path / "tree", "c10/core/StorageImpl.h")
    failed = run("apply_patches", "v1.12.0", tree)
    assert failed.returncode == 1
    assert "expected the text of v1.12.0" in failed.stderr
    assert (tree / "c10/core/StorageImpl.h").read_text() == "not PyTorch\n"


def test_changes_in_a_tree_are_not_overwritten(tmp_path: Path) -> None:
    tree = fake_tree(tmp_path / "tree")
    (tree / "README").write_text("mine\n")
    failed = run("apply_patches", "v1.12.0", tree)
    assert failed.returncode == 1
    assert "expected no changes" in failed.stderr


@pytest.mark.parametrize("name", ["build_c10", "build_wheel"])
def test_a_part_of_the_source_cannot_be_built(name: str, tmp_path: Path) -> None:
    for program in ("cmake", "ninja", "g++", *(["ccache"] if name == "build_wheel" else [])):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    failed = run(name, fake_tree(tmp_path / "tree"))
    assert failed.returncode == 1
    assert "expected all of PyTorch's source" in failed.stderr


def test_a_tree_without_patches_is_not_exported(tmp_path: Path) -> None:
    failed = run("export_patches", "v1.13.1", fake_tree(tmp_path / "tree"))
    assert failed.returncode == 1
    assert "without its commits" in failed.stderr


def test_the_one_file_patches_are_those_of_the_sources() -> None:
    checked = run("export_patches", "--one-file", "--check")
    assert checked.returncode == 0, checked.stderr


def test_parts_of_an_archive_are_put_together_and_checked_by_digest(tmp_path: Path) -> None:
    folder, there = tmp_path / "kit", tmp_path / "there"
    folder.mkdir(), there.mkdir()
    (folder / "library").write_bytes(os.urandom(3 << 20))

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    packed = shell(f"source {PROJECT}/build_scripts/fork.sh && archive {tmp_path} {tmp_path}/kit 1 kit")
    assert packed.returncode == 0, packed.stderr
    parts = sorted(tmp_path.glob("kit.tar.xz.*"))
    assert len(parts) > 2
    assert max(part.stat().st_size for part in parts) == 1 << 20
    assert shell("sha256sum --check kit.sha256 && cat kit.tar.xz.* | tar -xJ -C there").returncode == 0
    assert (there / "kit/library").read_bytes() == (folder / "library").read_bytes()
    parts[1].write_bytes(parts[1].read_bytes()[:-1] + b"\0\0")
    checked = shell("sha256sum --check kit.sha256")
    assert checked.returncode != 0
    assert f"{parts[1].name}: FAILED" in checked.stdout
