"""The small records of a run: marker, epoch, seal, commit; their bytes and their keys.

A record is one line of JSON: ``P`` + ``,"digest":"<32 hex>"}`` + newline, where ``P`` is a JSON object without its
closing brace and the digest is the xxh3-128 of ``P``. ``P`` begins with ``"holdfast"`` (the kind of record) and
``"reader_features"`` (the features that a reader must have; an older reader may ignore members that it does not know).
``P`` is canonical: fixed member order, no spaces, ASCII, so two writers of one record write the same bytes. That of a
signed record ends with its signature (`holdfast.signing`).

The names of epoch and commit records count down at a fixed width, so a listing in name order begins with the newest.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final, Literal, TypeVar

import msgspec
import xxhash

from holdfast import signing
from holdfast.decoding import decode_json
from holdfast.errors import CorruptError, IncompatibleError
from holdfast.wording import count, kind_of, with_article

FORMAT: Final = "1"
#: The feature of seals that name files in the folders of earlier checkpoints.
REFERENCES: Final = "references"
READER_FEATURES: Final = frozenset({REFERENCES, signing.SIGNED})
#: Largest files that readers accept as records: seals grow with the number of files, commits with the metrics.
MAX_SEAL_NBYTES: Final = 16 * 2**20
MAX_RECORD_NBYTES: Final = 2**20
#: Most diverged tensors that a commit names; the manifest names all.
MAX_DIVERGED_NAMES: Final = 16

MARKER_KEY: Final = "holdfast.json"
EPOCHS: Final = "epochs"
HISTORY: Final = "history"
CHECKPOINTS: Final = "checkpoints"
#: The folder in which the name of an object marks the commit of the same name: a save is about to replace it.
REPLACED: Final = "replaced"
SEAL_NAME: Final = "seal.json"

_COUNTDOWN: Final = 9_999_999_999
#: The last number that a checkpoint can have in its epoch, and the last step: names of folders have 18 digits for it.
MAX_SEQ: Final = _COUNTDOWN
MAX_STEP: Final = 10**18 - 1
_DIGEST_OPENER: Final = b',"digest":"'
_TAIL_NBYTES: Final = len(_DIGEST_OPENER) + 32 + len(b'"}\n')

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Ordinal = Annotated[int, msgspec.Meta(ge=1, le=_COUNTDOWN)]
Hex16 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Hex32 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
#: A digest: xxh3-128, or SHA-256 in a signed checkpoint.
HexDigest = Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{32}){1,2}\Z")]
_FileName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")]
#: The end of the year 9999 in unix seconds: `datetime` knows no later year.
LAST_S: Final = 253_402_300_799
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LAST_S)]

#: JSON cannot write nan and infinities as numbers, so records carry them as text.
Metric = float | Literal["nan", "inf", "-inf"]
Why = Literal["start", "resume", "rollback", "takeover"]


class Place(msgspec.Struct, frozen=True, order=True):
    """The place of a checkpoint in its run: epoch, then number within the epoch, both counted from 1."""

    epoch: Ordinal
    seq: Ordinal

    @staticmethod
    def parse(text: str) -> Place:
        """The place whose text form is `text`, such as ``3.12``."""
        epoch, seq = text.split(".")
        return Place(int(epoch), int(seq))

    def __str__(self) -> str:
        return f"{self.epoch}.{self.seq}"


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="holdfast", tag="record"):
    """The base of all records: the reader features that a record needs."""

    reader_features: tuple[str, ...] = ()


class Marker(Record, frozen=True, kw_only=True, tag="marker"):
    """The record that makes a folder a run; it never changes. `created` is in unix seconds."""

    run_id: Hex32
    format: str
    writer: str
    created: Seconds


class Fork(msgspec.Struct, frozen=True):
    """The checkpoint of another run that a run went on from: the id of that run, its place and its step. `path` is
    where it was then, for people."""

    run_id: Hex32
    place: Place
    step: Count
    path: str


class Epoch(Record, frozen=True, kw_only=True, tag="epoch"):
    """One incarnation of the job on a run. `incarnation` is random: it tells which job won a race for the number. An
    epoch that began with the checkpoint of another run may say so (`forked_from`)."""

    epoch: Ordinal
    opened_from: Place | None
    why: Why
    created: Seconds
    world_size: Ordinal
    incarnation: Hex32
    forked_from: Fork | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.forked_from is not msgspec.UNSET and self.why != "start":
            raise ValueError(f"an epoch with why {self.why!r} must not name a checkpoint of another run")
        if self.opened_from is not None and self.opened_from.epoch >= self.epoch:
            raise ValueError(f"epoch {self.epoch} cannot be opened from {self.opened_from}")
        if self.why == "start" and self.opened_from is not None:
            raise ValueError("an epoch with why 'start' must not name a place that it was opened from")
        if self.why in ("resume", "rollback") and self.opened_from is None:
            raise ValueError(f"an epoch with why {self.why!r} must name the place that it was opened from")


class FileSeal(msgspec.Struct, frozen=True):
    """Size and digest of one file of a checkpoint.

    The digest is that of a data file's digest table, or of all bytes of a manifest. A still file has its `content`
    digest too. Where the file was not written again, `checkpoint` is the folder of the earlier checkpoint that has it.
    """

    name: _FileName
    nbytes: Count
    digest: HexDigest
    content: HexDigest | msgspec.UnsetType = msgspec.UNSET
    checkpoint: str | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if isinstance(self.checkpoint, str) and parse_folder(self.checkpoint) is None:
            raise ValueError(f"{self.checkpoint!r:.80} is not the name of a checkpoint's folder")

    @property
    def is_referenced(self) -> bool:
        """Whether an earlier checkpoint has the file."""
        return self.checkpoint is not msgspec.UNSET


class Seal(Record, frozen=True, kw_only=True, tag="seal"):
    """The list of the files of a complete checkpoint, with sizes and digests; written after its data."""

    checkpoint_id: Hex16
    place: Place
    step: Count
    manifest: FileSeal
    files: tuple[FileSeal, ...]

    def __post_init__(self) -> None:
        names = {self.manifest.name, SEAL_NAME, *(file.name for file in self.files)}
        if len(names) != len(self.files) + 2:
            raise ValueError("a seal must name every file once")
        if bool(self.referenced) != (REFERENCES in self.reader_features):
            raise ValueError("its references do not fit its reader features")

    @property
    def referenced(self) -> tuple[FileSeal, ...]:
        """The files that earlier checkpoints have."""
        return tuple(file for file in self.files if file.is_referenced)


class SealDigest(msgspec.Struct, frozen=True):
    """Size and digest of the bytes of a seal."""

    nbytes: Count
    digest: HexDigest


class Diverged(msgspec.Struct, frozen=True):
    """The tensors whose copies on several ranks differed at a save: how many, and the first of their names."""

    num_tensors: Count
    names: tuple[str, ...]

    @staticmethod
    def of(names: Sequence[str]) -> Diverged:
        """The mark for all `names`, which are sorted."""
        return Diverged(len(names), tuple(names[:MAX_DIVERGED_NAMES]))

    def __post_init__(self) -> None:
        if len(self.names) != min(self.num_tensors, MAX_DIVERGED_NAMES):
            raise ValueError(f"it names {len(self.names)} of {self.num_tensors} diverged tensors")
        if any(a >= b for a, b in pairwise(self.names)):
            raise ValueError("the names of diverged tensors are not sorted and unique")


class Commit(Record, frozen=True, kw_only=True, tag="commit"):
    """The record that publishes a seal at its place; created once, never changed.

    `checkpoint` is the folder's name, `nbytes` the size of all data, of which ``referenced_nbytes`` are in files that
    the save did not write again, because earlier checkpoints have them (absent: none). Every field is a function of
    manifest and seal (`created`, `metrics` and `diverged` too), so all processes that may finish a checkpoint write the
    same record.
    """

    place: Place
    step: Count
    checkpoint: str
    checkpoint_id: Hex16
    seal: SealDigest
    nbytes: Count
    created: Seconds
    metrics: dict[str, Metric]
    diverged: Diverged
    referenced_nbytes: Count | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if parse_folder(self.checkpoint) != (self.step, self.checkpoint_id):
            raise ValueError(
                f"folder {self.checkpoint!r:.80} does not belong to checkpoint {self.checkpoint_id} at step {self.step}"
            )

    @property
    def num_referenced_bytes(self) -> int:
        """The bytes of its data in files of earlier checkpoints."""
        return 0 if self.referenced_nbytes is msgspec.UNSET else self.referenced_nbytes


R = TypeVar("R", bound=Record)


def writer() -> str:
    """The name and version of this package, which records name as their writer."""
    # Imported here: readers do not need it, and the import takes 20 ms.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"holdfast {version('holdfast')}"
    except PackageNotFoundError:
        return "holdfast, not installed"


def now() -> float:
    """The time for a record.

    A clock outside the years 1970 to 9999 does not make saves fail: its time is clamped to that range.
    """
    return min(max(time.time(), 0.0), LAST_S)


def to_metric(value: float) -> Metric:
    """`value` in the form that records carry; ``float()`` of the result gives `value` back."""
    value = float(value)
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def digest(data: bytes) -> str:
    """The xxh3-128 of `data` as 32 lowercase hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def encode(record: Record) -> bytes:
    """The bytes of `record`, signed if it has the feature. Raises `ValueError` for a record that `decode` would refuse,
    and `ConfigurationError`, code ``config.signing_key``, where this process has no key to sign it."""
    body = _canonical(record)
    if signing.SIGNED in record.reader_features:
        body = signing.signed(body)
    data = body + _DIGEST_OPENER + digest(body).encode("ascii") + b'"}\n'
    limit = max_nbytes(type(record))
    if len(data) > limit:
        raise ValueError(f"{kind_of(record)} record of {count(len(data), 'byte')} is over the limit of {limit}")
    return data


def _canonical(record: Record) -> bytes:
    """The canonical JSON text of `record`, without its closing brace and its signature."""
    try:
        # Decoding once turns a value that a caller may pass (2 for a float) into the one that readers see (2.0).
        canonical = decode_json(msgspec.json.encode(record), type(record))
        text = msgspec.json.encode(canonical).decode()
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a valid {type(record).__name__} record: {error}") from error
    return re.sub(r"[^\x00-\x7f]", lambda match: json.dumps(match[0])[1:-1], text).encode("ascii").removesuffix(b"}")


def max_nbytes(kind: type[Record]) -> int:
    """Largest size of a record of `kind` in bytes; readers need not read more of a file."""
    return MAX_SEAL_NBYTES if issubclass(kind, Seal) else MAX_RECORD_NBYTES


class _RecordHead(msgspec.Struct):
    """The members of a record that readers of every version can read."""

    holdfast: str
    reader_features: tuple[str, ...]


def decode(data: bytes, kind: type[R], *, path: str) -> R:
    """Decode the record of `kind` in `data` and check it in full; `path` is for messages.

    Raises:
        CorruptError: code ``corrupt.record``: `data` is damaged, or holds another kind or impossible content;
            ``corrupt.signature``: it does not match its signature; ``corrupt.unsigned``: it is the seal or the commit
            of a checkpoint, and has no signature, which this process requires.
        IncompatibleError: the record needs a reader feature or a format that this version does not know.
        ConfigurationError: code ``config.signing_key``: it is signed, and this process does not have the key.
    """
    name = str(kind.__struct_config__.tag)
    if len(data) > max_nbytes(kind):
        raise _corrupt(f"has {count(len(data), 'byte')}, more than any {name!r} record", path=path)
    body = _verified_body(data, path=path)
    try:
        head = decode_json(body + b"}", _RecordHead)
        if head.holdfast != name:
            found, wanted = with_article(f"{head.holdfast!r:.80}"), with_article(repr(name))
            raise _corrupt(f"holds {found} record where {wanted} record belongs", path=path)
        for feature in head.reader_features:
            if feature not in READER_FEATURES:
                raise _unknown(f"needs the reader feature {feature!r:.80}", path=path)
        if signing.SIGNED in head.reader_features:
            body = signing.verified(body, path=path)
        elif issubclass(kind, Seal | Commit) and signing.is_required():
            raise signing.unsigned(path)
        record = decode_json(body + b"}", kind)
        # Text that equals our own encoding has every member once. Other text comes from another writer, or has a
        # member twice, which only a second look can tell.
        if msgspec.json.encode(record) != body + b"}" and _canonical(record) != body:
            json.loads(body + b"}", object_pairs_hook=_unique, parse_int=str, parse_float=str)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _corrupt(f"is not a valid {name!r} record ({error})", path=path) from error
    if isinstance(record, Marker) and record.format != FORMAT:
        raise _unknown(f"has format {record.format!r:.80}, but this version reads format {FORMAT!r}", path=path)
    return record


def is_same(one: bytes, other: bytes, kind: type[Record], *, path: str) -> bool:
    """Whether two signed records have the same content, by whatever key. Raises as `decode` where one is signed and not
    by a key of this process."""
    try:
        a, b = decode(one, kind, path=path), decode(other, kind, path=path)
    except (CorruptError, IncompatibleError):
        return False
    return a == b and signing.SIGNED in a.reader_features


def _unique(members: list[tuple[str, object]]) -> None:
    """Raise `ValueError` where an object has a key twice: msgspec keeps the last value, another reader the first."""
    if len(dict(members)) != len(members):
        raise ValueError("an object has a key twice")


def _verified_body(data: bytes, *, path: str) -> bytes:
    """The JSON text of a record, without its digest and its closing brace. Raises `CorruptError` where the digest does
    not match it."""
    body, tail = data[:-_TAIL_NBYTES], data[-_TAIL_NBYTES:]
    if tail != _DIGEST_OPENER + digest(body).encode("ascii") + b'"}\n':
        raise _corrupt("does not match its own digest: it was truncated or altered", path=path)
    return body


def _corrupt(what: str, *, path: str) -> CorruptError:
    return CorruptError(
        f"'{path}' {what:.400}.",
        code="corrupt.record",
        action="Restore the file from another copy of the run.",
        path=path,
    )


def _unknown(what: str, *, path: str) -> IncompatibleError:
    return IncompatibleError(
        f"'{path}' {what}.",
        code="incompatible.feature",
        action=f"Read it with a newer holdfast than this one ({writer()}).",
        path=path,
    )


def epoch_key(epoch: int) -> str:
    """The key of the record of `epoch`."""
    return f"{EPOCHS}/{epoch_name(epoch)}"


def epoch_name(epoch: int) -> str:
    """The file name in ``epochs/`` of the record of `epoch`."""
    return f"{_count_down(epoch)}.json"


def parse_epoch_name(name: str) -> int | None:
    """The epoch whose record has file name `name`, or None where `name` is not the name of an epoch's record."""
    match = re.fullmatch(r"([0-9]{10})\.json", name)
    return (_COUNTDOWN - int(match[1])) or None if match else None


def commit_key(place: Place) -> str:
    """The key of the commit at `place`."""
    return f"{HISTORY}/{commit_name(place)}"


def commit_name(place: Place) -> str:
    """The file name in ``history/`` of the commit at `place`."""
    return f"{_count_down(place.epoch)}-{_count_down(place.seq)}.json"


def parse_commit_name(name: str) -> Place | None:
    """The place whose commit has file name `name`, or None where `name` is not the name of a commit."""
    match = re.fullmatch(r"([0-9]{10})-([0-9]{10})\.json", name)
    if match is None:
        return None
    epoch, seq = _COUNTDOWN - int(match[1]), _COUNTDOWN - int(match[2])
    return Place(epoch, seq) if epoch and seq else None


def _count_down(ordinal: int) -> str:
    if not 1 <= ordinal <= _COUNTDOWN:
        raise ValueError(f"{ordinal} is outside 1 to {_COUNTDOWN}")
    return f"{_COUNTDOWN - ordinal:010d}"


def folder_name(step: int, checkpoint_id: str) -> str:
    """The name of a checkpoint's folder."""
    name = f"step-{step:010d}-{checkpoint_id}"
    if parse_folder(name) != (step, checkpoint_id):
        raise ValueError(f"step {step} or checkpoint id {checkpoint_id!r} is not valid")
    return name


def parse_folder(name: str) -> tuple[int, str] | None:
    """Step and checkpoint id of a checkpoint folder's name, or None where `name` is not the name of one."""
    match = re.fullmatch(r"step-([0-9]{10}|[1-9][0-9]{10,17})-([0-9a-f]{16})", name)
    return (int(match[1]), match[2]) if match else None


def id_of(folder: str) -> str:
    """The checkpoint id in `folder`, which is the name of a checkpoint's folder."""
    return folder.rpartition("-")[2]


def folders_of(step: int, names: Sequence[str]) -> list[str]:
    """The `names` in ``checkpoints/`` that are folders of checkpoints of `step`."""
    prefix = f"step-{step:010d}-"
    return [name for name in names if name.startswith(prefix) and parse_folder(name) is not None]


def checkpoint_key(folder: str, name: str) -> str:
    """The key of file `name` of the checkpoint in `folder`."""
    return f"{CHECKPOINTS}/{folder}/{name}"
