"""The reports that `save`, `load` and `transfer` return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.wording import count

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
#: Most names that a report prints of each kind.
_NAMED = 3


def size(nbytes: int) -> str:
    """`nbytes` as text for people, such as ``1.5 GiB``."""
    number = float(nbytes)
    for unit in _UNITS:
        if number < 1024 or unit == _UNITS[-1]:
            return f"{nbytes} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


@dataclass(frozen=True, repr=False)
class SaveReport:
    """A committed, durable checkpoint.

    `place` is its place in the run's history, `path` its folder. ``nbytes`` counts the tensors and values of the whole
    checkpoint, ``written_nbytes`` the bytes that this rank wrote, and ``referenced_nbytes`` those that it did not
    write, because an earlier checkpoint of the run has them. `diverged` are the tensors whose undeclared copies
    differed between ranks at this save; the save wrote one holder's copy of each. ``seconds`` says how long each phase
    took on this rank.
    """

    step: int
    place: str
    path: str
    nbytes: int
    written_nbytes: int
    referenced_nbytes: int
    num_tensors: int
    diverged: tuple[str, ...]
    seconds: dict[str, float]

    @property
    def next_step(self) -> int:
        """The number of the step that a training loop does after this one."""
        return self.step + 1

    @property
    def summary(self) -> str:
        """One line about the save: step, place, number of tensors, size and duration."""
        total_s = sum(self.seconds.values())
        saved = f"{count(self.num_tensors, 'tensor')}, {size(self.nbytes)}"
        return f"step {self.step} at {self.place}: {saved} in {total_s:.2f} s"

    def __repr__(self) -> str:
        left = f" and left {size(self.referenced_nbytes)} to earlier checkpoints" if self.referenced_nbytes else ""
        own = f"this rank wrote {size(self.written_nbytes)}{left}; the next step is {self.next_step}"
        return printed("SaveReport", self.summary, self.path, own, *listed("diverged", self.diverged))


@dataclass(frozen=True)
class ReadSource:
    """``nbytes`` that a rank needed and that came from a `tier`: "node memory", "peer memory", "node disk" or
    "storage". Only `rank` could read them, and passed them on; None: any rank could."""

    tier: str
    rank: int | None
    nbytes: int


@dataclass(frozen=True, repr=False)
class LoadReport:
    """A loaded state. `state` is the whole tree that was loaded into (tuples in it are new).

    `loaded`, `missing` and `unexpected` are names of tensors and values; with ``strict`` the last two are empty.
    `resharded` are tensors whose local part is not one stored piece, `cast` those that this rank holds in another dtype
    than they are stored in. With a mapping, all names are those after its rules. ``read_nbytes`` is the number of bytes
    that this rank read from storage, ``needed_nbytes`` the number that its state holds of them. Ranks read for each
    other, and they read whole digest blocks, so only the sums of both over all ranks can be compared. ``verify_s`` is
    the time that this rank's threads spent on digests. `sources` says where the bytes came from that this rank needed.
    `on_meta` are tensors that still have no memory, on the meta
    device: with ``strict`` only tensors that were not selected. `reseeded` are `RandomState` entries that another
    number of ranks saved: their generators do not continue where they were. `diverged` are the tensors that the
    checkpoint marks so, as in `SaveReport`. `skipped` are newer checkpoints that ``fallback=True`` passed over, or
    that `Checkpointer.restore` found damaged in memory, newest first: the place of each, and what is wrong with it.
    `verified` says whether the bytes were compared with digests. A checkpoint of another system has none; its step is
    -1, and its place is empty.
    """

    step: int
    place: str
    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    resharded: tuple[str, ...]
    cast: tuple[str, ...]
    on_meta: tuple[str, ...]
    reseeded: tuple[str, ...]
    diverged: tuple[str, ...]
    verified: bool
    read_nbytes: int
    needed_nbytes: int
    verify_s: float
    seconds: dict[str, float]
    skipped: tuple[tuple[str, str], ...]
    sources: tuple[ReadSource, ...]
    state: object = field(repr=False)

    @property
    def next_step(self) -> int:
        """The number of the first step of a training loop that continues from this checkpoint."""
        return self.step + 1

    @property
    def summary(self) -> str:
        """One line about the load: step, place, number of names, size and duration."""
        total_s = sum(self.seconds.values())
        loaded = f"{count(len(self.loaded), 'name')}, {size(self.needed_nbytes)}"
        return f"{origin(self.step, self.place)}: {loaded} in {total_s:.2f} s"

    def __repr__(self) -> str:
        own = f"this rank read {size(self.read_nbytes)}; the next step is {self.next_step}"
        names = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "on the meta device": self.on_meta,
            "cast": self.cast,
            "resharded": self.resharded,
            "diverged": self.diverged,
            "passed over": [f"{place} ({reason})" for place, reason in self.skipped],
        }
        lines = [line for what, which in names.items() for line in listed(what, which)]
        if not self.verified:
            lines.append("not verified: no digests were compared")
        return printed("LoadReport", self.summary, self.path, own, *lines)


@dataclass(frozen=True, repr=False)
class TransferReport:
    """A target that was filled from a source. `state` is the whole tree of the target (tuples in it are new).

    `loaded` are the names of the tensors and values that this rank's target got, ``received_nbytes`` the size of its
    parts of those tensors. ``moved_nbytes`` counts the bytes that this rank copied out of its part of the source, for
    itself and other ranks; bytes that several ranks get count once. ``seconds`` says how long each phase took on this
    rank.
    """

    loaded: tuple[str, ...]
    moved_nbytes: int
    received_nbytes: int
    seconds: dict[str, float]
    state: object = field(repr=False)

    def __repr__(self) -> str:
        own = f"{count(len(self.loaded), 'name')}, {size(self.received_nbytes)} in {sum(self.seconds.values()):.2f} s"
        return printed("TransferReport", own, f"this rank moved {size(self.moved_nbytes)}")


@dataclass(frozen=True, repr=False)
class ExportReport:
    """A checkpoint that was written for another system, into the folder `path`; `step` and `place` are its own.

    `files` are the files with tensors. `kept` are the files of any kind that an interrupted export had finished before.
    ``written_nbytes`` counts the bytes of the files that this call wrote, ``read_nbytes`` those that it read from the
    checkpoint. `verified` says whether these were compared with digests, which only a checkpoint of holdfast has.
    """

    step: int
    place: str
    path: str
    to: str
    num_tensors: int
    num_values: int
    files: tuple[str, ...]
    kept: tuple[str, ...]
    written_nbytes: int
    read_nbytes: int
    verified: bool
    seconds: float

    @property
    def summary(self) -> str:
        """One line about the export: step, place, number of tensors, size and duration."""
        held = count(self.num_tensors, "tensor")
        if self.num_values:
            held += f", {count(self.num_values, 'value')}"
        written = f"{held}, {size(self.written_nbytes)} in {self.seconds:.2f} s"
        return f"{origin(self.step, self.place)}, as {self.to}: {written}"

    def __repr__(self) -> str:
        lines = listed("with tensors", self.files) + listed("finished earlier", self.kept)
        if not self.verified:
            lines.append("not verified: the checkpoint has no digests")
        return printed("ExportReport", self.summary, self.path, f"read {size(self.read_nbytes)}", *lines)


@dataclass(frozen=True, repr=False)
class ImportReport:
    """A checkpoint of another system that was written into the run at `path`, as the one of `step` at `place`.

    `kind` says what it was. ``nbytes`` counts the bytes of all its data files; `kept` are those of them that an
    interrupted import had finished before, ``written_nbytes`` counts the bytes of the others.
    """

    step: int
    place: str
    path: str
    kind: str
    num_tensors: int
    num_values: int
    nbytes: int
    kept: tuple[str, ...]
    written_nbytes: int
    seconds: float

    @property
    def summary(self) -> str:
        """One line about the import: its origin, step, place, number of tensors, size and duration."""
        held = f"{count(self.num_tensors, 'tensor')}, {count(self.num_values, 'value')}, {size(self.nbytes)}"
        return f"{self.kind} as {origin(self.step, self.place)}: {held} in {self.seconds:.2f} s"

    def __repr__(self) -> str:
        return printed("ImportReport", self.summary, self.path, *listed("finished earlier", self.kept))


@dataclass(frozen=True, repr=False)
class CopyReport:
    """A copy of the run `source`, or of one checkpoint of it, into the run at `path`, whose head is now the one of
    `step` at the place `head` ("" and None: it has none).

    The others are places of `source`. `copied` came with this call, `present` were there before. Left out are
    `vanished`, which were deleted from `source` before their turn, `removed`, which were removed at `path`, and
    `damaged`. `num_kept` data files of those in `copied` had been written by an interrupted call;
    ``written_nbytes`` counts the bytes of the others.
    """

    source: str
    path: str
    head: str
    step: int | None
    copied: tuple[str, ...]
    present: tuple[str, ...]
    vanished: tuple[str, ...]
    removed: tuple[str, ...]
    damaged: tuple[str, ...]
    num_kept: int
    written_nbytes: int
    seconds: float

    @property
    def summary(self) -> str:
        """One line about the copy: its source, number of checkpoints, size and duration."""
        held = f"{count(len(self.copied), 'checkpoint')}, {size(self.written_nbytes)}"
        return f"{self.source}: {held} in {self.seconds:.2f} s"

    def __repr__(self) -> str:
        lines = [
            *listed("there before", self.present),
            *listed("deleted from the source before their turn", self.vanished),
            *listed("left out, because they were removed in the copy", self.removed),
            *listed("left out, because they are damaged", self.damaged),
        ]
        return printed("CopyReport", self.summary, self.path, *lines)


def origin(step: int, place: str) -> str:
    """Which checkpoint was read, for a report."""
    return "a foreign checkpoint" if not place else f"step {step} at {place}"


def listed(what: str, names: Sequence[str]) -> list[str]:
    """A list of one line that counts `names` and gives the first of them; an empty list where there are no names."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return [f"{len(names):,} {what}: {', '.join(names[:_NAMED])}{more}"] if names else []


def printed(kind: str, first: str, *lines: str) -> str:
    """The ``repr`` of a report of a kind: the most important line first, then further lines."""
    return "\n  ".join([f"<{kind} {first}", *lines]) + ">"
