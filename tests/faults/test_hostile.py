"""Any bytes, given to any decoder: it refuses them by name or decodes them to a consistent value, in 1 s and 256 MiB.

Digests are always right here, or nothing behind them would ever be reached. Inputs are random bytes, and sound ones
whose trees were changed: huge and negative numbers, wrong types, what stands twice, nesting, paths that lead out.
`tests.faults.attacks.confined` is the process that decodes, and that measures.
"""

from __future__ import annotations

import copy
import random
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.format import manifest as fmt
from holdfast.format import records, sequences
from holdfast.format import values as value_codec
from holdfast.format.sequences import Affine, Block, DifferencePlanes
from tests.faults.attacks.confined import CPU_S, Confined, Verdict
from tests.faults.attacks.victim import NODES
from tests.format.test_manifest import small_manifest
from tests.format.test_records import COMMIT, EPOCH
from tests.peers.test_peer_messages import REPLIES, REQUESTS

KINDS = ("manifest", "values", "entry", "marker", "epoch", "seal", "commit", "sequence", "name", "request", "reply")
#: Inputs are at most so large: a reader's time and memory may grow with the bytes that an attacker really stored.
MAX_NBYTES = 64 << 10
BUDGET = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
LARGE_BUDGET = settings(BUDGET, max_examples=3000)
SECONDS_OF_SWEEP = 60

Tree = Any

MARKER = records.Marker(run_id="0" * 32, format="1", writer="holdfast 1", created=1.5)
SEAL = records.Seal(
    checkpoint_id="0" * 16,
    place=records.Place(1, 2),
    step=3,
    manifest=records.FileSeal("manifest.hfm", 100, "0" * 32),
    files=tuple(records.FileSeal(fmt.file_name(index), 100, "0" * 32) for index in range(3)),
)


def signed(body: bytes) -> bytes:
    """Text as a record with a right digest."""
    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def framed(packed: bytes, blob: bytes) -> bytes:
    """A body as a manifest with a right digest."""
    compressed = zlib.compress(packed)
    digest = xxhash.xxh3_128_digest(compressed + blob)
    return struct.pack("<8sQQQ16s", fmt.MAGIC, len(compressed), len(packed), len(blob), digest) + compressed + blob


def plain(value: object) -> Tree:
    """Encoded and decoded again without a type: lists, dictionaries and numbers."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def seeds() -> dict[str, list[Tree]]:
    """Sound inputs of each kind, as trees."""
    numbers = [Affine((Block(0, (2,), (6,)),)), Affine((Block(0, (2, 2), (4, 1)),)), DifferencePlanes(4, 0, 1, 1)]
    return {
        "manifest": [plain(small_manifest()[0])],
        "values": [plain(sorted(NODES.items())), plain([["a", ["encoded", "x", ["numpy", "<f4", b"1234"]]]])],
        "entry": [plain(sorted(NODES.items())), plain([["a", ["per_rank", 3]], ["a/%rank=1", ["int", b"123456789"]]])],
        "marker": [plain(MARKER)],
        "epoch": [plain(EPOCH)],
        "seal": [plain(SEAL)],
        "commit": [plain(COMMIT)],
        "sequence": [plain([numbers[0], b""]), plain([numbers[1], b""]), plain([numbers[2], b"\0\1\2"])],
        "request": [plain(request) for request in REQUESTS],
        "reply": [plain(reply) for reply in REPLIES],
        "name": ["a/b", "a/%int=3/%float=0x1.8p+1", "%bytes=00ff/%none/%rank=3"],
    }


SEEDS = seeds()
BLOB = b"".join(small_manifest()[1])


def bytes_of(kind: str, tree: Tree) -> bytes:
    """A tree as bytes whose digests are right. Raises `ValueError` and its kin for what no encoder can write."""
    if kind == "manifest":
        return framed(msgspec.msgpack.encode(tree), BLOB)
    if kind in ("values", "sequence", "request", "reply"):
        return msgspec.msgpack.encode(tree)
    if kind == "entry":
        table = msgspec.msgpack.encode(tree)
        return (len(table).to_bytes(8, "little") + table).ljust(-(-len(table) // 512) * 512 + 512, b"\0")
    if kind == "name":
        return str(tree).encode("utf-8", "surrogatepass")
    return signed(msgspec.json.encode(tree).removesuffix(b"}"))


LEAVES: list[Callable[[random.Random], Tree]] = [
    lambda rng: rng.choice([0, 1, -1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**10]),
    lambda rng: rng.choice([float("nan"), float("inf"), -0.0, 1e300, 5e-324, -1.5]),
    lambda rng: rng.choice([None, True, False, [], {}, b"", ""]),
    lambda rng: rng.choice(["../x", "/etc/passwd", "a\0b", "a//b", "..", "%", "%int=07", "%rank=99", "@", "%plane=a"]),
    lambda rng: rng.choice(["\u202ea", "\x1b[2J", "[/]", "\ufb01", "x" * 5000, "%int=" + "9" * 5000, "\U0001f600"]),
    lambda rng: rng.choice(["open", "record", "list", "grid", "flat", "boxes", "a", "p", "stateful", "float32"]),
    lambda rng: [0] * rng.choice([1, 3, 65, 5000]),
    lambda rng: rng.randbytes(rng.choice([1, 8, 3000])),
    lambda rng: nested(rng.choice([3, 100, 900])),
]


def nested(depth: int) -> Tree:
    tree: Tree = 0
    for _ in range(depth):
        tree = [tree]
    return tree


def places(tree: Tree) -> Iterator[tuple[Tree, Any]]:
    """Every container below a tree, with every key or index of it."""
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from places(tree[key])


def mutated(tree: Tree, rng: random.Random) -> Tree:
    """A tree with a few things changed, dropped, repeated or moved."""
    box = [copy.deepcopy(tree)]
    for _ in range(rng.choice([1, 1, 2, 4])):
        holder, key = rng.choice(list(places(box)))
        match rng.randrange(6):
            case 0 | 1:
                holder[key] = rng.choice(LEAVES)(rng)
            case 2 if holder is not box:
                del holder[key]
            case 3 if isinstance(holder, list) and holder is not box:
                holder += holder[: rng.choice([1, 2, 1000])] if len(holder) < 2000 else []
            case 4:
                holder[key] = copy.deepcopy(rng.choice(list(places(box)))[0])
            case _ if isinstance(holder[key], int) and not isinstance(holder[key], bool):
                holder[key] += rng.choice([-1, 1, 2**20])
            case _ if isinstance(holder, list):
                rng.shuffle(holder)
            case _:
                holder[key] = None
    return box[0]


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Bytes with a few of them changed, cut out or repeated."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 3])):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(3):
            case 0:
                out[at : at + 1] = rng.randbytes(1)
            case 1:
                del out[at : at + rng.choice([1, 5])]
            case _:
                out[at:at] = out[at : at + rng.choice([1, 40])]
    return bytes(out)


def hostile(kind: str, seed: int) -> bytes:
    """The hostile input of a seed."""
    rng = random.Random(seed)
    tree = rng.choice(SEEDS[kind])
    try:
        data = bytes_of(kind, mutated(tree, rng))
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        data = bytes_of(kind, tree)  # no encoder can write it: the code below changes bytes
    match rng.randrange(4):
        case 0 if kind in ("marker", "epoch", "seal", "commit"):
            data = signed(flipped(data.rpartition(b',"digest"')[0], rng))
        case 0 if kind == "manifest":
            data = framed(flipped(msgspec.msgpack.encode(tree), rng), BLOB)
        case 0:
            data = flipped(data, rng)
        case _:
            pass
    return data[:MAX_NBYTES] if kind == "name" else data


@pytest.fixture(scope="module")
def confined() -> Iterator[Confined]:
    with Confined() as process:
        yield process


def fault(verdict: Verdict) -> str:
    """The fault of a verdict; "" where it has none."""
    if verdict.outcome not in ("accepted", "refused") or len(verdict.text) >= 1500:
        return f"{verdict.outcome}: {verdict.text}"
    return "" if verdict.cpu_s < CPU_S else f"it took {verdict.cpu_s} s"


def wrapped(kind: str, data: bytes) -> bytes:
    """Random bytes behind right digests."""
    if kind == "manifest":
        return framed(data, b"")
    return signed(data) if kind in ("marker", "epoch", "seal", "commit") else data


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, -1])
def test_sound_inputs_are_accepted(kind: str, index: int, confined: Confined) -> None:
    verdict = confined.judge(kind, bytes_of(kind, SEEDS[kind][index]))
    assert verdict.outcome == "accepted", verdict.text


@pytest.mark.parametrize("kind", KINDS)
@BUDGET
@given(data=st.binary(max_size=300))
def test_random_bytes_are_refused_or_of_one_piece(kind: str, data: bytes, confined: Confined) -> None:
    assert fault(confined.judge(kind, data)) == ""
    assert fault(confined.judge(kind, wrapped(kind, data))) == ""


@pytest.mark.parametrize("kind", KINDS)
@BUDGET
@given(seed=st.integers(0, 2**64))
def test_sound_inputs_with_changes_are_refused_or_of_one_piece(kind: str, seed: int, confined: Confined) -> None:
    assert fault(confined.judge(kind, hostile(kind, seed))) == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_sweep_of_changes_finds_nothing(kind: str, confined: Confined) -> None:
    first, start, count = random.SystemRandom().randrange(2**60), time.monotonic(), 0
    while time.monotonic() - start < SECONDS_OF_SWEEP:
        data = hostile(kind, first + count)
        verdict = confined.judge(kind, data)
        assert verdict.outcome != "leaked", f"seed {first + count}: {verdict.text}"
        assert verdict.cpu_s < CPU_S, f"seed {first + count}: {verdict.cpu_s} s"
        count += 1
    print(f"{kind}: {count} inputs from seed {first}")  # noqa: T201 - the record of the sweep
    assert count > 1000


def manifest_with(**changes: object) -> bytes:
    return framed(msgspec.msgpack.encode(plain(small_manifest()[0]) | changes), BLOB)


#: Small inputs that unfold to as much as readers let them. Each byte counts here, so nothing is random.
BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "equal names": ("manifest", lambda: manifest_with(names=["a"] * 500_000)),
    "shapes that all differ": ("manifest", lambda: manifest_with(shape_table=[[n] for n in range(250_000)])),
    "empty shapes": ("manifest", lambda: manifest_with(shape_table=[[]] * 900_000)),
    "many value blocks": ("manifest", lambda: manifest_with(values=[[0, 8, []]] * 200_000)),
    "many sequences": ("manifest", lambda: manifest_with(sequences=[["a", []]] * 200_000)),
    "many metrics": ("manifest", lambda: manifest_with(metrics={f"{n:x}": 0.0 for n in range(60_000)})),
    "many dtypes": ("manifest", lambda: manifest_with(dtype_table=["float32"] * 100_000)),
    "many partitions": ("manifest", lambda: manifest_with(partition_table=[["grid", [0], 0]] * 90_000)),
    "as many numbers as allowed": (
        "sequence",
        lambda: msgspec.msgpack.encode([Affine((Block(0, (1 << 18,), (1,)),)), b""]),
    ),
    "many axes": ("sequence", lambda: msgspec.msgpack.encode([Affine((Block(0, (1,) * 32, (1,) * 32),) * 4000), b""])),
    "many rows": ("values", lambda: msgspec.msgpack.encode([[f"{n:04}", ["tensor"]] for n in range(4500)])),
    "lists of all rows": (
        "values",
        lambda: msgspec.msgpack.encode([[f"{n:04}", ["list", "list", 2500]] for n in range(2500)]),
    ),
    "ranks that are not there": (
        "values",
        lambda: msgspec.msgpack.encode([[f"{n:03}", ["per_rank", 1 << 20]] for n in range(1000)]),
    ),
    "a NamedTuple of many fields": (
        "values",
        lambda: value_codec.encode(
            {"a": value_codec.RecordNode("P", names := tuple(f"f{n:04}" for n in range(4096)))}
            | {f"a/{name}": value_codec.Plain(0) for name in names}
        ),
    ),
    "a key of a million digits": ("name", lambda: b"%int=" + b"9" * 1_000_000),
    "a name of a million parts": ("name", lambda: b"a/" * 500_000 + b"a"),
    "a seal of many files": (
        "seal",
        lambda: records.encode(
            msgspec.structs.replace(
                SEAL, files=tuple(records.FileSeal(fmt.file_name(n), 1, "0" * 32) for n in range(9000))
            )
        ),
    ),
    "long names of many parts": (
        "values",
        lambda: msgspec.msgpack.encode([["a/" * 126 + f"{n:04}/%none", ["int", b"1"]] for n in range(3700)]),
    ),
    "a folder with a long name": (
        "commit",
        lambda: bytes_of("commit", SEEDS["commit"][0] | {"checkpoint": "9" * 9000}),
    ),
    "a job of many files": ("request", lambda: msgspec.msgpack.encode(["NoteProtected", "0" * 16, [7] * 1_000_000])),
    "nested lists": ("reply", lambda: msgspec.msgpack.encode(["Sent", nested(900)])),
    "digits": ("commit", lambda: signed(b'{"holdfast":"commit","reader_features":[],"x":' + b"9" * 900_000)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_unfolds_as_far_as_it_may_stays_in_budget(name: str, confined: Confined) -> None:
    kind, make = BOMBS[name]
    data = make()
    assert len(data) <= 1 << 20
    assert fault(confined.judge(kind, data)) == ""


def test_the_budget_is_one_that_a_bomb_exceeds(confined: Confined) -> None:
    """The measuring itself: without the limits of the decoders these would pass unnoticed."""
    length = sequences.MAX_LENGTH
    assert 8 * length > 256 << 20
    verdict = confined.judge("sequence", msgspec.msgpack.encode([Affine((Block(0, (length,), (1,)),)), b""]))
    assert verdict.outcome == "refused", verdict.text
