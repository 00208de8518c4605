"""Values of a checkpoint as text, one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from holdfast.errors import printable
from holdfast.format import values as value_codec
from holdfast.format.names import join
from holdfast.format.values import (
    BigInt,
    Blob,
    Items,
    Leaf,
    Node,
    NumpyScalar,
    Open,
    PerRankNode,
    Plain,
    RecordNode,
    TableNode,
    Text,
    TorchValue,
)
from holdfast.wording import count

_DIGITS = re.compile(r"(\d+)")
#: Most characters of a value on screen.
_LINE = 100


def natural(name: str) -> list[str | int]:
    """A key that sorts ``9`` before ``10``."""
    return [int(part) if at % 2 else part for at, part in enumerate(_DIGITS.split(name))]


def shown_name(name: str) -> str:
    """A name of a tensor or a value for a screen. Unprintable characters are escaped as names escape ``/ % @``: as
    ``%`` and the hexadecimal digits of their bytes."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else "".join(f"%{byte:02X}" for byte in c.encode()) for c in name)


def kind_of(node: Node) -> str:
    """The name of a value's Python type, in one word or two."""
    registration = value_codec.registration(node)
    if registration is not None:
        return f"registered {registration!r}"
    match value_codec.bare(node):
        case Plain(value):
            kind = type(value).__name__
        case NumpyScalar(dtype):
            kind = f"numpy {dtype}"
        case TorchValue(kind):
            kind = f"torch.{kind}"
        case TableNode(kind) | Items(kind) | Open(kind) | RecordNode(kind):
            pass
        case PerRankNode():
            kind = "per rank"
        case Text():
            kind = "str"
        case BigInt():
            kind = "int"
        case Blob():
            kind = "bytes"
        case other:
            kind = type(other).__name__.lower()
    return kind


def text_of(node: Node) -> str:
    """A value, or the entries of a container, as printable text."""
    bare = value_codec.bare(node)
    if isinstance(bare, Blob | TorchValue) and bare.data:
        text = f"{count(len(bare.data), 'byte')}, {bare.data[:16].hex(' ')}{' ...' if len(bare.data) > 16 else ''}"
    elif isinstance(bare, TorchValue):
        text = bare.text
    elif isinstance(bare, Leaf):
        text = repr(value_codec.rebuild({"": bare}, "", tensors=str))
    else:
        below = list(value_codec.children(node))
        text = count(len(below), "entry", "entries") + (
            f": {', '.join(map(shown_name, below))}" if below and not isinstance(bare, Items) else ""
        )
    return printable(text)


def shortened(text: str) -> str:
    """`text`, cut to fit on one line of a table."""
    return text if len(text) <= _LINE else f"{text[: _LINE - 4]} ..."


def rows(nodes: Mapping[str, Node]) -> Iterator[tuple[str, Node, str]]:
    """Name, node and text of each value, in natural order; a list of plain values is one row.

    Only empty containers have rows of their own: the names of their entries show the others.
    """
    inlined: set[str] = set()
    for path in sorted(nodes, key=natural):
        node = nodes[path]
        bare, below = value_codec.bare(node), [join(path, child) for child in value_codec.children(node)]
        if path in inlined:
            continue
        if isinstance(bare, Items) and below and all(isinstance(nodes[child], Leaf) for child in below):
            inlined.update(below)
            texts = ", ".join(text_of(nodes[child]) for child in below)
            yield path, node, f"({texts})" if bare.kind == "tuple" else f"[{texts}]"
        elif isinstance(bare, Leaf) or (not below and isinstance(bare, TableNode | Items | RecordNode)):
            yield path, node, text_of(node)
