"""Plain values to save in place of common objects that a checkpoint cannot hold."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from io import IOBase
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Final
from uuid import UUID

#: Expressions that give the plain form of an object of these types; the first row that fits applies.
_EXPRESSIONS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((Enum,), "{}.value"),
    ((argparse.Namespace, SimpleNamespace), "vars({})"),
    ((PurePath, Decimal, Fraction, UUID), "str({})"),
    ((date, time), "{}.isoformat()"),
    ((timedelta,), "{}.total_seconds()"),
    ((AbstractSet,), "sorted({})"),
    ((bytearray, memoryview), "bytes({})"),
    ((Mapping,), "dict({})"),
    ((tuple,), "tuple({})"),
    ((list, deque), "list({})"),
    ((str,), "str({})"),
    ((int,), "int({})"),
    ((float,), "float({})"),
)

#: Types of code, of places in an iteration and of open files.
_NO_VALUES: Final = (
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    functools.partial,
    Iterator,
    IOBase,
)


def is_registrable(item: object) -> bool:
    """Whether it makes sense to register the type of `item`: not where it is code, a place in an iteration, a lock or
    an open file, which no value can stand for."""
    kind = type(item)
    return not (isinstance(item, _NO_VALUES) or kind is object or kind.__module__ in ("_thread", "threading"))


def plain_form(item: object, name: str) -> str | None:
    """The expression that turns `item`, in the variable `name`, into a value that can be saved; None where none is
    known."""
    if isinstance(item, (type, FunctionType, ModuleType)):
        return None
    if dataclasses.is_dataclass(item):
        return f"dataclasses.asdict({name})"
    if type(item).__module__.partition(".")[0] == "omegaconf":
        return f"OmegaConf.to_container({name})"
    if callable(getattr(type(item), "to_dict", None)):
        return f"{name}.to_dict()"
    return next((form.format(name) for kinds, form in _EXPRESSIONS if isinstance(item, kinds)), None)
