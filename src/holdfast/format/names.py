"""Names of tensors and values: ``/``-joined components, each an escaped dictionary key or list index.

A string key is its own component, with ``%``, ``/`` and ``@`` written ``%25``, ``%2F`` and ``%40``. Every other key is
tagged, such as ``%int=3``; no string key can look like that, because a literal ``%`` is always ``%25``. List and tuple
indexes are plain decimals: the structure, not the name, records whether ``0`` is an index or the key ``"0"``.

Two components are reserved, and no key gives them: values and tensors of rank 3 alone lie below ``%rank=3``, and
``%plane=data`` is one of the plain tensors that make up a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import lru_cache

from holdfast.errors import CorruptError, StateError

Key = str | int | float | bool | bytes | None

_MAX_KEY_BITS = 1024
_ESCAPES = {"%25": "%", "%2F": "/", "%40": "@"}
_SPECIAL = re.compile(r"[%/@\ud800-\udfff]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ESCAPE = re.compile(r"%(?:25|2F|40)")
_RANK = re.compile(r"%rank=(?:0|[1-9][0-9]{0,8})")
_STRING = r"(?:[^%/@\ud800-\udfff]++|%25|%2F|%40)+"
_STRINGS = re.compile(rf"{_STRING}+(?:/{_STRING}+)*+")
_ONE_STRING = re.compile(_STRING)
_OWN_PART = re.compile(r".*?/%rank=[0-9]+(?=/|\Z)", re.DOTALL)
_PARSERS: dict[str, Callable[[str], Key]] = {
    "int": int,
    "float": float.fromhex,
    "bool": {"True": True, "False": False}.__getitem__,
    "bytes": bytes.fromhex,
}


def component(key: object, *, path: str = "") -> str:
    """The name component of a dictionary key; `path` is the dictionary's path, for the message.

    Raises `StateError`, code ``state.key``, for a key that is neither a string that UTF-8 can encode nor an int (of
    at most 1024 bits), float, bool, bytes or None. Subclasses of these are refused: their type would be lost.
    """
    if type(key) is str:
        text = _escaped(key)
        if text is not None:
            return text
    elif key is None:
        return "%none"
    elif type(key) is bool:
        return f"%bool={key}"
    elif type(key) is int and key.bit_length() <= _MAX_KEY_BITS:
        return f"%int={key}"
    elif type(key) is float:
        return f"%float={key.hex()}"
    elif type(key) is bytes:
        return f"%bytes={key.hex()}"
    raise StateError(
        f"The key {key!r:.80} ({type(key).__name__}) in {path or 'the root'!r} cannot be part of a name.",
        code="state.key",
        action="Use a string, int, float, bool, bytes or None as the key.",
        path=path or None,
    )


@lru_cache(maxsize=1 << 16)
def _escaped(key: str) -> str | None:
    """The component of a string; None where UTF-8 cannot encode it. Cached: every save asks for the same keys."""
    if not key:
        return "%empty"
    if not _SPECIAL.search(key):
        return key
    if _SURROGATE.search(key):
        return None
    return key.replace("%", "%25").replace("/", "%2F").replace("@", "%40")


@lru_cache(maxsize=1 << 12)
def parse_component(text: str) -> Key:
    """The key whose component is `text`. Raises `CorruptError` for text that `component` never gives. Cached, because
    thousands of parameters have slots of the same names."""
    if text and not _SPECIAL.search(text):  # its own key, as nearly all are
        return text
    try:
        key = _parse(text)
        canonical = component(key) == text
    except (KeyError, ValueError, OverflowError, StateError) as error:
        raise _malformed(text) from error
    if not canonical:
        raise _malformed(text)
    return key


def check_components(name: str) -> None:
    """Raise `CorruptError` when a component of `name` is neither that of a key nor that of a rank."""
    if _STRINGS.fullmatch(name):  # only string keys and indexes, as in nearly all names
        return
    for text in split(name):
        if not (_ONE_STRING.fullmatch(text) or is_rank_component(text)):
            parse_component(text)


def check_names(names: Collection[str]) -> None:
    """As `check_components`, for many names."""
    # Joined, they have the same components, so one match of a regular expression serves thousands.
    if not _STRINGS.fullmatch("/".join(filter(None, names))):
        for name in names:
            check_components(name)


def rank_component(rank: int) -> str:
    """The component below which the values and tensors of `rank` alone lie."""
    return f"%rank={rank}"


def plane_component(plane: str) -> str:
    """The component of one of the planes of a tensor. Raises `StateError` for names that UTF-8 cannot encode."""
    return f"%plane={component(plane)}"


def is_rank_component(text: str) -> bool:
    """Whether `rank_component` gave `text`."""
    return _RANK.fullmatch(text) is not None


def shown(name: str) -> str:
    """`name` for a message: escaped when it has characters that would act on a terminal or reorder its text."""
    return name if name.isprintable() else ascii(name)[1:-1]


def own_part(name: str) -> str | None:
    """The path, up to and with ``%rank=N``, of the rank's own part that holds `name`; None for a name of all ranks."""
    found = _OWN_PART.match(name) if "/%rank=" in name else None
    return found.group() if found else None


def join(path: str, *components: str) -> str:
    """`path` with `components` appended; the root's path is empty."""
    return "/".join((path, *components)) if path else "/".join(components)


def split(name: str) -> tuple[str, ...]:
    """The components of `name`, still escaped; none for the root."""
    return tuple(name.split("/")) if name else ()


def _parse(text: str) -> Key:
    if not text.startswith("%") or text[:3] in _ESCAPES:
        return _ESCAPE.sub(lambda match: _ESCAPES[match.group()], text)
    if text == "%none":
        return None
    if text == "%empty":
        return ""
    tag, _, value = text[1:].partition("=")
    return _PARSERS[tag](value)


def _malformed(text: str) -> CorruptError:
    return CorruptError(
        f"{text!r:.80} is not a component of a name.",
        code="corrupt.name",
        action="Use another copy or an older checkpoint.",
    )
