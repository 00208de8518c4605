"""A process that decodes hostile bytes within a budget: 1 s of processor time and 256 MiB more than it began with.

It knows the library without torch. Every answer says what came of the bytes; a process that dies gives no answer.
"""

from __future__ import annotations

import base64
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Self

import msgspec
import numpy as np

from holdfast.checkpoint.stored_checkpoint import Checkpoint, unpack_values
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.errors import CorruptError, HoldfastError, IncompatibleError, NotFoundError, StorageError
from holdfast.format import manifest as fmt
from holdfast.format import names, records, sequences
from holdfast.format import values as value_codec
from holdfast.format.container import Files
from holdfast.peers.peer_messages import PeerMessage, decode_reply, decode_request, encode_message
from holdfast.run.history import resolve
from holdfast.run.paths import parse
from holdfast.view.source import ViewSource

CPU_S = 1.0
NBYTES = 256 << 20
#: A process that used so much is stopped by the kernel: it hangs.
_KILL_CPU_S = 10
#: One that waits for something that never comes is ended by its alarm.
_KILL_WALL_S = 20

Outcome = Literal["accepted", "refused", "leaked"]
REFUSALS = (CorruptError, IncompatibleError, NotFoundError)


class Verdict(msgspec.Struct, frozen=True):
    """The outcome for some bytes: `code` of the refusal, or the error that leaked, which is any other error."""

    outcome: Outcome
    code: str
    text: str
    cpu_s: float


def _manifest(data: bytes) -> None:
    """All that follows from a manifest alone; what is accepted must be of one piece."""
    manifest = fmt.decode(data, path="manifest.hfm")
    files = Files(manifest)
    for tensor in range(len(manifest.body.names)):
        cells = files.cells(tensor)
        numel = int(np.prod(manifest.shape(tensor), dtype=np.int64))
        assert (cells.numels > 0).all(), "an empty cell"
        assert sum(cells.numels.tolist()) == numel, "cells that do not add up"
    if manifest.body.num_files:
        columns = files.columns(np.arange(min(manifest.body.num_files, 8)))
        assert (columns.data_nbytes >= 0).all(), "an overflow"
        assert (np.diff(columns.offsets, axis=1) >= 0).all(), "an overflow"
    again = fmt.decode(fmt.encode(manifest.body, [bytes(manifest._blob)]), path="again").body
    # Compared as bytes: a metric may be nan.
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(manifest.body), "it comes back as another one"


def _sequence(data: bytes) -> None:
    """A sequence and its bytes in the blob, as a pair."""
    try:
        sequence, blob = msgspec.msgpack.decode(data, type=tuple[sequences.Sequence, bytes])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise CorruptError("no sequence.", code="corrupt.manifest", action="None.") from None
    _manifest(fmt.encode(_bare_manifest(sequence), [blob]))


def _bare_manifest(sequence: sequences.Sequence) -> fmt.Manifest:
    """A manifest whose one tensor is cut by `sequence`."""
    length = sequence.length if isinstance(sequence, sequences.DifferencePlanes) else sequences.affine_length(sequence)
    owners = sequences.Block(0, (min(max(length - 1, 1), 1 << 18),), (0,))
    return fmt.Manifest(
        checkpoint_id="0" * 16,
        run_id="0" * 32,
        place=(1, 1),
        step=0,
        created=0.0,
        world_size=1,
        metrics={},
        reader_features=(),
        names=("t",),
        dtype_table=("uint8",),
        dtypes=(0,),
        shape_table=((6,),),
        shapes=(0,),
        partition_table=(fmt.FlatCuts(0, 1),),
        partitions=(0,),
        aliases={},
        diverged=(),
        num_files=1,
        writers=1,
        values=(),
        sequences=(sequence, sequences.Affine((owners,))),
    )


def _values(data: bytes) -> None:
    """A table of values and every object that it stands for."""
    _rebuild(value_codec.decode(data))


def _entry(data: bytes) -> None:
    """An ``@values`` entry."""
    _rebuild(unpack_values(data, path="data-00000.safetensors"))


def _rebuild(nodes: Mapping[str, value_codec.Node]) -> None:
    for path, node in nodes.items():
        state = value_codec.bare(node)
        if isinstance(state, value_codec.Leaf | value_codec.Container) and "/" not in path:
            # A container may hold a module or another rank's part, which no table alone can give.
            try:
                value_codec.rebuild(nodes, path, tensors=lambda name: name)
            except NotFoundError:
                continue
    again = value_codec.decode(value_codec.encode(dict(nodes)))
    assert again.keys() == nodes.keys(), "it comes back as another one"
    assert all(value_codec.same(node, again[path]) for path, node in nodes.items()), "it comes back as another one"


def _record(kind: type[records.Record]) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        record = records.decode(data, kind, path="record.json")
        assert records.decode(records.encode(record), kind, path="again") == record, "it comes back as another one"

    return decode


def _name(data: bytes) -> None:
    name = data.decode("utf-8", "surrogateescape")
    names.check_components(name)
    for text in names.split(name)[:10_000]:  # the check itself takes time too
        if not names.is_rank_component(text):
            assert names.component(names.parse_component(text)) == text, "a key with two names"


def _message(decode: Callable[[bytes], PeerMessage]) -> Callable[[bytes], None]:
    """A message between keepers."""

    def decoded(data: bytes) -> None:
        try:
            message = decode(data)
        except StorageError as error:
            raise CorruptError(error.message, code=error.code, action=error.action) from None
        assert decode(encode_message(message)) == message, "it comes back as another one"

    return decoded


def _checkpoint(data: bytes) -> None:
    """Everything a reader can do with the checkpoint at a path: all values, all tensors, all of its bytes."""
    checkpoint = Checkpoint(resolve(parse(data.decode())).sealed)
    _rebuild(dict(checkpoint.nodes))
    for tensor in range(len(checkpoint.manifest.body.names)):
        ViewSource(checkpoint, verify=True).whole([tensor], private=False)
    for fault in verify_checkpoint(checkpoint, deep=True):
        raise CorruptError(fault.message, code=fault.code, action="None.", path=fault.path)


DECODERS: Mapping[str, Callable[[bytes], None]] = {
    "manifest": _manifest,
    "sequence": _sequence,
    "values": _values,
    "entry": _entry,
    "marker": _record(records.Marker),
    "epoch": _record(records.Epoch),
    "seal": _record(records.Seal),
    "commit": _record(records.Commit),
    "name": _name,
    "request": _message(decode_request),
    "reply": _message(decode_reply),
    "checkpoint": _checkpoint,
}


def _judge(decoder: str, data: bytes) -> Verdict:
    start = time.process_time()
    outcome: Outcome
    try:
        DECODERS[decoder](data)
        outcome, code, text = "accepted", "", ""
    except HoldfastError as error:
        outcome, code, text = ("refused" if isinstance(error, REFUSALS) else "leaked"), error.code, str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the test's to judge
        outcome, code, text = "leaked", type(error).__name__, "".join(traceback.format_exception(error, limit=-5))
    return Verdict(outcome, code, text[-2000:], time.process_time() - start)


def _warm_up() -> None:
    """Load what any use needs, so that the budget is for the input alone."""
    for decoder in DECODERS:
        _judge(decoder, b"")


def _serve() -> None:
    _warm_up()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + NBYTES, used + NBYTES))
    for line in sys.stdin.buffer:
        decoder, _, text = line.decode("ascii").strip().partition(" ")
        spent = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (spent + _KILL_CPU_S, resource.RLIM_INFINITY))
        signal.alarm(_KILL_WALL_S)
        verdict = _judge(decoder, base64.b64decode(text))
        signal.alarm(0)  # it ends the attack, not the time until the next one
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


class Confined:
    """The process, started on first use and again after it died. Use as a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def judge(self, decoder: str, data: bytes) -> Verdict:
        """Judge `data`. A process that the kernel stopped counts as a leak."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{decoder} {base64.b64encode(data).decode()}\n".encode())
        process.stdin.flush()
        line = process.stdout.readline()
        if line:
            return msgspec.json.decode(line, type=Verdict)
        self._process = None
        status = process.wait()
        process.communicate()
        ending = signal.Signals(-status).name if status < 0 else f"status {status}"
        return Verdict("leaked", ending, f"the process ended: {ending}", float(_KILL_CPU_S))

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", "tests.faults.attacks.confined"]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"PYTHONPATH": ":".join(filter(None, sys.path)), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[3],
            )
        return self._process


if __name__ == "__main__":
    _serve()
