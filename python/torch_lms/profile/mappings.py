"""Mappings of a program's own types, which graphs make again."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["is_own_mapping"]


def is_own_mapping(value: object) -> bool:
    """Whether it is a mapping of another type than dict, which that type makes of its names and values."""
    return isinstance(value, Mapping) and type(value) is not dict and all(isinstance(name, str) for name in value)
