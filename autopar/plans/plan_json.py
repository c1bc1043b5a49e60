"""Dataclasses as JSON and back: what a plan file is made of. Layouts are lists of strings.

    plain(Mesh(("tp",), (2,)))                                     {"axis_names": ["tp"], "shape": [2]}
    read({"axis_names": ["tp"], "shape": [2]}, Mesh)               the mesh again

Errors name the damaged entry.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from autopar.layouts.placement import Layout, Partial, Replicate, Shard, parse_layout

UNWRITTEN = "unwritten"
"""Key in the metadata of a field that no file holds."""
Record = TypeVar("Record")


def plain(record: object) -> dict[str, object]:
    """The fields of a dataclass: dataclasses in it as dicts, layouts as lists of strings."""
    assert is_dataclass(record)
    written = [f.name for f in fields(record) if not f.metadata.get(UNWRITTEN)]
    return {name: _plain(getattr(record, name)) for name in written}


def _plain(value: object) -> object:
    if isinstance(value, Shard | Replicate | Partial):
        return str(value)
    if is_dataclass(value):
        return plain(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def read(value: object, kind: type[Record]) -> Record:
    """Inverse of `plain` for a dataclass. Raises ValueError with the path of the damaged entry."""
    found = _read(value, kind, "")
    assert isinstance(found, kind)
    return found


def _read(value: Any, kind: Any, where: str) -> object:
    """The value of a field of type `kind`, which stands at the path `where`."""
    if kind == Layout:
        _expect(value, list, where)
        return parse_layout([_text(item, where) for item in value])
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is object:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        choices = [choice for choice in arguments if choice is not type(None)]
        return _read(value, choices[0], where) if len(choices) == 1 else _scalar(value, tuple(choices), where)
    if origin is tuple:
        _expect(value, list, where)
        return tuple(_read_item(value, arguments, index, where) for index in range(len(value)))
    if origin is not None and issubclass(origin, Mapping):
        _expect(value, dict, where)
        return {key: _read(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(kind):
        return _read_dataclass(value, kind, where)
    return _scalar(value, (kind,), where)


def _text(value: object, where: str) -> str:
    _expect(value, str, where)
    return str(value)


def _read_item(value: list[Any], kinds: tuple[Any, ...], index: int, where: str) -> object:
    is_open = len(kinds) == 2 and kinds[1] is Ellipsis
    if not is_open and len(value) != len(kinds):
        raise ValueError(f"{where} has {len(value)} entries, not {len(kinds)}")
    return _read(value[index], kinds[0] if is_open else kinds[index], f"{where}[{index}]")


def _read_dataclass(value: Any, kind: Any, where: str) -> object:
    _expect(value, dict, where)
    hints = _hints(kind)
    unknown = set(value) - set(hints)
    if unknown:
        raise ValueError(f"{where or 'the plan'} has unknown fields {sorted(unknown)}")
    return kind(**{name: _read(item, hints[name], f"{where}.{name}".lstrip(".")) for name, item in value.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the fields of a dataclass; evaluating them takes longer than reading an entry."""
    return typing.get_type_hints(kind)


def _scalar(value: object, kinds: tuple[type, ...], where: str) -> object:
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if int not in kinds else value
    if not isinstance(value, kinds):
        raise ValueError(f"{where} must be {' or '.join(k.__name__ for k in kinds)}, not {value!r}")
    return value


def _expect(value: object, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where or 'the plan'} must be a JSON {kind.__name__}, not {value!r}")
