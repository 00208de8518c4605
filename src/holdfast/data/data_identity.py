"""The part of a state that says which samples a position counts: it must be the same in a save and its load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from holdfast.data.permutation import MAX_LENGTH
from holdfast.errors import IncompatibleError
from holdfast.options import checked_number

#: The state of an order holds numbers, texts, and lists of them.
StateValue = int | str | Sequence["StateValue"]

#: Names the algorithm of the order in states. The order of one version never changes.
VERSION: Final = 1


def checked_length(name: str, length: object) -> int:
    """The number of samples that the option `name` was given as."""
    number = checked_number(name, length, least=1, reason="an order needs a sample")
    if number > MAX_LENGTH:
        raise ValueError(f"{name} is {number}, but an order has at most {MAX_LENGTH} samples in an epoch")
    return number


def checked_seed(seed: object) -> int:
    """`seed`, which must be a whole number of 64 bits."""
    number = checked_number("seed", seed, least=0, reason="seeds are not negative")
    if number >= 1 << 64:
        raise ValueError(f"seed is {number}, but seeds have at most 64 bits")
    return number


def checked_fingerprint(fingerprint: object) -> str:
    """`fingerprint`, which must be a text."""
    if not isinstance(fingerprint, str):
        raise TypeError(f"fingerprint must be a text, such as a digest of the dataset's files, not {fingerprint!r}")
    return fingerprint


def check_identity(here: Mapping[str, StateValue], stored: Mapping[str, StateValue]) -> int:
    """The position in the `stored` state.

    Raises:
        IncompatibleError: its identity is not the one `here` (code ``incompatible.dataset``).
    """
    differing = [
        f"{name}: {stored.get(name)!r} in the checkpoint, {value!r} here"
        for name, value in here.items()
        if stored.get(name) != value
    ]
    if differing:
        raise IncompatibleError(
            "The dataset or the order of its samples is not that of the checkpoint, so a position in it has another "
            "meaning.",
            code="incompatible.dataset",
            action="Train on the dataset of the checkpoint with its seed, or leave the data out of the load to begin "
            "this dataset at its start.",
            details=tuple(differing),
        )
    return cast("int", stored["position"])
