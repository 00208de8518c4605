"""Helpers of the tests of known defects: find a checkpoint's files, damage one, and record what a process does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.store import posix


def folder(run: Path) -> Path:
    """The folder of the head."""
    return Path(holdfast.open(run).path)


def data_file(run: Path) -> Path:
    """The head's only data file."""
    (path,) = folder(run).glob("*.safetensors")
    return path


def record(run: Path, name: str) -> Path:
    """The newest record below ``history`` or ``epochs``: their names count down."""
    return min((run / name).iterdir())


def flip_bit(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def offset_of(path: Path, tensor: torch.Tensor) -> int:
    """The offset of a tensor's bytes in a file."""
    return path.read_bytes().index(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def content(root: Path) -> dict[str, bytes]:
    """All files below a folder, by relative name."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class Calls:
    """The `os` module, which tells `told` of each call's name, arguments and result."""

    def __init__(self, told: Callable[[str, tuple[Any, ...], Any], None]) -> None:
        self._told = told

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if not callable(real):
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            self._told(name, args, result)
            return result

        return call


@contextmanager
def told_of_calls(told: Callable[[str, tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Within the block `told` hears of every system call that the storage makes through `os`."""
    posix.__dict__["os"] = Calls(told)
    try:
        yield
    finally:
        posix.__dict__["os"] = os


@contextmanager
def failing(call: str, number: int) -> Iterator[None]:
    """Within the block one kind of system call of the storage fails with that error number."""

    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    calls = Calls(lambda *_: None)
    calls.__dict__[call] = refuse
    posix.__dict__["os"] = calls
    try:
        yield
    finally:
        posix.__dict__["os"] = os
