"""Values: the part of a state that is not tensors, as a flat table ``{path: node}``. No torch, no pickle.

A node is a leaf (a value), a reference to the tensor of the same name, or a container that says which components
lie below its path. Types are exact: a subclass would come back as another type, so it is not a value. Values that
only torch can build (`TorchValue`) stay plain records here; ``holdfast.state`` turns them into torch's objects.

`Open` containers list no children, so the tables of several ranks can be merged: their children are the nodes that the
table has below them.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import ge
from typing import Literal, NamedTuple, Protocol, TypeGuard

import msgspec
import numpy as np

from holdfast.decoding import decode_msgpack
from holdfast.errors import CorruptError, NotFoundError, StateError
from holdfast.format.names import (
    check_names,
    component,
    is_rank_component,
    join,
    parse_component,
    plane_component,
    rank_component,
)
from holdfast.format.near import near
from holdfast.wording import count

#: Limits of encoding and decoding: components of a path, bytes of an encoded table, ranks.
MAX_DEPTH = 128
MAX_NBYTES = 1 << 30
MAX_WORLD_SIZE = 1 << 20
#: Most fields of a NamedTuple: each makes the creation of the type slower.
_MAX_FIELDS = 4096

# The kinds of numpy scalars that their dtype string describes in full: numbers and times, but no records or objects.
# Extended floats are refused: they differ between machines, and their padding differs between two saves.
_NUMPY_KINDS = "biufcmM"
_NUMPY_DTYPE = re.compile(rf"[<>|]([{_NUMPY_KINDS}])(\d{{1,2}})(\[\w+\])?")
_EXTENDED = "gG"


class Plain(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="plain"):
    """None, a bool, an int of at most 64 bits, or a float, bit for bit."""

    value: bool | int | float | None


class BigInt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="int"):
    """An int beyond 64 bits, as little-endian two's complement."""

    data: bytes


class Complex(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="complex"):
    """A complex number."""

    real: float
    imag: float


class Text(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="str"):
    """A string in UTF-8. Lone surrogates (of undecodable file names) are kept, as by Python's ``surrogatepass``."""

    data: bytes


class Blob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="bytes"):
    """Bytes."""

    data: bytes


class NumpyScalar(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="numpy"):
    """A numpy scalar: its dtype string and the bytes of its memory. Strings: ``U`` and UTF-8; byte strings: ``S``."""

    dtype: str
    data: bytes


class TorchValue(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="torch"):
    """A dtype, device or Size by its text, or a Generator by its device and its state's bytes."""

    kind: Literal["dtype", "device", "size", "generator"]
    text: str
    data: bytes = b""


class TensorRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="tensor"):
    """The tensor that has this path as its name."""


class TableNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="dict"):
    """A dictionary; `keys` are components, in the dictionary's order."""

    kind: Literal["dict", "ordered", "counter"]
    keys: tuple[str, ...]


class Items(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="list"):
    """A list or tuple; its items are the components ``0`` to ``size - 1``."""

    kind: Literal["list", "tuple"]
    size: int


class RecordNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="record"):
    """A NamedTuple of type `name`; the components below it are its `fields`."""

    name: str
    fields: tuple[str, ...]


class Open(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="open"):
    """A dictionary, module or optimizer; its children are all nodes and tensors whose names lie below it."""

    kind: Literal["dict", "module", "optimizer"]


class PlanesNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="planes"):
    """A tensor of a type that the user registered as `name`, stored as plain tensors below its path: its `planes`."""

    name: str
    planes: tuple[str, ...]


class PerRankNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="per_rank"):
    """A value of which each of `world_size` ranks has a part of its own: rank 0's lies below ``%rank=0``, and so on."""

    world_size: int


Leaf = Plain | BigInt | Complex | Text | Blob | NumpyScalar | TorchValue
Container = TableNode | Items | RecordNode


class Encoded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="encoded"):
    """A value of a type that the user registered as `name`; `state` is the node of its encoded form."""

    name: str
    state: Leaf | TensorRef | Container


class Stateful(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="stateful"):
    """An object saved through its ``state_dict()``; `state` is the node of the value that this returned."""

    state: Leaf | TensorRef | PlanesNode | Container | Encoded


Bare = Leaf | TensorRef | PlanesNode | PerRankNode | Container | Open
Node = Bare | Encoded | Stateful


class Undecoded(NamedTuple):
    """A value or tensor of a registered type in its stored form, for readers without the registration.

    `name` is the name of the registration, `value` the plain value, or the planes by name.
    """

    name: str
    value: object


def leaf(value: object) -> Leaf | None:
    """`value` as a leaf, or None when it is no leaf that can be made without torch."""
    kind = type(value)
    if value is None or kind in (bool, float):
        return Plain(value)  # type: ignore[arg-type]
    if kind is int:
        assert isinstance(value, int)
        return Plain(value) if -(1 << 63) <= value < 1 << 64 else BigInt(_int_bytes(value))
    if kind is str:
        assert isinstance(value, str)
        return Text(value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        assert isinstance(value, bytes)
        return Blob(value)
    if kind is complex:
        assert isinstance(value, complex)
        return Complex(value.real, value.imag)
    return _numpy_leaf(value) if isinstance(value, np.generic) and kind.__module__ == "numpy" else None


def _numpy_leaf(value: np.generic) -> NumpyScalar | None:
    if isinstance(value, np.str_):
        return NumpyScalar("U", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, np.bytes_):
        return NumpyScalar("S", bytes(value))
    dtype = value.dtype
    if dtype.kind not in _NUMPY_KINDS or dtype.char in _EXTENDED:
        return None
    return NumpyScalar(dtype.str, value.tobytes())


def container(value: object, path: str) -> tuple[Container, list[tuple[str, object]]] | None:
    """`value` as a container with its children by component, or None for anything else. `path` is for messages."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        assert isinstance(value, dict)
        children = [(component(key, path=path), child) for key, child in value.items()]
        name: Literal["dict", "ordered", "counter"]
        name = "dict" if kind is dict else "ordered" if kind is OrderedDict else "counter"
        return TableNode(name, tuple(key for key, _ in children)), children
    if kind in (list, tuple):
        assert isinstance(value, (list, tuple))
        children = [(str(index), child) for index, child in enumerate(value)]
        return Items("list" if kind is list else "tuple", len(value)), children
    if is_record(value):
        fields = value._fields
        if not _is_record_type(kind.__name__, fields):
            return None
        return RecordNode(kind.__name__, fields), list(zip(fields, value, strict=True))
    return None


class NamedTupleLike(Protocol):
    """The attributes that all NamedTuples share; Python has no common type for them."""

    _fields: tuple[str, ...]

    def __iter__(self) -> Iterator[object]: ...


def is_record(value: object) -> TypeGuard[NamedTupleLike]:
    """Whether `value` is a NamedTuple."""
    return isinstance(value, tuple) and type(value) is not tuple and hasattr(type(value), "_fields")


@lru_cache(maxsize=256)
def record_type(name: str, fields: tuple[str, ...]) -> Callable[..., object]:
    """A NamedTuple type for a `RecordNode` whose live type is not known; the same type for the same arguments."""
    # namedtuple() compiles its arguments, but `decode` lets only identifiers through. It accepts the fields that a
    # live type got from ``rename=True`` ("_1") only with the same flag.
    return namedtuple(name, fields, rename=True)  # noqa: PYI024


def encode(nodes: Mapping[str, Node]) -> bytes:
    """The bytes of a table; equal tables give equal bytes. Raises `StateError` for more than `MAX_NBYTES`."""
    data = msgspec.msgpack.encode(sorted(nodes.items()))
    if len(data) > MAX_NBYTES:
        raise StateError(
            f"The values of the state take {count(len(data), 'byte')}; the limit is {MAX_NBYTES}.",
            code="state.values_size",
            action="Put large data into tensors, not into values.",
        )
    return data


def decode(data: bytes) -> dict[str, Node]:
    """The table that `encode` turned into `data`. Raises `CorruptError`, code ``corrupt.values``, for other bytes."""
    if len(data) > MAX_NBYTES:
        raise _malformed("", f"take {count(len(data), 'byte')}, over the limit of {MAX_NBYTES}")
    try:
        rows = decode_msgpack(data, list[_TableRow])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _malformed("", f"cannot be decoded ({error})") from error
    nodes = {row.path: row.node for row in rows}
    paths = [row.path for row in rows]
    if any(map(ge, paths, paths[1:])):
        raise _malformed("", "are not sorted by path")
    check_names(paths)
    for path, node in nodes.items():
        if path.count("/") >= MAX_DEPTH:
            raise _malformed(path, f"are nested deeper than {MAX_DEPTH}")
        if type(node) not in _ALWAYS_SOUND:
            _check(path, node, nodes)
    return nodes


def same(a: Node, b: Node | None) -> bool:
    """Whether two nodes are equal, bit for bit."""
    return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


def bare(node: Node) -> Bare:
    """The node itself, or that of the value inside a `Stateful` or an `Encoded`."""
    state = node.state if isinstance(node, Stateful) else node
    return state.state if isinstance(state, Encoded) else state


def registration(node: Node) -> str | None:
    """The name of the registration that decodes this node itself; None for most nodes."""
    state = node.state if isinstance(node, Stateful) else node
    return state.name if isinstance(state, (Encoded, PlanesNode)) else None


def tensors(nodes: Mapping[str, Node]) -> Iterator[str]:
    """The names of all tensors that the nodes of a table refer to."""
    for path, node in nodes.items():
        if type(node) is TensorRef:
            yield path
        elif isinstance(node, PlanesNode | Encoded | Stateful):
            yield from tensors_at(path, node)


def parts(nodes: Mapping[str, Node]) -> Iterator[str]:
    """The paths of the single ranks' parts of per-rank values; other files' tables may hold them."""
    for path, node in nodes.items():
        if isinstance(node, PerRankNode):
            for rank in range(node.world_size):
                yield join(path, rank_component(rank))


def tensors_at(path: str, node: Node) -> list[str]:
    """The names of the tensors that the node at `path` itself refers to; none for most nodes."""
    state = bare(node)
    if isinstance(state, PlanesNode):
        return [join(path, plane_component(plane)) for plane in state.planes]
    return [path] if isinstance(state, TensorRef) else []


def children(node: Node) -> Iterator[str]:
    """The components that a node lists as its children; none for leaves, tensors and `Open` containers."""
    state = bare(node)
    if isinstance(state, TableNode):
        yield from state.keys
    elif isinstance(state, RecordNode):
        yield from state.fields
    elif isinstance(state, Items):
        yield from map(str, range(state.size))
    elif isinstance(state, PerRankNode):
        yield from map(rank_component, range(state.world_size))


def walk(nodes: Mapping[str, Node], path: str) -> Iterator[tuple[str, Node]]:
    """The nodes at and below `path`, without those below `Open` containers."""
    node = lookup(nodes, path)
    yield path, node
    for child in children(node):
        yield from walk(nodes, join(path, child))


def lookup(nodes: Mapping[str, Node], path: str) -> Node:
    """The node at `path`. Raises `NotFoundError`, code ``not_found.value``."""
    node = nodes.get(path)
    if node is None:
        close = near(path, nodes.keys())
        raise NotFoundError(
            f"The checkpoint has no value {path!r}.",
            code="not_found.value",
            action=f"Did you mean {' or '.join(map(repr, close))}?" if close else "holdfast show --names lists them.",
            path=path,
        )
    return node


def holds_live(path: str, nodes: Mapping[str, Node]) -> bool:
    """Whether the node at `path` is or has a tensor or an object, which fills a live one and replaces no value."""
    node = lookup(nodes, path)
    if isinstance(node, Encoded):
        return False
    if isinstance(node, Stateful | TensorRef | PlanesNode | PerRankNode | Open):
        return True
    return any(holds_live(join(path, name), nodes) for name in children(node))


def rebuild(
    nodes: Mapping[str, Node],
    path: str,
    tensors: Callable[[str], object],
    *,
    revive: Callable[[TorchValue], object] = lambda value: value,
    record: Callable[[str, tuple[str, ...]], Callable[..., object]] = record_type,
    decode: Callable[[str, object], object] = Undecoded,
) -> object:
    """Build the Python object at `path`. A per-rank value becomes the list of all ranks' parts.

    `tensors` gives the tensor of a name, `revive` the object of a torch value (default: the record itself), `record`
    the constructor of a NamedTuple, and `decode` the object of a registration's name and stored value. Raises
    `NotFoundError` where there is no value, also for modules and optimizers, which are not values: their tensors have
    names of their own.
    """

    def build(path: str) -> object:
        node = lookup(nodes, path)
        state, name = bare(node), registration(node)
        if isinstance(state, PlanesNode):
            value: object = {plane: tensors(join(path, plane_component(plane))) for plane in state.planes}
        elif isinstance(state, TensorRef):
            value = tensors(path)
        elif isinstance(state, TorchValue):
            value = revive(state)
        elif isinstance(state, Leaf):
            value = _python(state)
        else:
            names = _below(nodes, path, state) if isinstance(state, Open) else list(children(state))
            value = _assemble(state, names, [build(join(path, name)) for name in names], record)
        return value if name is None else decode(name, value)

    return build(path)


def _assemble(
    state: Container | Open | PerRankNode,
    names: list[str],
    items: list[object],
    record: Callable[[str, tuple[str, ...]], Callable[..., object]],
) -> object:
    if isinstance(state, PerRankNode):
        return items
    if isinstance(state, Items):
        return items if state.kind == "list" else tuple(items)
    if isinstance(state, RecordNode):
        return record(state.name, state.fields)(*items)
    pairs = dict(zip(map(parse_component, names), items, strict=True))
    if isinstance(state, TableNode) and state.kind != "dict":
        return OrderedDict(pairs) if state.kind == "ordered" else Counter(pairs)
    return pairs


def _below(nodes: Mapping[str, Node], path: str, node: Open) -> list[str]:
    if node.kind != "dict":
        raise NotFoundError(
            f"{path!r} is a whole {node.kind}, not a single value.",
            code="not_found.value",
            action=f"Read the tensors and values below it with view.tree({path!r}), or one of them by its name.",
            path=path,
        )
    start = len(path) + 1 if path else 0
    below = (name[start:] for name in nodes if name and (not path or name.startswith(path + "/")))
    return sorted(name for name in below if "/" not in name)


def _python(node: Leaf) -> object:
    if isinstance(node, Plain):
        return node.value
    if isinstance(node, Text):
        return node.data.decode("utf-8", "surrogatepass")
    if isinstance(node, BigInt):
        return int.from_bytes(node.data, "little", signed=True)
    if isinstance(node, Complex):
        return complex(node.real, node.imag)
    if isinstance(node, NumpyScalar):
        return _numpy_scalar(node)
    return node.data


def _numpy_scalar(node: NumpyScalar) -> object:
    if node.dtype == "U":
        return np.str_(node.data.decode("utf-8", "surrogatepass"))
    return np.bytes_(node.data) if node.dtype == "S" else np.frombuffer(node.data, np.dtype(node.dtype))[0]


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


class _TableRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One row of an encoded table."""

    path: str
    node: Node


#: Node types that need no `_check`: the schema already refuses everything that `encode` never gives.
_ALWAYS_SOUND = frozenset((Plain, Complex, Blob, TorchValue, TensorRef, Open))


def _check(path: str, node: Node, nodes: Mapping[str, Node]) -> None:
    """Raise `CorruptError` for a node that the schema accepts but `encode` never gives."""
    below = bare(node)
    if isinstance(below, PerRankNode):
        if not 0 < below.world_size <= MAX_WORLD_SIZE:
            raise _malformed(path, "belong to an impossible number of ranks")
        return  # the parts are in the tables of their ranks
    if isinstance(below, PlanesNode) and (not below.planes or len(set(below.planes)) != len(below.planes)):
        raise _malformed(path, "lack or repeat planes of a tensor")
    if isinstance(below, Items) and not 0 <= below.size <= len(nodes):
        raise _malformed(path, "lack entries of a list")
    if isinstance(below, RecordNode) and not _is_record_type(below.name, below.fields):
        raise _malformed(path, "hold a NamedTuple whose field names are not identifiers, or not unique")
    listed = list(children(below))
    if any(map(is_rank_component, listed)):
        raise _malformed(path, "hold entries under reserved names")
    if len(set(listed)) != len(listed) or not all(join(path, name) in nodes for name in listed):
        raise _malformed(path, "lack or repeat entries of a container")
    if isinstance(below, Text | BigInt | NumpyScalar) and not _is_sound(below):
        raise _malformed(path, "hold a malformed string, integer or numpy scalar")


def _is_sound(node: Text | BigInt | NumpyScalar) -> bool:
    try:
        if isinstance(node, NumpyScalar) and node.dtype not in ("U", "S"):
            # `leaf` gives one text per dtype, but other byte orders and other texts (``<i1``) are sound, too.
            return _NUMPY_DTYPE.fullmatch(node.dtype) is not None and np.dtype(node.dtype).itemsize == len(node.data)
        return leaf(_python(node)) == node
    except (ValueError, TypeError, IndexError):
        return False


def _is_record_type(name: str, fields: tuple[str, ...]) -> bool:
    if len(fields) > _MAX_FIELDS or not all(map(str.isidentifier, (name, *fields))):
        return False
    # Python normalises identifiers, so differently written ones can be the same.
    alike = {unicodedata.normalize("NFKC", field) for field in fields}
    if len(alike) != len(fields) or any(map(keyword.iskeyword, (name, *fields))):
        return False
    # A field may begin with an underscore only where Python renamed it to its index.
    return all(field == f"_{index}" for index, field in enumerate(fields) if field.startswith("_"))


def _malformed(path: str, what: str) -> CorruptError:
    return CorruptError(
        f"The values{f' at {path!r:.200}' if path else ''} {what:.400}.",
        code="corrupt.values",
        action="Use another copy or an older checkpoint.",
        path=path or None,
    )
