"""The comparison of two checkpoints: any layouts, any dtypes, in bounded memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import compare as module
from holdfast.checkpoint.compare import compare, pairs
from holdfast.checkpoint.elements import ElementDiff
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.format.dtypes import CARRIERS, DTYPES
from holdfast.format.records import Place
from holdfast.plan.layout import TensorLayout, Whole
from holdfast.plan.save import CheckpointIdentity
from holdfast.run.history import Run
from holdfast.testing.memory_store import MemoryStore
from tests.support.command_line import NODES
from tests.support.published import EPOCHS, RUN_ID, begin, plan, publish
from tests.support.worlds import World, specs, worlds


def opened(storage: MemoryStore) -> Checkpoint:
    run = Run.open(storage)
    head = run.head()
    assert head is not None
    return Checkpoint(run.locate(head))


def stored(world: World) -> Checkpoint:
    storage = begin(RUN_ID, *EPOCHS[:1])
    identity = CheckpointIdentity("1" * 16, RUN_ID, Place(1, 1), 1, 1.5, {})
    publish(storage, plan(world.layouts, NODES, identity), world.full, NODES)
    return opened(storage)


@st.composite
def relaid(draw: st.DrawFn, world: World) -> World:
    """The same tensors in another layout, over another number of ranks."""
    world_size = draw(st.integers(1, 4))
    layouts: list[list[TensorLayout]] = [[] for _ in range(world_size)]
    known = {layout.name: layout for held in world.layouts for layout in held}
    for name, layout in known.items():
        for rank, spec in enumerate(draw(specs(world_size, layout.shape))):
            layouts[rank].append(TensorLayout(name, layout.dtype, layout.shape, spec))
    return World(layouts, dict(world.full))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_two_layouts_of_the_same_tensors_are_equal_and_any_other_byte_differs(data: st.DataObject) -> None:
    world = data.draw(worlds(max_ranks=4))
    other = data.draw(relaid(world))
    a = stored(world)
    assert compare(a, stored(other)).equal
    filled = sorted(name for name, elements in world.full.items() if elements.size)
    if filled:
        name = data.draw(st.sampled_from(filled))
        changed = other.full[name].copy()
        changed.reshape(-1)[data.draw(st.integers(0, changed.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
        other.full[name] = changed
        (difference,) = compare(a, stored(other)).tensors
        assert (difference.name, difference.num_differing) == (name, 1)


def test_tensors_larger_than_a_batch_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_NBYTES", 64)
    shape = (3, 5, 7)
    full = np.random.default_rng(0).integers(0, 256, (*shape, 4), np.uint8)
    tensors = {"long": full, "short": full[0, 0]}

    def made(**changed: np.ndarray) -> Checkpoint:
        held = tensors | changed
        layouts = [[TensorLayout(name, "int32", held[name].shape[:-1], Whole("first")) for name in sorted(held)]]
        return stored(World(layouts, held))

    other = full.copy()
    other[2, 4, 6, 0] ^= 1
    other[0, 0, 0, 0] ^= 1
    a = made()
    nbytes: list[int] = []
    found = compare(a, made(long=other), progress=nbytes.append)
    assert [(one.name, one.num_differing, one.max_abs) for one in found.tensors] == [("long", 2, 1)]
    assert sum(nbytes) == sum(pair.nbytes for pair in pairs(a, a)) == 2 * (full.nbytes + full[0, 0].nbytes)
    assert max(nbytes) <= 2 * 64


def carriers(dtype: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    kind = getattr(ml_dtypes, dtype) if dtype.startswith(("bfloat", "float8")) else np.dtype(dtype)
    return values.astype(kind).view(CARRIERS[DTYPES[dtype].itemsize])


@pytest.mark.parametrize(
    "dtype", sorted(name for name in DTYPES if name not in ("bool", "complex32", "float4_e2m1fn_x2", "float8_e8m0fnu"))
)
def test_numbers_of_every_dtype_are_subtracted(dtype: str) -> None:
    tally = ElementDiff(dtype, dtype)
    tally.add(carriers(dtype, np.asarray([1, 8, 4, 0])), carriers(dtype, np.asarray([1, 2, 4, 1])))
    assert (tally.num_differing, tally.max_abs, tally.num_not_finite) == (2, 6, 0)
    assert isinstance(tally.max_abs, int) == ("int" in dtype)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "max_abs"),
    [
        ("bool", [0, 1], [1, 1], 1),
        ("float8_e8m0fnu", [127, 128], [127, 129], 2.0),  # powers of two, biased by 127
        ("float4_e2m1fn_x2", [0x21, 0x7], [0x21, 0x2], 5.0),  # 6 and 1, in the low halves
        ("float4_e2m1fn_x2", [0x70], [0x20], 5.0),
    ],
)
def test_numbers_of_rare_dtypes_are_subtracted(dtype: str, a: list[int], b: list[int], max_abs: float) -> None:
    tally = ElementDiff(dtype, dtype)
    tally.add(np.asarray(a, np.uint8), np.asarray(b, np.uint8))
    assert (tally.num_differing, tally.max_abs) == (1, max_abs)


def test_complex_numbers_differ_by_the_length_of_their_difference() -> None:
    half = ElementDiff("complex32", "complex32")
    halves = np.asarray([[3, 0], [1, 1]], np.float16), np.asarray([[0, 4], [1, 1]], np.float16)
    half.add(*(side.reshape(-1).view(np.int32) for side in halves))
    assert (half.num_differing, half.max_abs) == (1, 5.0)
    full = ElementDiff("complex128", "complex128")
    full.add(np.asarray([3 + 0j, 0.0]), np.asarray([4j, -0.0]))
    assert (full.num_differing, full.max_abs) == (2, 5.0), "-0.0 has other bits"
    full.add(np.asarray([1 + 1j]), np.asarray([1 - 7j]))
    assert (full.num_differing, full.max_abs) == (3, 8.0), "the imaginary part alone"


@pytest.mark.parametrize(
    ("dtype", "a", "b"), [("int64", -(2**63), 2**63 - 1), ("uint64", 2**64 - 1, 0), ("int64", 2**62 + 1, 2**62)]
)
def test_differences_of_integers_are_exact(dtype: str, a: int, b: int) -> None:
    tally = ElementDiff(dtype, dtype)
    tally.add(*(np.asarray([value], dtype).view(np.int64) for value in (a, b)))
    assert tally.max_abs == a - b if a > b else b - a


def test_nans_and_infinities_are_counted_apart() -> None:
    nan, inf = float("nan"), float("inf")
    tally = ElementDiff("float32", "float32")
    sides = ([nan, nan, inf, -inf, 1.0], [nan, 1.0, -inf, -inf, 3.0])
    tally.add(*(np.asarray(side, np.float32).view(np.int32) for side in sides))
    assert (tally.num_differing, tally.num_not_finite, tally.max_abs) == (3, 2, 2.0)
    tally.add(*(np.asarray([value], np.float32).view(np.int32) for value in (nan, 0.0)))
    assert (tally.num_differing, tally.num_not_finite, tally.max_abs) == (4, 3, 2.0)


def test_other_dtypes_are_compared_as_numbers() -> None:
    tally = ElementDiff("float32", "int64")
    tally.add(np.asarray([1.0, 2.5, float("nan")], np.float32).view(np.int32), np.asarray([1, 2, 0]))
    assert (tally.num_differing, tally.num_not_finite, tally.max_abs) == (2, 1, 0.5)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_elements_of_any_bits_are_compared_without_a_warning(dtype: str) -> None:
    # A signaling nan in a complex32 tensor made `holdfast diff` print numpy's warning about an invalid cast.
    itemsize = DTYPES[dtype].itemsize
    one, other = np.random.default_rng(0).integers(0, 256, (2, itemsize << 16), np.uint8).view(CARRIERS[itemsize])
    signaling = np.array([0x7C01, 0x7D00, 0xFC01, 0xFDFF], np.uint16)  # as float16
    one.view(np.uint8)[: signaling.nbytes] = signaling.view(np.uint8)
    diff = ElementDiff(dtype, dtype)
    diff.add(one, other)
    assert 0 < diff.num_differing <= len(one)


def test_huge_differences_are_infinite_and_warn_nobody() -> None:
    tally = ElementDiff("float64", "float64")
    tally.add(*(np.asarray([value]).view(np.int64) for value in (1.7e308, -1.7e308)))
    assert tally.max_abs == float("inf")
