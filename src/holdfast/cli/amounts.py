"""Amounts of bytes and bits, times and bandwidths, as users write them."""

from __future__ import annotations

import math
import re
from typing import Final

from holdfast.errors import ConfigurationError

#: A number without a sign.
NUMBER: Final = r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)"
_TIME: Final = re.compile(rf"{NUMBER} ?(ms|s|min|h|d)?")
_SECONDS: Final = {"ms": 0.001, None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE: Final = re.compile(rf"{NUMBER} ?([kMGTP]i?)?B")
_BANDWIDTH: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]i?)?(B|bit)/s")
_PREFIXES: Final = ("", "k", "M", "G", "T", "P")


def scaled(number: str, prefix: str) -> float:
    """The number times its prefix, such as ``k`` or ``Gi``; "" for none."""
    base = 1024 if prefix.endswith("i") else 1000
    return float(number) * math.pow(base, _PREFIXES.index(prefix.removesuffix("i")))


def seconds_in(text: str) -> float:
    """The seconds of a time such as ``250ms``, ``0.3s``, ``5min``, ``3.09h`` or ``2d``; nan for any other text."""
    found = _TIME.fullmatch(text.strip())
    return math.nan if found is None else float(found[1]) * _SECONDS[found[2]]


def bytes_in(text: str) -> int | None:
    """The bytes of a size such as ``912GB`` or ``2TiB``; None for any other text."""
    found = _SIZE.fullmatch(text.strip())
    nbytes = math.nan if found is None else scaled(found[1], found[2] or "")
    return round(nbytes) if math.isfinite(nbytes) else None


def checked_bandwidth(text: str) -> float:
    """The bytes per second of a bandwidth such as ``10GB/s`` or ``400Gbit/s``.

    Raises `ConfigurationError` for any other text.
    """
    found = _BANDWIDTH.fullmatch(text)
    speed = 0.0
    if found is not None:
        speed = scaled(found[1], found[2] or "") / (8 if found[3] == "bit" else 1)
    if not speed:
        raise ConfigurationError(
            f"'{text}' is not a bandwidth.",
            code="config.bandwidth",
            action="Write it as 10GB/s, 800MiB/s or 400Gbit/s.",
        )
    return speed
