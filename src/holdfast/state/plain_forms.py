"""Plain values to save in place of common objects that a checkpoint cannot hold."""

from __future__ import annotations

import argparse
import dataclasses
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import FunctionType, ModuleType, SimpleNamespace
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
