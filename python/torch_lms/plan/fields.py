"""Reads JSON strictly: every field is there, of its type and in its range, and an error names the one that is not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from torch_lms.errors import PlanError

__all__ = ["Fields", "Path", "ascending", "read_document"]

_Value = TypeVar("_Value")
Path = str


def read_document(text: str, *, form: str, version: int) -> Fields:
    """The fields of a document whose format and version are as expected.

    Args:
        text: the document, as JSON.
        form: what its field ``format`` must say.
        version: what its field ``version`` must say.

    Raises:
        PlanError: for text that is not JSON, or a document of another format or version.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"expected {form} as JSON, found text that is not: {error}; write the file again") from error
    fields = Fields(document, path=form)
    found_form, found_version = fields.take("format"), fields.take("version")
    if found_form != form:
        raise PlanError(f"expected a document of format {form!r}, found {_short(found_form)}; give another file")
    if found_version != version or isinstance(found_version, bool):
        raise PlanError(
            f"expected {form} of version {version}, found version {_short(found_version)}; "
            "write the file again with this release"
        )
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


class Fields:
    """The fields of one JSON object, each taken once.

    Args:
        value: what should be a JSON object.
        path: of the object in its document, for errors.
    """

    def __init__(self, value: Any, *, path: Path) -> None:
        if not isinstance(value, dict):
            raise PlanError(f"expected an object at {path}, found {_short(value)}; correct this field")
        self._left: dict[str, Any] = dict(value)
        self._path = path

    def take(self, name: str) -> Any:
        """A field's value, whatever it is."""
        if name not in self._left:
            raise PlanError(f"expected a field {self.path(name)}, found none; add it")
        return self._left.pop(name)

    def path(self, name: str) -> Path:
        """Where a field is in the document."""
        return f"{self._path}.{name}"

    def integer(self, name: str, *, least: int = 0) -> int:
        """A whole number that is not below ``least``."""
        return _integer(self.take(name), self.path(name), least)

    def optional_integer(self, name: str, *, least: int = 0) -> int | None:
        """A whole number, or None for null."""
        value = self.take(name)
        return None if value is None else _integer(value, self.path(name), least)

    def number(self, name: str, *, above: float | None = None, least: float = 0.0) -> float:
        """A finite number that is not below ``least``, and above ``above`` where that is given."""
        return _number(self.take(name), self.path(name), above, least)

    def optional_number(self, name: str, *, least: float = 0.0) -> float | None:
        """A finite number, or None for null."""
        value = self.take(name)
        return None if value is None else _number(value, self.path(name), None, least)

    def text(self, name: str, *, among: Sequence[str] = ()) -> str:
        """Text; one of ``among`` where these are given."""
        value = self.take(name)
        if not isinstance(value, str):
            raise PlanError(f"expected text at {self.path(name)}, found {_short(value)}; correct this field")
        if among and value not in among:
            raise PlanError(f"expected one of {', '.join(among)} at {self.path(name)}, found {_short(value)}")
        return value

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.take(name)
        if not isinstance(value, bool):
            raise PlanError(f"expected true or false at {self.path(name)}, found {_short(value)}; correct this field")
        return value

    def integers(self, name: str, *, least: int = 0) -> tuple[int, ...]:
        """A list of whole numbers."""
        path = self.path(name)
        return tuple(_integer(value, f"{path}[{at}]", least) for at, value in enumerate(self._list(name)))

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers that are not negative."""
        path = self.path(name)
        return tuple(_number(value, f"{path}[{at}]", None, 0.0) for at, value in enumerate(self._list(name)))

    def object(self, name: str, read: Callable[[Fields], _Value]) -> _Value:
        """An object, read by a function that takes its fields."""
        return Fields(self.take(name), path=self.path(name)).closed(read)

    def optional_object(self, name: str, read: Callable[[Fields], _Value]) -> _Value | None:
        """An object, or None for null."""
        value = self.take(name)
        return None if value is None else Fields(value, path=self.path(name)).closed(read)

    def objects(self, name: str, read: Callable[[Fields], _Value]) -> tuple[_Value, ...]:
        """A list of objects."""
        path = self.path(name)
        return tuple(Fields(value, path=f"{path}[{at}]").closed(read) for at, value in enumerate(self._list(name)))

    def closed(self, read: Callable[[Fields], _Value]) -> _Value:
        """What ``read`` makes of these fields; a field that it leaves, or a value that it refuses, is an error."""
        try:
            made = read(self)
        except PlanError as error:
            if str(error).startswith("expected ") and self._path in str(error):
                raise
            raise PlanError(f"{error} (in {self._path})") from error
        if self._left:
            raise PlanError(f"expected no field {self.path(next(iter(self._left)))}, found one; take it out")
        return made

    def _list(self, name: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list):
            raise PlanError(f"expected a list at {self.path(name)}, found {_short(value)}; correct this field")
        return value


def ascending(values: Sequence[int]) -> bool:
    """Whether each value is greater than the one before."""
    return all(one < other for one, other in pairwise(values))


def _integer(value: Any, path: Path, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(
            f"expected a whole number of at least {least} at {path}, found {_short(value)}; correct this field"
        )
    return value


def _number(value: Any, path: Path, above: float | None, least: float) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and _finite(value)
    if not good or value < least or (above is not None and value <= above):
        asked = f"above {above:g}" if above is not None else f"of at least {least:g}"
        raise PlanError(f"expected a number {asked} at {path}, found {_short(value)}; correct this field")
    return float(value)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
