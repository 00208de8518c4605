"""Pickles are read as data: what they hold comes out, and what they would do is refused before anything is done."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.interop.pickle_machine import ForbiddenGlobalError, PickledObject, PickleError, unpickled
from holdfast.interop.torch_globals import ARCHIVE_GLOBALS, PLAIN_GLOBALS

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(plain, st.integers(2, 5))
def test_plain_values_come_out_as_they_went_in(value: object, protocol: int) -> None:
    assert unpickled(pickle.dumps(value, protocol), ARCHIVE_GLOBALS) == value


def test_objects_that_a_pickle_holds_twice_are_one_object() -> None:
    shared = ["x"]
    both: Any = unpickled(pickle.dumps((shared, shared)), {})
    assert both[0] is both[1]


def test_globals_become_what_the_table_says() -> None:
    state = OrderedDict(a=torch.Size([2, 3]), b=torch.float16, c=torch.device("cuda", 1))
    found: Any = unpickled(pickle.dumps(state), PLAIN_GLOBALS)
    assert type(found) is OrderedDict
    assert tuple(found["a"]) == (2, 3)
    assert [found["b"].text, found["c"].text] == ["float16", "cuda:1"]


class Runs:
    """An object whose pickle calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def raw(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


#: Each tries to make a file named ``hit``, by another way into the interpreter.
ATTACKS: dict[str, Callable[[str], tuple[bytes, str]]] = {
    "system": lambda hit: (pickle.dumps(Runs(os.system, f"touch {hit}")), "posix.system"),
    "eval": lambda hit: (pickle.dumps(Runs(eval, f"open({hit!r}, 'w')")), "builtins.eval"),
    "exec": lambda hit: (pickle.dumps(Runs(exec, f"open({hit!r}, 'w')")), "builtins.exec"),
    "open": lambda hit: (pickle.dumps(Runs(io.open, hit, "w")), "io.open"),
    "an old protocol": lambda hit: (pickle.dumps(Runs(os.system, f"touch {hit}"), 0), "posix.system"),
    "getattr": lambda hit: (pickle.dumps(Runs(getattr, "x", "upper")), "builtins.getattr"),
    "import": lambda hit: (pickle.dumps(Runs(__import__, "antigravity")), "builtins.__import__"),
    "a dotted name": lambda hit: (raw(text("torch"), text("Size.__init__"), b"\x93"), "torch.Size.__init__"),
    "a class of the library": lambda hit: (
        raw(text("holdfast.interop.pickle_machine"), text("PickledObject"), b"\x93"),
        "holdfast.interop.pickle_machine.PickledObject",
    ),
    "torch.load in a pickle": lambda hit: (
        raw(text("torch.storage"), text("_load_from_bytes"), b"\x93", b"C\x01x", b"\x85R"),
        "torch.storage._load_from_bytes",
    ),
    "an old instance": lambda hit: (b"(S'touch'\nios\nsystem\n.", "instruction"),
    "an extension": lambda hit: (raw(b"\x82\x01"), "instruction"),
    "a call of an instance": lambda hit: (raw(text("x"), b")R"), "calls something that is no global"),
    "a call of a constant": lambda hit: (raw(text("torch"), text("float32"), b"\x93)R"), "calls something"),
    "attributes of a global": lambda hit: (
        raw(text("torch"), text("Size"), b"\x93", b"}", text("__call__"), b"Nsb"),
        "sets attributes",
    ),
    "attributes by slots": lambda hit: (
        raw(b"ccollections\nOrderedDict\n)R", b"N}", text("items"), b"Ns\x86b"),
        "sets attributes",
    ),
    "an append to a dict": lambda hit: (raw(b"}K\x01a"), "appends to something else"),
    "a huge memo": lambda hit: (raw(b"N", b"r\xff\xff\xff\xff"), ""),
    "a text without end": lambda hit: (raw(b"\x8d" + b"\xff" * 8), "cut off"),
    "a key of nested tuples": lambda hit: (raw(b")" + b"\x85" * 100_000, b"}", b"2", b"Ns"), ""),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_by_name_and_does_nothing(tmp_path: Path, attack: str) -> None:
    hit = tmp_path / "hit"
    data, said = ATTACKS[attack](str(hit))
    loaded = set(sys.modules)
    with suppress(PickleError) if not said else pytest.raises(PickleError, match=said):
        unpickled(data, ARCHIVE_GLOBALS)
    assert not hit.exists()
    assert "antigravity" not in set(sys.modules) - loaded


@pytest.mark.parametrize("attack", ["system", "eval", "an old protocol", "a dotted name"])
@pytest.mark.parametrize("where", ["the metadata", "a value"])
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_an_attack_in_a_folder_is_refused_with_the_global_that_it_names(
    tmp_path: Path, attack: str, where: str
) -> None:
    hit, folder = tmp_path / "hit", tmp_path / "dcp"
    data, said = ATTACKS[attack](str(hit))
    dcp.save({"w": torch.ones(2), "value": "x" * 4096}, checkpoint_id=str(folder), no_dist=True)
    if where == "the metadata":
        (folder / ".metadata").write_bytes(data)
    else:
        file = folder / "__0_0.distcp"
        stored = file.read_bytes()
        pickled = stored[stored.index(b"\x80\x02X\x00\x10\x00\x00") :][: 2 + 5 + 4096 + len(b"q\x00.")]
        replaced = data.ljust(len(pickled), b"\0")
        checksum, other = (crc32(each).to_bytes(4, "little") for each in (pickled, replaced))
        assert checksum in stored
        file.write_bytes(stored.replace(pickled, replaced).replace(checksum, other))
    with pytest.raises(holdfast.IncompatibleError) as caught:
        holdfast.load(folder, {"w": torch.zeros(2), "value": ""})
    assert caught.value.code == "incompatible.foreign"
    assert repr(said) in str(caught.value)
    assert not hit.exists()


def test_a_pickle_that_doubles_itself_costs_no_time_or_memory() -> None:
    lines = b"".join(b"2\x86" for _ in range(64))
    start = time.monotonic()
    unpickled(raw(b")", lines), {})
    assert time.monotonic() - start < 10


def outcome(data: bytes) -> str:
    """The outcome of reading these bytes as a pickle of an archive."""
    try:
        unpickled(data, ARCHIVE_GLOBALS, persistent=lambda identity: PickledObject("storage", (identity,)))
    except PickleError:
        return "malformed"
    return "read"


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_as_malformed(data: bytes) -> None:
    assert outcome(data) in ("read", "malformed")
    assert outcome(b"\x80\x04" + data + b".") in ("read", "malformed")


@given(st.data())
def test_a_changed_pickle_of_a_tensor_is_read_or_refused(data: st.DataObject) -> None:
    file = io.BytesIO()
    torch.save(torch.zeros(2, 3), file)
    start = file.getvalue().index(b"\x80\x02")
    changed = bytearray(file.getvalue()[start : start + 154])
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    assert outcome(bytes(changed)) in ("read", "malformed")


def test_a_forbidden_global_is_named_and_every_instruction_of_a_data_pickle_is_known() -> None:
    with pytest.raises(ForbiddenGlobalError) as caught:
        unpickled(pickle.dumps(Runs(os.system, "true")), {})
    assert caught.value.name == "posix.system"
    value = [
        1,
        300,
        70_000,
        -1,
        1 << 70,
        1 << 3000,
        1.5,
        "a",
        "b" * 300,
        b"c",
        b"d" * 300,
        (),
        (1,),
        (1, 2, 3, 4),
        {1: {}},
    ]
    codes = {op.code for protocol in range(2, 6) for op, _, _ in pickletools.genops(pickle.dumps(value, protocol))}
    assert len(codes) > 25
    assert all(unpickled(pickle.dumps(value, protocol), ARCHIVE_GLOBALS) == value for protocol in range(2, 6))
