"""The result or error of a job's call, as its caller saw it; and the small state that such jobs save."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import holdfast
from holdfast import HoldfastError

#: Far more than anything here takes: an error must come from its cause, not from the clock.
TIMEOUT_S = 20.0


class Told(NamedTuple):
    """The result or error that a caller got from a call."""

    kind: str
    code: str
    text: str
    rank: int | None
    tensor: str | None
    path: str | None
    absent: tuple[int, ...]


def told(call: Callable[[], object]) -> Told:
    """The error that `call` raises. It must say what to do next, as all do."""
    with pytest.raises(HoldfastError) as raised:
        call()
    error = raised.value
    assert error.action.endswith((".", "?"))
    assert str(error) == f"[{error.code}] {error.message} {error.action}"
    return Told(type(error).__name__, error.code, str(error), error.rank, error.tensor, error.path, error.absent)


def small(**changes: object) -> dict[str, object]:
    return {"weight": torch.arange(6.0), "progress": {"epoch": 1}, **changes}


def save_small(run: str, step: int, **changes: object) -> str:
    return holdfast.save(run, small(**changes), step, timeout_s=TIMEOUT_S).place


def same_on_all(errors: list[Told]) -> Told:
    """The one error that all ranks raised."""
    assert len(set(errors)) == 1
    return errors[0]
