"""Values: the part of a state that is not tensors, as a flat table ``{path: node}``. No torch, no pickle.

A node is a leaf (a value), a reference to the tensor of the same name, or a container that says which components
lie below its path. Types are exact: a subclass would come back as something else, so it is not a value. Values that
only torch can build (`TorchValue`) stay plain records here; ``holdfast.state`` turns them into torch's objects.

`Open` containers list nothing, so the tables of several ranks can be united: what is below is what the table holds.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, TypeGuard

import msgspec
import numpy as np

from holdfast.decoding import decode_msgpack
from holdfast.errors import CorruptError, NotFoundError, StateError
from holdfast.format.names import (
    check_components,
    component,
    is_rank_component,
    join,
    parse_component,
    plane_component,
    rank_component,
)
from holdfast.format.near import near
from holdfast.wording import count

#: Bounds on what is encoded and decoded: components of a path, bytes of an encoded table, ranks.
MAX_DEPTH = 128
MAX_NBYTES = 1 << 30
MAX_WORLD_SIZE = 1 << 20
#: Fields of a NamedTuple; making the type takes time for each.
_MAX_FIELDS = 4096

# Numpy scalars that their dtype string describes in full: numbers and times. Records and objects are not among them.
# Extended floats are not written: they differ between machines, and their padding differs between two saves.
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
    """A string in UTF-8; lone surrogates (undecodable file names) are kept, as Python's ``surrogatepass`` does."""

    data: bytes


class Blob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="bytes"):
    """Bytes."""

    data: bytes


class NumpyScalar(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="numpy"):
    """A numpy scalar: its dtype string and its memory. Strings: ``U`` and UTF-8, byte strings: ``S``."""

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
    """A list or tuple; what is below is named ``0`` to ``size - 1``."""

    kind: Literal["list", "tuple"]
    size: int


class RecordNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="record"):
    """A NamedTuple of type `name`; what is below is named by `fields`."""

    name: str
    fields: tuple[str, ...]


class Open(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="open"):
    """A dictionary, module or optimizer that holds whatever the table and the tensors' names hold below it."""

    kind: Literal["dict", "module", "optimizer"]


class PlanesNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="planes"):
    """A tensor of a kind that the user registered as `name`, stored as `planes`: plain tensors named below its path."""

    name: str
    planes: tuple[str, ...]


class PerRankNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="per_rank"):
    """What each of `world_size` ranks holds for itself alone; rank 0's part lies below ``%rank=0``, and so on."""

    world_size: int


Leaf = Plain | BigInt | Complex | Text | Blob | NumpyScalar | TorchValue
Container = TableNode | Items | RecordNode


class Encoded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="encoded"):
    """A value of a type that the user registered as `name`; `state` is the node of what it was encoded to."""

    name: str
    state: Leaf | TensorRef | Container


class Stateful(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="stateful"):
    """What an object's ``state_dict()`` gave; `state` is the node of that value."""

    state: Leaf | TensorRef | PlanesNode | Container | Encoded


Bare = Leaf | TensorRef | PlanesNode | PerRankNode | Container | Open
Node = Bare | Encoded | Stateful


class Undecoded(NamedTuple):
    """A value or tensor of a registered type as it is stored, where nobody decodes it: the name of the registration,
    and the plain value, or the planes by name.
    """

    name: str
    value: object


def leaf(value: object) -> Leaf | None:
    """`value` as a leaf, or None when it is no torch-free value."""
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
    """`value` as a container with its children by component, or None when it is none. `path` is for messages."""
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
    """What NamedTuples share; no common type says so."""

    _fields: tuple[str, ...]

    def __iter__(self) -> Iterator[object]: ...


def is_record(value: object) -> TypeGuard[NamedTupleLike]:
    """Whether `value` is a NamedTuple."""
    return isinstance(value, tuple) and type(value) is not tuple and hasattr(type(value), "_fields")


@lru_cache(maxsize=256)
def record_type(name: str, fields: tuple[str, ...]) -> Callable[..., object]:
    """A NamedTuple type for a `RecordNode` of which no live type is known; the same for the same arguments."""
    # namedtuple() compiles its arguments; `decode` let only identifiers through. Fields that a live type got from
    # ``rename=True`` ("_1") are accepted only with the same flag.
    return namedtuple(name, fields, rename=True)  # noqa: PYI024


def encode(nodes: Mapping[str, Node]) -> bytes:
    """The table as bytes, the same for equal tables. Raises `StateError` when it is over `MAX_NBYTES`."""
    data = msgspec.msgpack.encode(sorted(nodes.items()))
    if len(data) > MAX_NBYTES:
        raise StateError(
            f"The values of the state take {count(len(data), 'byte')}; the limit is {MAX_NBYTES}.",
            code="state.values_size",
            action="Keep bulk data in tensors.",
        )
    return data


def decode(data: bytes) -> dict[str, Node]:
    """The table that `encode` gave. Raises `CorruptError`, code ``corrupt.values``, for anything else."""
    if len(data) > MAX_NBYTES:
        raise _malformed("", f"take {count(len(data), 'byte')}, over the limit of {MAX_NBYTES}")
    try:
        rows = decode_msgpack(data, list[_TableRow])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _malformed("", f"cannot be decoded ({error})") from error
    nodes = {row.path: row.node for row in rows}
    if any(path >= following for path, following in pairwise(row.path for row in rows)):
        raise _malformed("", "are not sorted by path")
    for path, node in nodes.items():
        if path.count("/") >= MAX_DEPTH:
            raise _malformed(path, f"are nested deeper than {MAX_DEPTH}")
        check_components(path)
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
    """The name of the registration that is needed to decode this very node; None for most."""
    state = node.state if isinstance(node, Stateful) else node
    return state.name if isinstance(state, (Encoded, PlanesNode)) else None


def tensors(nodes: Mapping[str, Node]) -> Iterator[str]:
    """The names of all tensors that the nodes of a table stand for."""
    for path, node in nodes.items():
        if type(node) is TensorRef:
            yield path
        elif isinstance(node, PlanesNode | Encoded | Stateful):
            yield from tensors_at(path, node)


def parts(nodes: Mapping[str, Node]) -> Iterator[str]:
    """The paths of the ranks' own parts, which may be in the tables of other files."""
    for path, node in nodes.items():
        if isinstance(node, PerRankNode):
            for rank in range(node.world_size):
                yield join(path, rank_component(rank))


def tensors_at(path: str, node: Node) -> list[str]:
    """The names of the tensors that the very node at `path` stands for; none for most."""
    state = bare(node)
    if isinstance(state, PlanesNode):
        return [join(path, plane_component(plane)) for plane in state.planes]
    return [path] if isinstance(state, TensorRef) else []


def children(node: Node) -> Iterator[str]:
    """The components that lie below a node; none for leaves, tensors, and for `Open`, which lists nothing."""
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
    """The nodes at and below `path`, not descending into `Open` containers."""
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


def rebuild(
    nodes: Mapping[str, Node],
    path: str,
    tensors: Callable[[str], object],
    *,
    revive: Callable[[TorchValue], object] = lambda value: value,
    record: Callable[[str, tuple[str, ...]], Callable[..., object]] = record_type,
    decode: Callable[[str, object], object] = Undecoded,
) -> object:
    """The Python object at `path`; what belongs to each rank alone is a list of all ranks' parts.

    `tensors` gives the tensor of a name, `revive` the object of a torch value (default: the record itself), `record`
    the constructor of a NamedTuple, `decode` the object of a registration's name and what was stored for it. Raises
    `NotFoundError` where there is no value: also for modules and optimizers, which are tensors under names of their
    own.
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
            f"{path!r} is a whole {node.kind}, not a value.",
            code="not_found.value",
            action="Ask for the tensors and values below it by their names.",
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
    """An entry of an encoded table."""

    path: str
    node: Node


#: Nodes of which the schema lets nothing through that `encode` never gives.
_ALWAYS_SOUND = frozenset((Plain, Complex, Blob, TorchValue, TensorRef, Open))


def _check(path: str, node: Node, nodes: Mapping[str, Node]) -> None:
    """Refuse what the schema lets through and `encode` never gives."""
    below = bare(node)
    if isinstance(below, PerRankNode):
        if not 0 < below.world_size <= MAX_WORLD_SIZE:
            raise _malformed(path, "belong to an impossible number of ranks")
        return  # the parts are in the tables of their ranks
    if isinstance(below, PlanesNode) and (not below.planes or len(set(below.planes)) != len(below.planes)):
        raise _malformed(path, "miss or repeat the planes of a tensor")
    if isinstance(below, Items) and not 0 <= below.size <= len(nodes):
        raise _malformed(path, "miss entries of a list")
    if isinstance(below, RecordNode) and not _is_record_type(below.name, below.fields):
        raise _malformed(path, "hold a NamedTuple whose names are no identifiers, or alike")
    listed = list(children(below))
    if any(map(is_rank_component, listed)):
        raise _malformed(path, "hold entries under reserved names")
    if len(set(listed)) != len(listed) or not all(join(path, name) in nodes for name in listed):
        raise _malformed(path, "miss or repeat entries of a container")
    if isinstance(below, Text | BigInt | NumpyScalar) and not _is_sound(below):
        raise _malformed(path, "hold a malformed string, integer or numpy scalar")


def _is_sound(node: Text | BigInt | NumpyScalar) -> bool:
    try:
        if isinstance(node, NumpyScalar) and node.dtype not in ("U", "S"):
            # Other byte orders, and other texts of one dtype (``<i1``), are sound, though `leaf` does not give them.
            return _NUMPY_DTYPE.fullmatch(node.dtype) is not None and np.dtype(node.dtype).itemsize == len(node.data)
        return leaf(_python(node)) == node
    except (ValueError, TypeError, IndexError):
        return False


def _is_record_type(name: str, fields: tuple[str, ...]) -> bool:
    if len(fields) > _MAX_FIELDS or not all(map(str.isidentifier, (name, *fields))):
        return False
    # Python takes identifiers that are written differently for the same one.
    alike = {unicodedata.normalize("NFKC", field) for field in fields}
    if len(alike) != len(fields) or any(map(keyword.iskeyword, (name, *fields))):
        return False
    # A field that begins with an underscore is one that Python has renamed by its index.
    return all(field == f"_{index}" for index, field in enumerate(fields) if field.startswith("_"))


def _malformed(path: str, what: str) -> CorruptError:
    return CorruptError(
        f"The values{f' at {path!r:.200}' if path else ''} {what:.400}.",
        code="corrupt.values",
        action="Use another copy or an older checkpoint.",
        path=path or None,
    )
