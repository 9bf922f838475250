"""Dataclasses as JSON documents, read strictly by their own annotations.

Every field is there, of its type and in its range, and an error names the one that is not. `Annotated` says more of a
type: a tuple of the words that a text may be, or the `Range` of a number; without one, numbers are from 0 to 2**53, up
to which floats hold each whole number: sums of greater ones would be wrong, or fit no integer of NumPy. And it says
`Since` which version of the document a field is there; what older ones do not have is read as the field's default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, get_args, get_origin, get_type_hints

from torch_lms.errors import PlanError

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Document", "Range", "Since", "ascending", "read_object", "read_text", "refuse_constant"]

_MOST = 2**53


class Document:
    """A dataclass that is kept as a JSON document. Subclasses are dataclasses, and name their format and version.

    Older versions are read, too, from ``OLDEST`` on; see `Since`.
    """

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]
    OLDEST: ClassVar[int]

    def to_json(self) -> str:
        """The document as JSON text."""
        assert is_dataclass(self)
        return json.dumps({"format": self.FORMAT, "version": self.VERSION, **asdict(self)}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            PlanError: for text that is no such document of this version, naming the field.
        """
        try:
            document = json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            raise PlanError(
                f"expected {cls.FORMAT} as JSON, found text that is not: {error}; write the file again"
            ) from error
        found, version = (_take(document, name, cls.FORMAT) for name in ("format", "version"))
        if found != cls.FORMAT:
            raise PlanError(f"expected a document of format {cls.FORMAT!r}, found {_short(found)}; give another file")
        if type(version) is not int or not cls.OLDEST <= version <= cls.VERSION:
            raise PlanError(
                f"expected {cls.FORMAT} of version {cls.VERSION}, found version {_short(version)}; "
                "write the file again with this release"
            )
        made: Self = read_object(cls, document, cls.FORMAT, version)
        return made

    def save(self, path: str | Path) -> None:
        """Writes the document to a file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what `save` wrote.

        Raises:
            PlanError: for a file that cannot be read, or is no such document of this version.
        """
        return cls.from_json(read_text(path))


@dataclass(frozen=True, kw_only=True)
class Range:
    """What a number must be.

    Attributes:
        least: it is not below this.
        above: and above this; None for no such bound.
        most: and not above this.
    """

    least: float = 0
    above: float | None = None
    most: float = _MOST

    def holds(self, value: float) -> bool:
        """Whether a number is in the range."""
        return self.least <= value <= self.most and (self.above is None or value > self.above)

    def __str__(self) -> str:
        most = "2**53" if self.most == _MOST else f"{self.most}"
        return f"from {self.least:g} to {most}" if self.above is None else f"above {self.above:g} and up to {most}"


@dataclass(frozen=True)
class Since:
    """Which version of its document has a field, and all later ones.

    Attributes:
        version: the first.
    """

    version: int


def read_text(path: str | Path) -> str:
    """The text of a file with a document.

    Raises:
        PlanError: for a file that cannot be read.
    """
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"expected a document in {path}, found {error}; give a file with a plan or a trace") from error


def ascending(values: Sequence[int]) -> bool:
    """Whether each value is greater than the one before."""
    return all(one < other for one, other in pairwise(values))


def refuse_constant(name: str) -> NoReturn:
    """Refuses NaN and infinities, which Python's JSON would read."""
    raise ValueError(f"{name} is no JSON number")


@lru_cache
def _reader(kind: Any, version: int) -> Callable[[Any, str], Any]:
    """How a value is read that is annotated so: from what JSON has, and its path in the document."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is tuple:
        return partial(_read_list, _reader(parts[0], version))
    if origin is frozenset:
        return partial(_read_set, _reader(parts[0], version))
    if origin is Mapping:
        return partial(_read_mapping, _reader(parts[1], version))
    if origin is UnionType:
        return partial(_read_optional, _reader(parts[0], version))
    plain, *said = parts if origin is Annotated else (kind,)
    asked = [one for one in said if not isinstance(one, Since)]
    if said and not asked:
        return _reader(plain, version)
    if plain not in _PLAIN:
        return partial(read_object, plain, version=version)
    return partial(_PLAIN[plain], *(asked or [() if plain is str else Range()]))


def _since(kind: Any) -> int:
    return next((one.version for one in get_args(kind)[1:] if isinstance(one, Since)), 0)


@lru_cache
def _readers(kind: type, version: int) -> dict[str, Callable[[Any, str], Any]]:
    """Of a dataclass, by field."""
    hints = get_type_hints(kind, include_extras=True)
    names = (field.name for field in fields(kind))
    return {name: _reader(hints[name], version) for name in names if _since(hints[name]) <= version}


def read_object(kind: type, value: Any, path: str, version: int) -> Any:
    """A dataclass from what JSON has of it.

    Args:
        kind: the dataclass.
        value: what was read.
        path: of the value in its document.
        version: of the document.

    Raises:
        PlanError: for a field that is missing, unknown, or not of its type or in its range.
    """
    readers = _readers(kind, version)
    known = {*readers, "format", "version"} if issubclass(kind, Document) else readers
    for name in value if isinstance(value, dict) else ():
        if name not in known:
            raise PlanError(f"expected no field {path}.{name} in version {version}, found one; take it out")
    given = {name: read(_take(value, name, path), f"{path}.{name}") for name, read in readers.items()}
    try:
        return kind(**given)
    except PlanError as error:
        raise PlanError(f"{error} (in {path})") from error


def _take(value: Any, name: str, path: str) -> Any:
    if not isinstance(value, dict):
        raise PlanError(f"expected an object at {path}, found {_short(value)}; correct this field")
    if name not in value:
        raise PlanError(f"expected a field {path}.{name}, found none; add it")
    return value[name]


def _read_optional(read: Callable[[Any, str], Any], value: Any, path: str) -> Any:
    return None if value is None else read(value, path)


def _read_list(read: Callable[[Any, str], Any], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise PlanError(f"expected a list at {path}, found {_short(value)}; correct this field")
    return tuple(read(one, f"{path}[{at}]") for at, one in enumerate(value))


def _read_set(read: Callable[[Any, str], Any], value: Any, path: str) -> frozenset[Any]:
    return frozenset(_read_list(read, value, path))


def _read_mapping(read: Callable[[Any, str], Any], value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"expected an object at {path}, found {_short(value)}; correct this field")
    return {name: read(one, f"{path}.{name}") for name, one in value.items()}


def _read_text(among: Sequence[str], value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise PlanError(f"expected text at {path}, found {_short(value)}; correct this field")
    if among and value not in among:
        raise PlanError(f"expected one of {', '.join(among)} at {path}, found {_short(value)}")
    return value


def _read_flag(_: Range, value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"expected true or false at {path}, found {_short(value)}; correct this field")
    return value


def _read_integer(asked: Range, value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not asked.holds(value):
        raise PlanError(f"expected a whole number {asked} at {path}, found {_short(value)}; correct this field")
    return value


def _read_number(asked: Range, value: Any, path: str) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and _finite(value)
    if not good or not asked.holds(value):
        raise PlanError(f"expected a number {asked} at {path}, found {_short(value)}; correct this field")
    return float(value)


_PLAIN: dict[type, Callable[..., Any]] = {
    str: _read_text,
    bool: _read_flag,
    int: _read_integer,
    float: _read_number,
}


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
