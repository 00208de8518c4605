"""A reader of pickles that cannot execute them: it builds plain data, and knows no classes.

Python's own unpickler calls whatever a pickle names, so a pickle is a program. This machine has the instructions of
the protocols 2 to 5 that build data, and a closed table from the names of globals to functions of ours. A pickle that
names anything else is refused when it names it, before anything is called. Nothing is imported, no attribute is looked
up by a name of the pickle, and no attribute is set.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.format.values import TorchValue

#: Makes the object of a global from the arguments of its call.
Make = Callable[[tuple[Any, ...]], object]
#: The meanings of globals, by ``module name``: a function that makes an object, or a constant.
Globals = Mapping[str, Make | object]

_MARK: Final = object()
#: Types that may be keys of dicts. (Python hashes nested tuples by recursion without a limit.)
_KEYS: Final = (str, int, float, bytes, type(None))
_SIZED: Final = (str, bytes, tuple, list, dict)
_UINT16, _INT32, _UINT32, _UINT64 = (struct.Struct(code) for code in ("<H", "<i", "<I", "<Q"))
_DOUBLE: Final = struct.Struct(">d")
#: Most keys of a dict that are larger numbers than `_LARGE_KEY`: Python hashes them modulo 2**61 - 1, so many of them
#: can be chosen to have one hash, and each such key costs a comparison with all the others.
_MAX_LARGE_KEYS: Final = 1024
#: Most dtypes in a key.
_MAX_DTYPES: Final = 4
_LARGE_KEY: Final = 1 << 48
#: The arguments of calls have at most so many items and characters for each byte of the pickle, and so many besides. A
#: pickle can call a function many times with one large argument.
_ARGUMENTS_PER_BYTE: Final = 4
_MOST_ARGUMENTS: Final = 1 << 20


class PickleError(ValueError):
    """A pickle is malformed, or more than data."""


class ForbiddenGlobalError(PickleError):
    """A pickle names a global that is not in the table."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it names the global {name!r:.200}, which is not data")
        self.name = name


class UnreadTensorError(PickleError):
    """A tensor is sound, and its elements are other ones, or lie in another order, than holdfast reads."""


class PickledObject:
    """An object of a class that the pickle names: the name, the arguments it was made with, and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: object = None

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes of an instance without slots. Raises `PickleError` where it has none."""
        if not isinstance(self.state, dict):
            raise PickleError(f"{self.name.rpartition(' ')[2]!r} has no fields")
        return self.state


class UnknownObject(PickledObject):
    """An object of a class that is not in the table, where a reader lets such objects stand: see `unpickled`."""

    __slots__ = ()


def pickled_objects(*names: str) -> dict[str, Make]:
    """The entries of a table for globals whose objects become a `PickledObject`."""
    return {name: _recording(name) for name in names}


def _recording(name: str) -> Make:
    return lambda args: PickledObject(name, args)


def is_large_key(key: object) -> bool:
    """Whether a key of a dict is a number so large that others can be chosen to have the same hash."""
    return isinstance(key, (int, float)) and not -_LARGE_KEY < key < _LARGE_KEY


class Callee:
    """A global that stands for a function. A pickle that calls it gets what `make` makes."""

    __slots__ = ("make",)

    def __init__(self, make: Make) -> None:
        self.make = make


class UnknownGlobal(Callee):
    """A global that is not in the table. A call of it makes an `UnknownObject`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__(lambda args: UnknownObject(name, args))
        self.name = name


def unpickled(
    data: bytes,
    known: Globals,
    *,
    persistent: Callable[[object], object] | None = None,
    keep_unknown: bool = False,
) -> object:
    """The object in `data`. `persistent` gives the objects that are stored beside the pickle, by their ids.

    With `keep_unknown`, a global that is not `known` is an `UnknownGlobal`, and an object that it makes is an
    `UnknownObject`, which has a name and does nothing. The caller must refuse them where it uses a value.

    Raises `PickleError` for bytes that are no pickle, and `ForbiddenGlobalError` for a global that is not `known`.
    Time and memory are linear in the size of `data`.
    """
    machine = _Machine(data, known, persistent, keep_unknown=keep_unknown)
    try:
        return machine.run()
    except PickleError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
        raise PickleError(f"it is malformed at byte {machine.at} ({error!s:.200})") from error


def _is_of_dtypes(key: object) -> bool:
    """Whether a key is a tuple of dtypes, as Megatron's optimizers have."""
    return type(key) is tuple and len(key) <= _MAX_DTYPES and all(isinstance(each, TorchValue) for each in key)


class _Machine:
    """One reading of a pickle."""

    def __init__(
        self, data: bytes, known: Globals, persistent: Callable[[object], object] | None, *, keep_unknown: bool
    ) -> None:
        self._data = data
        self._known = known
        self._persistent = persistent
        self._keep_unknown = keep_unknown
        self.at = 0
        self._stack: list[Any] = []
        #: The stacks below the open marks.
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._num_large_keys = 0
        self._arguments_left = _MOST_ARGUMENTS + _ARGUMENTS_PER_BYTE * len(data)

    def run(self) -> object:
        """Read up to the end of the pickle."""
        data, steps = self._data, _STEPS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                break
            step = steps.get(code)
            if step is None:
                raise PickleError(f"it has the instruction {code:#04x} at byte {self.at - 1}, which builds no data")
            step(self)
        if self._below or len(self._stack) != 1:
            raise PickleError("it ends in the middle of an object")
        return self._stack.pop()

    # --- reading ---

    def _take(self, nbytes: int) -> bytes:
        end = self.at + nbytes
        if end > len(self._data):
            raise PickleError(f"it is cut off at byte {self.at}")
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _line(self) -> str:
        end = self._data.index(b"\n", self.at)
        line = self._data[self.at : end]
        self.at = end + 1
        return line.decode("utf-8")

    def _marked(self) -> list[Any]:
        """The items above the last mark, which is taken away."""
        items = self._stack
        self._stack = self._below.pop()
        return items

    # --- instructions ---

    def push(self, item: object) -> None:
        self._stack.append(item)

    def proto(self) -> None:
        if (version := self._take(1)[0]) > 5:
            raise PickleError(f"it has the unknown protocol {version}")

    def frame(self) -> None:
        self._take(8)

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._marked()

    def pop_mark(self) -> None:
        self._marked()

    def dup(self) -> None:
        self.push(self._stack[-1])

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, form: struct.Struct) -> None:
        self._memo[self._number(form)] = self._stack[-1]

    def get(self, form: struct.Struct) -> None:
        self.push(self._memo[self._number(form)])

    def text(self, form: struct.Struct) -> None:
        self.push(self._take(self._number(form)).decode("utf-8", "surrogatepass"))

    def bytes_(self, form: struct.Struct) -> None:
        self.push(self._take(self._number(form)))

    def number(self, form: struct.Struct) -> None:
        self.push(self._number(form))

    def long(self, form: struct.Struct) -> None:
        self.push(int.from_bytes(self._take(self._number(form)), "little", signed=True))

    def tuple_(self) -> None:
        self.push(tuple(self._marked()))

    def tuple_of(self, size: int) -> None:
        items = [self._stack.pop() for _ in range(size)]
        self.push(tuple(reversed(items)))

    def append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def appends(self) -> None:
        self._extend(self._marked())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, UnknownObject):
            return
        if type(target) is not list:
            raise PickleError("it appends to something else than a list")
        target.extend(items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self._marked())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, UnknownObject):
            return
        if not isinstance(target, dict):
            raise PickleError("it sets items of something else than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (*_KEYS, PickledObject)) and not _is_of_dtypes(key):
                raise PickleError(f"it has a key of type {type(key).__name__}")
            if is_large_key(key):
                self._num_large_keys += 1
                if self._num_large_keys > _MAX_LARGE_KEYS:
                    raise PickleError("it has too many large numbers as keys")
            target[key] = value

    def global_line(self) -> None:
        module = self._line()
        self._name(module, self._line())

    def global_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise PickleError("a global has no name")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        full = f"{module} {name}"
        if full not in self._known:
            if not self._keep_unknown:
                raise ForbiddenGlobalError(f"{module}.{name}")
            self.push(UnknownGlobal(f"{module}.{name}"))
            return
        found = self._known[full]
        self.push(Callee(found) if callable(found) else found)

    def call(self) -> None:
        args, named = self._stack.pop(), self._stack.pop()
        if not isinstance(named, Callee) or type(args) is not tuple:
            raise PickleError("it calls something that is no global")
        self._arguments_left -= sum(len(arg) for arg in args if isinstance(arg, _SIZED))
        if self._arguments_left < 0:
            raise PickleError("it calls functions with one argument too often")
        self.push(named.make(args))

    def build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, PickledObject) and target.state is None:
            target.state = state
        elif not (type(target) is OrderedDict and _is_versions(state)):
            raise PickleError("it sets attributes of something that has none")

    def persistent(self) -> None:
        if self._persistent is None:
            raise PickleError("it refers to objects that are stored elsewhere")
        self.push(self._persistent(self._stack.pop()))


def _is_versions(state: object) -> bool:
    """Whether these are the attributes that torch gives to the dict of a module's state: versions of its layout."""
    return not state or (isinstance(state, dict) and state.keys() == {"_metadata"})


_STOP: Final = ord(".")
_BYTE: Final = struct.Struct("B")
_Step = Callable[[_Machine], None]
_STEPS: Final[Mapping[int, _Step]] = {
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("0"): _Machine.pop,
    ord("1"): _Machine.pop_mark,
    ord("2"): _Machine.dup,
    0x94: _Machine.memoize,
    ord("q"): lambda m: m.put(_BYTE),
    ord("r"): lambda m: m.put(_UINT32),
    ord("h"): lambda m: m.get(_BYTE),
    ord("j"): lambda m: m.get(_UINT32),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.number(_BYTE),
    ord("M"): lambda m: m.number(_UINT16),
    ord("J"): lambda m: m.number(_INT32),
    0x8A: lambda m: m.long(_BYTE),
    0x8B: lambda m: m.long(_UINT32),
    ord("G"): lambda m: m.number(_DOUBLE),
    ord("X"): lambda m: m.text(_UINT32),
    0x8C: lambda m: m.text(_BYTE),
    0x8D: lambda m: m.text(_UINT64),
    ord("B"): lambda m: m.bytes_(_UINT32),
    ord("C"): lambda m: m.bytes_(_BYTE),
    0x8E: lambda m: m.bytes_(_UINT64),
    ord(")"): lambda m: m.push(()),
    ord("t"): _Machine.tuple_,
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("]"): lambda m: m.push([]),
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("}"): lambda m: m.push({}),
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    ord("c"): _Machine.global_line,
    0x93: _Machine.global_on_stack,
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
}
