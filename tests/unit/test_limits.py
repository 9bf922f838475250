"""Sizes, limits, devices and directories as people write them, right and wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_lms
from tests.unit.error_messages import check_message, raises_saying
from torch_lms._core import core
from torch_lms.errors import LimitError, LmsError
from torch_lms.swap import SwapEnv, limits, parse_bytes
from torch_lms.swap.limits import parse_limits

UNITS_BYTES = {
    "": 1,
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}
HAS_CUDA_DEVICE = core.has_cuda and torch.cuda.is_available()
needs_cpu_only = pytest.mark.skipif(HAS_CUDA_DEVICE, reason="a bare limit is the CUDA devices' here")
needs_build_without_cuda = pytest.mark.skipif(core.has_cuda, reason="this build knows CUDA devices")

units = st.sampled_from(sorted(UNITS_BYTES))
blanks = st.text(" \t", max_size=2)


@pytest.fixture
def host_limit_restored() -> Iterator[int]:
    core.total_bytes("cpu")  # the device's pool exists from here on
    before = torch_lms.stats().host_limit_bytes
    yield before
    SwapEnv(host_limit=before)


# --- sizes ------------------------------------------------------------------------------------------


@given(st.integers(1, 2**62))
def test_an_int_is_bytes(nbytes: int) -> None:
    assert parse_bytes(nbytes) == nbytes


@given(st.integers(1, 2**12), units, blanks, blanks, blanks, st.data())
def test_a_whole_number_with_a_unit_is_exact(
    number: int, unit: str, before: str, between: str, after: str, data: st.DataObject
) -> None:
    cased = data.draw(st.sampled_from([unit, unit.lower(), unit.upper()]))
    assert parse_bytes(f"{before}{number}{between}{cased}{after}") == number * UNITS_BYTES[unit]


@given(st.integers(1, 2**12), st.integers(0, 999), units)
def test_a_fraction_is_cut_to_whole_bytes(whole: int, thousandths: int, unit: str) -> None:
    exact = (whole * 1000 + thousandths) * UNITS_BYTES[unit] / 1000
    assert abs(parse_bytes(f"{whole}.{thousandths:03}{unit}") - exact) <= 1


def test_a_number_without_a_unit_is_exact_beyond_the_precision_of_a_float() -> None:
    assert parse_bytes(str(2**53 + 1)) == 2**53 + 1


@given(st.integers(1, 100), st.integers(100, 2**50))
def test_a_percentage_is_a_part_of_the_whole(percent: int, total_bytes: int) -> None:
    part = parse_bytes(f"{percent}%", total_bytes=total_bytes)
    assert abs(part - total_bytes * percent / 100) <= 1
    assert part <= total_bytes


@given(st.integers(1, 2**12), st.integers(1, 2**12), units)
def test_sizes_keep_their_order(one: int, other: int, unit: str) -> None:
    assert (one < other) == (parse_bytes(f"{one}{unit}") < parse_bytes(f"{other}{unit}"))


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_limit_error(text: str) -> None:
    with suppress(LimitError):
        assert parse_bytes(text, total_bytes=2**30) > 0


@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "%", "1,5GB", "1e9", "-1", "+1", "1 G", "1GiBs", "0x10", "1..5GB", ".5GB", "5.GB", "1G B"]
)
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with raises_saying(LimitError, found=repr(text), do="use one of the units"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [0, -1, "0", "0GiB", "0.4", "0.0001KB"])
def test_less_than_a_byte_is_refused(size: int | str) -> None:
    with raises_saying(LimitError, found=repr(size), do="pass a positive size"):
        parse_bytes(size)


@pytest.mark.parametrize("size", [True, 1.5, None, b"1GiB", [1], torch.tensor(1)])
def test_a_size_of_another_type_is_refused(size: Any) -> None:
    with raises_saying(LimitError, found=repr(size), do="pass an int or a str"):
        parse_bytes(size)


def test_a_percentage_of_nothing_is_refused() -> None:
    with raises_saying(LimitError, found="'50%'", do="name a size"):
        parse_bytes("50%")


@pytest.mark.parametrize("size", ["101%", "100.5%", "1000000%"])
def test_more_than_there_is_is_refused(size: str) -> None:
    with raises_saying(LimitError, found=repr(size), do="pass a smaller size"):
        parse_bytes(size, total_bytes=2**30)


def test_an_endless_number_is_refused() -> None:
    with raises_saying(LimitError, do="size"):
        parse_bytes("9" * 400)


def test_a_limit_beyond_all_addresses_is_refused() -> None:
    with raises_saying(LimitError, do="size"):
        torch_lms.enable({"cpu": 2**64})


# --- limits and devices --------------------------------------------------------------------------------


@needs_cpu_only
def test_a_bare_limit_is_that_of_the_cpu_where_there_is_no_cuda() -> None:
    assert parse_limits("2GiB") == {"cpu": 2**31}
    assert parse_limits(12345) == {"cpu": 12345}


@needs_cpu_only
def test_no_limit_is_all_memory_of_the_device() -> None:
    assert parse_limits(None) == {"cpu": core.total_bytes("cpu")}
    assert parse_limits("100%") == parse_limits(None)


def test_a_percentage_is_of_the_devices_memory() -> None:
    half = parse_limits({"cpu": "50%"})["cpu"]
    assert abs(2 * half - core.total_bytes("cpu")) <= 2


def test_total_bytes_of_the_cpu_is_at_most_the_physical_memory() -> None:
    kib = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert kib is not None
    assert 0 < core.total_bytes("cpu") <= int(kib[1]) * 1024


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_has_one_full_name(device: str | torch.device) -> None:
    assert parse_limits({device: "1MiB"}) == {"cpu": 2**20}


def test_two_limits_of_one_device_are_refused() -> None:
    with raises_saying(LimitError, found="two for cpu", do="keep one"):
        parse_limits({"cpu": "5MiB", "cpu:0": "6MiB"})


@pytest.mark.parametrize("device", ["gpu", "", "cuda:x", "cpu:-2", 1.5, None])
def test_what_is_no_device_is_refused(device: Any) -> None:
    with raises_saying(LimitError, found=repr(device), do="correct its name"):
        parse_limits({device: "1GiB"})


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_a_device_without_paging_is_refused(device: Any) -> None:
    with raises_saying(LimitError, found=repr(device), do="cannot be paged"):
        parse_limits({device: "1GiB"})


@needs_build_without_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda:1")])
def test_cuda_is_refused_by_a_build_without_it(device: Any) -> None:
    with raises_saying(LimitError, found="CPU only", do="install it where"):
        parse_limits({device: "1GiB"})


@needs_build_without_cuda
def test_a_bare_limit_beside_cuda_devices_is_refused_by_a_build_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with raises_saying(LimitError, found="CPU only", do="limit={'cpu': '1GiB'}"):
        parse_limits("1GiB")
    assert parse_limits({"cpu": "1GiB"}) == {"cpu": 2**30}


@pytest.mark.parametrize("visible", ["0", "", None])
def test_a_device_that_is_not_visible_is_refused(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "core", SimpleNamespace(has_cuda=True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(LimitError) as caught:
        parse_limits({"cuda:1": "1GiB"})
    check_message(str(caught.value), found="'cuda:1'", do="count from cuda:0")
    assert (f"CUDA_VISIBLE_DEVICES={visible} shows" in str(caught.value)) == (visible is not None)


def test_an_empty_mapping_is_refused() -> None:
    with raises_saying(LimitError, found="an empty mapping", do="pass {"):
        parse_limits({})


@pytest.mark.parametrize("limit", [0, -5, "0%", "lots", 1.5, [2**30], {"cpu": "lots"}, {"cpu": None}, {"meta": 1}])
def test_a_wrong_limit_turns_nothing_on(limit: Any) -> None:
    with pytest.raises(LimitError):
        torch_lms.enable(limit)
    assert not torch_lms.swap.is_enabled()


def test_a_limit_error_is_a_value_error_and_an_lms_error() -> None:
    assert issubclass(LimitError, ValueError)
    assert issubclass(LimitError, LmsError)


@pytest.mark.parametrize("limit", ["1GiB", 2**30, {"cpu": "1GiB"}, {torch.device("cpu"): 2**30}])
@needs_cpu_only
def test_every_way_to_write_a_limit_is_the_limit_that_is_kept(limit: Any) -> None:
    torch_lms.enable(limit)
    assert torch_lms.stats().limit_bytes == 2**30


# --- the other sizes and the directory ---------------------------------------------------------------------


@pytest.mark.parametrize("min_bytes", [0, -1, "50%", "few", 1.5, None])
def test_a_wrong_min_bytes_turns_nothing_on(min_bytes: Any) -> None:
    with pytest.raises(LimitError):
        torch_lms.enable({"cpu": "1GiB"}, min_bytes=min_bytes)
    assert not torch_lms.swap.is_enabled()


@pytest.mark.parametrize("host_limit", [0, -1, "lots", 1.5, ""])
def test_a_wrong_host_limit_changes_nothing(host_limit: Any, host_limit_restored: int) -> None:
    with pytest.raises(LimitError):
        torch_lms.enable({"cpu": "1GiB"}, host_limit=host_limit)
    with pytest.raises(LimitError):
        SwapEnv(host_limit=host_limit)
    assert not torch_lms.swap.is_enabled()
    assert torch_lms.stats().host_limit_bytes == host_limit_restored


@pytest.mark.parametrize(("host_limit", "nbytes"), [("3GiB", 3 * 2**30), (2**31, 2**31)])
def test_host_limit_is_what_the_pool_is_kept_within(
    host_limit: int | str, nbytes: int, host_limit_restored: int
) -> None:
    SwapEnv(host_limit=host_limit)
    assert torch_lms.stats().host_limit_bytes == nbytes


def test_a_host_limit_in_percent_is_of_the_physical_memory(host_limit_restored: int) -> None:
    SwapEnv(host_limit="25%")
    assert torch_lms.stats().host_limit_bytes == parse_bytes("25%", total_bytes=core.total_bytes("cpu"))


def test_the_second_host_limit_takes_the_place_of_the_first(host_limit_restored: int) -> None:
    torch_lms.enable({"cpu": "1GiB"}, host_limit="3GiB")
    torch_lms.enable({"cpu": "1GiB"}, host_limit="2GiB")
    assert torch_lms.stats().host_limit_bytes == 2**31


@pytest.mark.parametrize("name", ["not_there", "a_file"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_spill_dir_that_is_no_directory_is_refused(name: str, as_text: bool, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    path = tmp_path / name
    directory = str(path) if as_text else path
    with raises_saying(LimitError, found=repr(str(path)), do="create it first"):
        SwapEnv(spill_dir=directory)
    with raises_saying(LimitError, found=repr(str(path)), do="create it first"):
        torch_lms.enable({"cpu": "1GiB"}, spill_dir=directory)
    assert not torch_lms.swap.is_enabled()


@pytest.mark.parametrize("arguments", [("1GiB", "1MiB"), ("1GiB", 1, 2)])
def test_all_but_the_limit_go_by_name(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        torch_lms.enable(*arguments)
    with pytest.raises(TypeError):
        SwapEnv(*arguments)
    with pytest.raises(TypeError):
        torch_lms.stats(*arguments)
