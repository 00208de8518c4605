"""The examples in docs/SPEC.md are true: its dumps are those of fresh checkpoints, its rule for floats the library's.

``python -m tests.format.test_spec_examples`` writes the dumps of docs/SPEC.md anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, ROUND_UP, Context, Decimal
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import holdfast
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import Commit, Diverged, Place, SealDigest
from holdfast.format.values import Node, Open, Plain
from holdfast.plan.layout import Mesh, Placed, Shard, TensorLayout, Whole
from holdfast.plan.save import CheckpointIdentity
from tests.support import independent_reader
from tests.support.published import EPOCHS, RUN_ID, begin, plan, publish, put, run_alone

SPEC = Path(__file__).parents[2] / "docs" / "SPEC.md"


def example_files(stored: Mapping[str, bytes]) -> dict[str, bytes]:
    """All files of the run in the appendices; made from the manifests in `stored`, where they are the planned ones.

    The bytes of a zlib stream may differ between versions of zlib, and all else is a function of them.
    """
    storage = begin(RUN_ID, *EPOCHS)
    halves = Placed(Mesh((2,), (0, 1)), (Shard(0),))
    numbers = np.arange(10, dtype=np.float32)
    first = TensorLayout("model/weight", "float32", (2, 3), Whole("compare"))
    second = TensorLayout("model/weight", "bfloat16", (5, 2), halves)
    cases = [
        (
            CheckpointIdentity("0123456789abcdef", RUN_ID, Place(1, 1), 7, 1700000001.5, {"loss": 0.25}),
            [[first]],
            numbers[:6].view(np.uint8).reshape(2, 3, 4),
            3,
        ),
        (
            CheckpointIdentity("fedcba9876543210", RUN_ID, Place(2, 1), 8, 1700003601.0, {}),
            [[second], [second]],
            numbers.view(np.uint8).reshape(5, 2, 4)[:, :, 2:],
            4,
        ),
    ]
    for identity, layouts, full, progress in cases:
        nodes: dict[str, Node] = {"": Open("dict"), "model": Open("module"), "progress": Plain(progress)}
        planned = plan(layouts, nodes, identity)
        folder = records.folder_name(identity.step, identity.checkpoint_id)
        known = stored.get(records.checkpoint_key(folder, fmt.NAME), planned)
        publish(storage, known if alike(known, planned) else planned, {"model/weight": full}, nodes)
    return storage.objects


def alike(a: bytes, b: bytes) -> bool:
    """Whether two manifests differ at most in how their bodies are compressed."""
    first, second = fmt.decode(a, path="a"), fmt.decode(b, path="b")
    sequences = range(len(second.body.sequences))
    return first.body == second.body and all(
        np.array_equal(first.sequence(index), second.sequence(index)) for index in sequences
    )


MARK = re.compile(r"<!-- (example|body) (\S+) -->\n(?:```text\n(.*?)\n```\n)?", re.DOTALL)


def render(spec: str, files: Mapping[str, bytes]) -> str:
    """The specification with all dumps made from `files`."""

    def block(match: re.Match[str]) -> str:
        kind, key = match[1], match[2]
        text = show_body(files[key]) if kind == "body" else show(key, files[key])
        return f"<!-- {kind} {key} -->\n```text\n{text}\n```\n"

    return MARK.sub(block, spec)


def show(key: str, data: bytes) -> str:
    head = f"# {key}, {len(data)} bytes\n"
    if key.endswith(".json"):
        return head + data.decode("ascii").removesuffix("\n")
    return head + dump(data, manifest_parts(data) if key.endswith(fmt.NAME) else data_parts(data))


def manifest_parts(data: bytes) -> dict[int, str]:
    compressed, packed, blob = (int.from_bytes(data[at : at + 8], "little") for at in (8, 16, 24))
    names = {0: "magic", 8: f"compressed_nbytes = {compressed}", 16: f"packed_nbytes = {packed}"}
    names |= {24: f"blob_nbytes = {blob}", 32: "xxh3-128 of all that follows", 48: "body: a zlib stream"}
    return names | ({48 + compressed: "blob"} if blob else {})


def data_parts(data: bytes) -> dict[int, str]:
    room = int.from_bytes(data[:8], "little")
    described = json.loads(data[8 : 8 + room])
    table = described.pop("__metadata__")["blocks"]
    parts = {0: f"header length = {room}", 8: "header", 35: "digest table", 35 + len(table): "header, continued"}
    for name, entry in described.items():
        start, stop = entry["data_offsets"]
        parts[8 + room + start] = f"{name}: bytes {start} to {stop} of the data section, {entry['dtype']}"
    at = 8 + room + described.get("@values", entry)["data_offsets"][0]
    if "@values" in described:
        length = int.from_bytes(data[at : at + 8], "little")
        parts |= {at + 8: f"length = {length}: the table of values", at + 8 + length: "room for values to grow"}
    return parts


def dump(data: bytes, parts: Mapping[int, str]) -> str:
    lines = []
    for start, stop in pairwise([*sorted(parts), len(data)]):
        lines.append(f"# {parts[start]}")
        previous = b""
        for at in range(start, stop, 16):
            row = data[at : min(at + 16, stop)]
            if row != previous:
                text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
                lines.append(f"{at:08x}  {row.hex(' '):<47}  |{text}|")
            elif lines[-1] != "*":
                lines.append("*")
            previous = row
    return "\n".join([*lines, f"{len(data):08x}"])


def undump(text: str) -> bytes:
    """The file that `show` showed, from its text alone."""
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    if lines[0].startswith("{"):
        return lines[0].encode("ascii") + b"\n"
    data, row = b"", b""
    for line in lines:
        if line != "*":
            offset = int(line[:8], 16)
            data += row * ((offset - len(data)) // len(row)) if row else b""
            row = bytes.fromhex(line[10:57])
            assert len(data) == offset
            data += row
    return data


def show_body(data: bytes) -> str:
    members = json.loads(msgspec.json.encode(fmt.decode(data, path="manifest").body))
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in members.items()) + "\n}"


def dumped_files() -> dict[str, bytes]:
    """The files in the specification."""
    return {key: undump(text) for kind, key, text in MARK.findall(SPEC.read_text()) if kind == "example"}


def test_the_dumps_in_the_specification_are_those_of_fresh_checkpoints() -> None:
    files = example_files(dumped_files())
    assert files == dumped_files()
    assert render(SPEC.read_text(), files) == SPEC.read_text()


def test_the_run_in_the_specification_can_be_typed_in_and_read(tmp_path: Path) -> None:
    run = put(dumped_files(), tmp_path / "run")
    done = run_alone(run)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["place"] == [2, 1]
    view = holdfast.open(run)
    assert torch.equal(view["model/weight"][...], torch.arange(10, dtype=torch.bfloat16).view(5, 2))
    assert view.value("progress") == 4
    first = independent_reader.read(run / "checkpoints" / "step-0000000007-0123456789abcdef")
    assert first.tensors["model/weight"][1].tobytes() == np.arange(6, dtype="<f4").tobytes()
    assert first.values["progress"] == ["plain", 3]


# Canonical text: the specification's rule for floats is the library's.


def ryu_text(value: float) -> str:
    """Section 4, word for word."""
    sign = "-" if str(value).startswith("-") else ""
    if not value:
        return f"{sign}0.0"
    shortest = shortest_decimal(Decimal(abs(value)))
    digits = "".join(map(str, shortest.as_tuple().digits)).rstrip("0")
    point = shortest.adjusted() + 1
    if -5 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if 0 < point <= 16:
        return f"{sign}{digits[:point].ljust(point, '0')}.{digits[point:] or '0'}"
    return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{point - 1}"


def shortest_decimal(exact: Decimal) -> Decimal:
    """The decimal of the fewest digits that is the same float; of several the nearest, of two as near the even one."""
    for precision in range(1, 18):
        roundings = (ROUND_HALF_EVEN, ROUND_DOWN, ROUND_UP)
        candidates = [Context(prec=precision, rounding=rounding).plus(exact) for rounding in roundings]
        same = [candidate for candidate in candidates if float(candidate) == float(exact)]
        if same:
            return min(same, key=lambda candidate: abs(candidate - exact))
    raise AssertionError("17 digits are enough for any float")


@example(2.0**-24)  # its 16 digits are not those that rounding to 16 digits gives
@example(1125899906842623.25)  # two decimals of 17 digits are as near
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-20, 25).map(lambda power: 1.5 * 10.0**power))
def test_floats_in_records_are_written_as_specified(value: float) -> None:
    commit = Commit(
        place=Place(1, 1),
        step=7,
        checkpoint="step-0000000007-0123456789abcdef",
        checkpoint_id="0123456789abcdef",
        seal=SealDigest(1, "0" * 32),
        nbytes=0,
        created=1.0,
        metrics={"m": value},
        diverged=Diverged.of(()),
    )
    assert f'"metrics":{{"m":{ryu_text(value)}}}'.encode() in records.encode(commit)


if __name__ == "__main__":
    SPEC.write_text(render(SPEC.read_text(), example_files({})))
