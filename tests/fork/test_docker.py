"""The Dockerfiles, as far as they can be checked without a Docker engine, and what carries them out without one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "build_scripts"
DOCKERFILES = sorted((PROJECT / "docker").glob("*.Dockerfile"))
NAMES = [path.name for path in DOCKERFILES]
sys.path.insert(0, str(SCRIPTS))

import dockerfile  # noqa: E402
import try_docker  # noqa: E402


def run(name: str, *arguments: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a build script, with only the programs in `path` if it is given."""
    program = sys.executable if name.endswith(".py") else shutil.which("bash")
    assert program is not None
    environment = {**os.environ, **({"PATH": str(path)} if path else {})}
    words = [program, SCRIPTS / name, *arguments]
    return subprocess.run(map(str, words), capture_output=True, text=True, env=environment, timeout=60)


def listed(*purposes: str) -> set[str]:
    """The packages for these purposes."""
    found = run("install_packages.sh", "--list", *purposes)
    assert found.returncode == 0, found.stderr
    return set(found.stdout.split())


def stages_of(path: Path, **arguments: str) -> list[dockerfile.Stage]:
    return dockerfile.read_stages(path.read_text(), arguments)[0]


def commands_of(path: Path) -> list[list[str]]:
    """Every command of a RUN line, as words."""
    values = [i.value for stage in stages_of(path) for i in stage.instructions if i.name == "RUN"]
    commands = [command for value in values for command in dockerfile.read_mounts(value)[1].split("&&")]
    return [command.split() for command in commands]


def test_there_is_one_for_each_wheel() -> None:
    assert NAMES == ["extension.Dockerfile", "fork-cpu.Dockerfile", "fork-cuda.Dockerfile"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_every_run_line_calls_a_build_script(path: Path) -> None:
    commands = commands_of(path)
    assert commands
    for program, *_ in commands:
        folder, name = program.lstrip("/").split("/")
        assert folder == "build_scripts"
        assert os.access(SCRIPTS / name, os.X_OK), f"{name} cannot be run"


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_bases_are_pinned_by_tag_and_digest(path: Path) -> None:
    stages = stages_of(path)
    names = {stage.name for stage in stages}
    for stage in stages:
        if stage.base not in names:
            assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}", stage.base), stage.base


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_the_last_stage_runs_as_a_user_and_has_only_what_was_built(path: Path) -> None:
    last = stages_of(path)[-1]
    users = [i.value for i in last.instructions if i.name == "USER"]
    assert users
    assert users[-1].split(":")[0] not in ("root", "0")
    assert last.base not in {stage.name for stage in stages_of(path)[:-1]}
    assert all(i.value.startswith("--from=") for i in last.instructions if i.name == "COPY")
    assert not any("-build" in word for command in commands_of(path)[-2:] for word in command)


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_what_is_copied_is_there_and_not_ignored(path: Path) -> None:
    ignored = dockerfile.IgnoredFiles.of(PROJECT)
    for stage in stages_of(path):
        for instruction in stage.instructions:
            if instruction.name == "COPY" and not instruction.value.startswith("--from="):
                for source in instruction.value.split()[:-1]:
                    assert (PROJECT / source).exists()
                    assert PurePosixPath(source) not in ignored


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_purposes_are_known(path: Path) -> None:
    calls = [words for program, *words in commands_of(path) if program.endswith("install_packages.sh")]
    assert calls
    for purposes in calls:
        assert listed(*purposes)


def test_what_scripts_say_to_install_is_what_images_install() -> None:
    named = {
        match
        for script in ("get_source", "apply_patches", "build_wheel")
        for match in re.findall(r"^\s*need \S+ (\S+) \"", (SCRIPTS / f"{script}.sh").read_text(), re.MULTILINE)
    }
    assert {"git", "cmake", "ninja-build", "ccache", "g++"} <= named
    # Those that every Debian has, and Python, which the CPU's base brings along.
    assert named - {"apt", "coreutils", "dpkg"} - listed("fork-build") == {"python3"}
    assert "python3" in listed("fork-cuda-build")


def test_the_wheel_build_wants_the_same_libraries() -> None:
    assert "--list fork-libraries" in (SCRIPTS / "build_wheel.sh").read_text()
    assert "libfmt-dev" in listed("fork-libraries")


def test_what_the_extension_lacks_is_what_its_image_installs() -> None:
    text = (SCRIPTS / "common.sh").read_text()
    body = text[text.index("missing_packages() {") : text.index("# Sees that there are")]
    named = set(re.findall(r"g\+\+|python3[a-z-]*", body))
    assert named == listed("extension-build")


def test_runtime_libraries_have_their_headers_package() -> None:
    for package in listed("fork-run") - {"libgomp1"}:
        base = re.sub(r"\d+$", "", package)
        assert f"{base}-dev" in listed("fork-libraries")


def test_the_pins_of_the_fork_are_what_its_build_asks_for() -> None:
    pinned = re.findall(r"^([\w-]+)==\S+$", (SCRIPTS / "requirements-fork.txt").read_text(), re.MULTILINE)
    assert set(pinned) == {"numpy", "pyyaml", "setuptools", "typing_extensions", "wheel"}


@pytest.mark.parametrize("name", ["install_packages.sh", "make_environment.sh", "build_extension.sh", "add_user.sh"])
def test_scripts_have_help_and_name_an_unknown_option(name: str) -> None:
    shown = run(name, "--help")
    assert shown.returncode == 0
    assert f"build_scripts/{name}" in shown.stdout
    failed = run(name, "--frobnicate")
    assert failed.returncode == 1
    assert "torch-lms: expected" in failed.stderr
    assert "--frobnicate" in failed.stderr


def test_an_unknown_purpose_is_named() -> None:
    failed = run("install_packages.sh", "--list", "games")
    assert failed.returncode == 1
    assert "found 'games'" in failed.stderr


def test_an_environment_without_wheels_is_not_begun(tmp_path: Path) -> None:
    failed = run("make_environment.sh", tmp_path / "environment", "--wheels", tmp_path)
    assert failed.returncode == 1
    assert "expected wheels" in failed.stderr
    assert not (tmp_path / "environment").exists()


def test_the_new_files_are_the_same_without_a_repository(tmp_path: Path) -> None:
    git = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True)
    if git.returncode != 0:
        pytest.skip("needs a repository")
    names = [name for name in git.stdout.split() if name.startswith(("csrc/", "patches/", "build_scripts/"))]
    for name in names:
        if (PROJECT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, tmp_path / name)
    program = 'source "$0/build_scripts/fork.sh"; list_new_files | cut -f 1'
    lists = [
        subprocess.run(["bash", "-c", program, folder], capture_output=True, text=True, check=True).stdout
        for folder in (str(PROJECT), str(tmp_path))
    ]
    assert lists[0] == lists[1]
    assert "StoragePager" in lists[0]


def test_an_instruction_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM debian:bookworm\n\nADD . /here\n")
    failed = run("try_docker.py", path, tmp_path / "roots")
    assert failed.returncode == 1
    assert "found 'ADD' in line 3" in failed.stderr
    assert not (tmp_path / "roots").exists()


def test_lines_are_joined_and_comments_left_out() -> None:
    text = "# a\nFROM a:1 AS b\nRUN one && \\\n  # between\n  two\nCOPY x y\n"
    (stage,) = dockerfile.read_stages(text, {})[0]
    assert (stage.base, stage.name) == ("a:1", "b")
    assert [str(i) for i in stage.instructions] == ["RUN one && two", "COPY x y"]
    assert [i.line for i in stage.instructions] == [3, 6]


def test_an_argument_chooses_the_base() -> None:
    text = "ARG BASE=a:1\nFROM ${BASE}\n"
    assert dockerfile.read_stages(text, {})[0][0].base == "a:1"
    assert dockerfile.read_stages(text, {"BASE": "b:2"})[0][0].base == "b:2"


def test_variables() -> None:
    variables = {"A": "1", "PATH": "/bin"}
    assert dockerfile.substitute("$A ${A} ${B:-2} $B. \\$A /x:$PATH", variables) == "1 1 2 . $A /x:/bin"
    assert dockerfile.read_pairs('A=1 B="two words" C') == {"A": "1", "B": "two words", "C": None}


def test_a_mount_that_is_not_known_is_refused() -> None:
    mounts, command = dockerfile.read_mounts("--mount=type=cache,target=/c make all")
    assert mounts == [{"type": "cache", "target": "/c"}]
    assert command == "make all"
    with pytest.raises(ValueError, match="found '--network=none'"):
        dockerfile.read_mounts("--network=none make")


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("csrc/a.h", False),
        ("csrc/b/a.so", True),
        ("python/__pycache__/a.pyc", True),
        (".git/config", True),
        ("a", True),
    ],
)
def test_ignored_files(name: str, ignored: bool) -> None:
    rules = dockerfile.IgnoredFiles("# comment\n*\n!csrc\n!python\n**/*.so\n**/__pycache__\n")
    assert (PurePosixPath(name) in rules) == ignored


def test_instructions_set_what_later_ones_see(tmp_path: Path) -> None:
    options = try_docker.Options(tmp_path, {"GIVEN": "g"}, {}, [])
    state = try_docker.State(tmp_path / "root", before={"OUTER": "o"})
    text = (
        "FROM a:1\nARG GIVEN=d\nARG OUTER\nARG NONE\nENV X=$GIVEN$OUTER PATH=/x:$PATH\nWORKDIR /w\nWORKDIR v\nUSER 5\n"
    )
    for instruction in dockerfile.read_stages(text, {})[0][0].instructions:
        try_docker.carry_out(instruction, state, options, {})
    assert state.environment == {"PATH": f"/x:{try_docker.PATH}", "X": "go"}
    assert "NONE" not in state.variables()
    assert (state.folder, state.user) == ("/w/v", "5")
    assert (tmp_path / "root/w/v").is_dir()


def test_a_copy_follows_the_rules_of_a_dockerfile(tmp_path: Path) -> None:
    state = try_docker.State(tmp_path, folder="/w")
    try_docker.copy(state, "LICENSE README.md ./", {})
    try_docker.copy(state, "patches here", {})
    assert (tmp_path / "w/LICENSE").is_file()
    assert (tmp_path / "w/here/entity_files").is_file()
    try_docker.copy(try_docker.State(tmp_path / "other"), "--from=a /w /opt", {"a": tmp_path})
    assert (tmp_path / "other/opt/README.md").is_file()
    with pytest.raises(ValueError, match="expected 'tests' to copy"):
        try_docker.copy(state, "tests tests", {})
