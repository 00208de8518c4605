"""Amounts of bytes and bits as users write them."""

from __future__ import annotations

import math
from typing import Final

_PREFIXES: Final = ("", "k", "M", "G", "T", "P")


def scaled(number: str, prefix: str) -> float:
    """The number times its prefix, such as ``k`` or ``Gi``; "" for none."""
    base = 1024 if prefix.endswith("i") else 1000
    return float(number) * math.pow(base, _PREFIXES.index(prefix.removesuffix("i")))
