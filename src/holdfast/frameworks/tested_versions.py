"""The versions of frameworks that holdfast is tested with, and what it says where another one runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Final

from holdfast.errors import StateError

_log = logging.getLogger(__name__)

#: By the module that has ``__version__``: the name of the package, and the version that tests run with. Versions that
#: differ in the last number alone count as this one.
TESTED: Final = MappingProxyType(
    {
        "deepspeed": ("DeepSpeed", "0.19.8"),
        "lightning": ("lightning", "2.6.6"),
        "megatron.core": ("megatron-core", "0.16.1"),
        "pytorch_lightning": ("pytorch-lightning", "2.6.6"),
        "torchtitan": ("torchtitan", "0.3.0"),
        "transformers": ("transformers", "5.23.0"),
        "vllm": ("vLLM", "0.32.0"),
    }
)


def require_tested(module: str, *, code: str, action: str) -> None:
    """Refuse a framework whose memory holdfast reads, in a version that may hold its state elsewhere.

    Raises `StateError` with `code`, which advises to install the tested version, or to do `action`.
    """
    if (differs := _difference(module)) is not None:
        name, tested, found = differs
        raise StateError(
            f"holdfast was tested with {name} {tested}, and this is {found}, which may hold its state elsewhere.",
            code=code,
            action=f"Install {name} {tested}, or {action}.",
        )


@cache
def warn_untested(module: str) -> None:
    """Say in the log of rank 0, once, that another version of a framework runs than tests run with."""
    if (differs := _difference(module)) is not None and os.environ.get("RANK", "0") == "0":
        name, tested, found = differs
        _log.warning(
            "holdfast was tested with %s %s, and this is %s: compare a resumed job with one that was not interrupted, "
            "as `holdfast prove` does, before you rely on it",
            name,
            tested,
            found,
        )


@contextmanager
def imports_of(module: str) -> Iterator[None]:
    """Name the tested version in the `ImportError` of a ``with`` block, where another version of a framework lacks what
    the block imports."""
    try:
        yield
    except ImportError as error:
        if (differs := _difference(module)) is None:
            raise
        name, tested, found = differs
        text = f"holdfast was tested with {name} {tested}, and this is {found}: {error}. Install {name} {tested}."
        raise ImportError(text, name=error.name, path=error.path) from error


def _difference(module: str) -> tuple[str, str, str] | None:
    """The name of a package, its tested version, and the other one that is loaded; None where that is the same one."""
    name, tested = TESTED[module]
    found = getattr(sys.modules.get(module), "__version__", tested)
    return (name, tested, found) if found.split(".")[:2] != tested.split(".")[:2] else None
