"""The paths by which users name a run or a checkpoint: one grammar for the library and the command line.

====================  ==================================================
``RUN``               the head of the run in folder RUN
``RUN@step=700``      the newest commit of step 700 on the head's lineage
``RUN@3.12``          the commit at place 3.12 (epoch 3, number 12)
``RUN/checkpoints/X`` a checkpoint folder
====================  ==================================================

Only a final ``@step=...`` or ``@<int>.<int>`` is a selector; any other ``@`` belongs to the path. (For a folder whose
own name ends like a selector, write a slash after the name.)

`parse` makes every path absolute and expands a leading ``~``, so a later change of the working directory does not
change which run a path means.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.errors import ConfigurationError, CorruptError, NotFoundError, StorageError
from holdfast.format import records
from holdfast.format.near import near
from holdfast.format.records import CHECKPOINTS, EPOCHS, HISTORY, MARKER_KEY, Place
from holdfast.format.tombstones import parse_removed_name
from holdfast.run.foreign import file_kind, folder_kind, near_file
from holdfast.store.base import Location, Store
from holdfast.store.posix_errors import in_the_way
from holdfast.store.urls import local_path, location_of, open_store, with_options
from holdfast.wording import with_article

_SELECTOR = re.compile(r"(?P<root>.*)@(?:step=(?P<step>[^/@]*)|(?P<epoch>[0-9]+)\.(?P<seq>[0-9]+))", re.DOTALL)
_MAX_LISTED = 20
#: Most near runs that an error names.
_MAX_NEAR = 3
#: A folder with one of these is a run, or one checkpoint.
_ROOT_KEYS = (MARKER_KEY, records.SEAL_NAME)
#: The folders of a run, each with a function that says whether a name in it is of a record or checkpoint.
_PARTS: Final[dict[str, Callable[[str], bool]]] = {
    CHECKPOINTS: lambda name: records.parse_folder(name) is not None,
    EPOCHS: lambda name: records.parse_epoch_name(name) is not None,
    HISTORY: lambda name: (records.parse_commit_name(name) or parse_removed_name(name)) is not None,
}
_EXAMPLES = "Write RUN, RUN@step=700, RUN@3.12 (epoch 3, number 12) or the path of a checkpoint folder."


@dataclass(frozen=True, slots=True)
class Selection:
    """A parsed path: its location, and the checkpoint selected there (at most one of `step` and `place`).

    `origin` says, for messages, how a path that was not absolute led to the location.
    """

    location: Location
    step: int | None = None
    place: Place | None = None
    origin: str | None = field(default=None, compare=False)

    @property
    def root(self) -> str:
        """The location, for messages."""
        return self.location.url

    def __str__(self) -> str:
        if self.step is not None:
            return f"{self.root}@step={self.step}"
        return self.root if self.place is None else f"{self.root}@{self.place}"


def parse(path: str | os.PathLike[str] | Location) -> Selection:
    """Parse the path of a run or checkpoint, and make it absolute. Does not access storage.

    A `Location` gives the options for opening the store; its URL may end with a selector, too. A selector stands at the
    end of a URL, behind its options.

    Raises `ConfigurationError`, code ``config.path`` or ``config.scheme``, for a malformed selector, an empty path, the
    home of an unknown user, and the URL of an unknown kind of store.
    """
    text, options = (path.url, path.options) if isinstance(path, Location) else (path, ())
    text = os.fspath(text) if isinstance(text, os.PathLike) else text
    if not isinstance(text, str):
        raise TypeError(
            f"the path of a run must be a str or os.PathLike of str, not {with_article(type(text).__name__)}"
        )
    text = local_path(text)
    match = _SELECTOR.fullmatch(text)
    folder = text if match is None else match["root"]
    location = with_options(_location(folder, text), options)
    origin = _origin(folder)
    if match is None:
        return Selection(location, origin=origin)
    if match["step"] is not None:
        if not re.fullmatch(r"[0-9]{1,18}", match["step"]):
            raise _malformed(f"the step in '{text}' is not a whole number.", text)
        return Selection(location, step=int(match["step"]), origin=origin)
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,9}", match[part]) for part in ("epoch", "seq")):
        raise _malformed(f"'{text}' selects a place that cannot exist: epochs and numbers count from 1.", text)
    return Selection(location, place=Place(int(match["epoch"]), int(match["seq"])), origin=origin)


def selected(run: Location, at: str) -> Selection:
    """The checkpoint of `run` that the selector `at` names, such as ``step=700`` or ``3.12``.

    Raises `ConfigurationError`, code ``config.path``, for another text.
    """
    selection = parse(Location(f"{run.url}@{at}", run.options))
    if selection.location != run:
        raise ConfigurationError(
            f"'{at}' selects no checkpoint of '{run}'.",
            code="config.path",
            action="Write step=700, or a place such as 3.12 (epoch 3, number 12), without the path of the run.",
            path=run.url,
        )
    return selection


def _origin(folder: str) -> str | None:
    """A text for messages that says how the path `folder` became absolute; None for one that was absolute already."""
    if os.path.isabs(folder) or "://" in folder:  # noqa: PTH117 - a string, as in `location_of`
        return None
    if folder.startswith("~"):
        return f"'{folder}'"
    return f"'{folder}' in the working directory '{Path.cwd()}'"


def lost_marker(storage: Store, names: Collection[str]) -> CorruptError | None:
    """The error for a root that holds `names` and is a run whose marker is lost; None for any other root.

    It is one where something else has the name of the marker, or where records or checkpoints are there without it: a
    writer creates the marker before all of them.
    """
    kinds = [
        folder for folder, is_ours in _PARTS.items() if folder in names and any(map(is_ours, storage.list(folder)))
    ]
    if not (kinds or MARKER_KEY in names) or storage.nbytes(MARKER_KEY) is not None:
        return None
    path = storage.path(MARKER_KEY)
    lost = "what has its name is no file" if MARKER_KEY in names else "it was lost, or not copied"
    holds = f" (it holds {', '.join(kinds)})" if kinds else ""
    return CorruptError(
        f"'{storage.location}' is a run{holds} whose marker '{path}' is missing: {lost}.",
        code="corrupt.marker",
        action="Restore the marker from another copy of the run, or have holdfast doctor --finish make it anew.",
        path=path,
    )


def no_run(storage: Store, origin: str | None = None) -> NotFoundError | CorruptError:
    """The error for a root at which no run can be opened: it says what is there instead, and names runs that are near.

    `origin` is that of the `Selection` that led there.
    """
    names = storage.list("")
    if (lost := lost_marker(storage, names)) is not None:
        return lost
    path = Path(storage.location.url)
    parent = beside(storage)
    around = parent.list("") if parent is not None else []
    below = runs_in(storage, names)
    meant = _near_runs(storage)
    foreign = folder_kind(names)
    if parent is not None and not names and parent.nbytes(path.name) is not None:
        foreign = file_kind(path)
    action = "Check the path."
    if foreign is not None:
        what, action = f"it is {foreign.what}.", foreign.action
    elif names:
        what = f"it exists but is not a holdfast run (it holds {some(names)})."
    elif parent is not None and (obstacle := in_the_way(str(path))) is not None:
        what = f"{obstacle}."
    elif path.name in around:
        what = "it exists but is not a holdfast run (it is empty)."
    else:
        what = "there is no such folder."
        action += _hub_advice(origin)
        if meant is None and (close := near_file(path, around)) is not None:
            meant = f"Did you mean {close!r}, in the same folder?"
    if foreign is None and parent is not None and parent.nbytes(MARKER_KEY) is not None:
        action = f"Name the run that it is a part of: '{path.parent}'."
    elif below:
        action = f"Name one of the runs in it: {some_quoted(below)}."
    elif meant is not None and foreign is None:
        action = meant
    if "@" in path.name:
        action += " A selector is written RUN@step=700 or RUN@3.12."
    return NotFoundError(
        f"no holdfast run at '{storage.location}'{f' ({origin})' if origin else ''}: {what}",
        code="not_found.run",
        action=action,
        path=storage.location.url,
    )


def _hub_advice(origin: str | None) -> str:
    """The advice for a path that may be meant as the name of a model on the Hugging Face Hub."""
    written = re.match(r"'[\w.-]+/[\w.-]+' in", origin or "")
    if written is None or Path(written[0][1:].partition("/")[0]).exists():
        return ""
    return " If it names a model of the Hugging Face Hub, download that first, and name the folder."


def runs_in(storage: Store, names: list[str]) -> list[str]:
    """Those of the first `names` at the root of `storage` that are runs."""
    return [name for name in names[:_MAX_LISTED] if storage.nbytes(f"{name}/{MARKER_KEY}") is not None]


def some(names: list[str]) -> str:
    """A few of `names`, for a message."""
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def some_quoted(names: list[str]) -> str:
    """A few of `names`, which the user may choose from, for a message."""
    return some(list(map(repr, names)))


def _near_runs(storage: Store) -> str | None:
    """The question whether the user means a run or checkpoint whose path is like this one. Returns None where there is
    no such path. The function takes it that one part of the path has a slip: the last part or, where the folder above
    does not exist, an earlier one. In a URL it looks at the last part only, because a store can take long to list."""
    folder = storage.location.folder
    if folder is None:
        return _near_keys(storage.location)
    missing, below = Path(folder), Path()
    while True:
        around = open_store(Location(str(missing.parent)))
        names = around.list("")
        roots = [str(name / below) for name in map(Path, near(missing.name, names, count=_MAX_LISTED))]
        found = [root for root in roots if any(around.nbytes(f"{root}/{key}") is not None for key in _ROOT_KEYS)]
        if found and not below.parts:
            return f"Did you mean {some_quoted(found[:_MAX_NEAR])}, in the same folder?"
        if found:
            return f"Did you mean {some_quoted([str(missing.parent / root) for root in found[:_MAX_NEAR]])}?"
        if names or missing.parent == missing.parent.parent:
            return None
        missing, below = missing.parent, missing.name / below


def _near_keys(location: Location) -> str | None:
    """As `_near_runs`, of the runs beside the URL `location`."""
    if location.parent is None:
        return None
    try:
        around = open_store(location.parent)
        names = near(location.url.rpartition("/")[2], around.list(""), count=_MAX_NEAR)
        found = [name for name in names if any(around.nbytes(f"{name}/{key}") is not None for key in _ROOT_KEYS)]
    except StorageError:  # these credentials may be for keys below the URL alone; the error about them matters
        return None
    return f"Did you mean {some_quoted(found)}, beside it?" if found else None


def beside(storage: Store) -> Store | None:
    """The parent folder of the root of `storage`, as a store; None where the root is no folder."""
    folder = storage.location.folder
    return None if folder is None else open_store(Location(str(folder.parent)))


def _location(root: str, text: str) -> Location:
    """The location of `root`. Raises `ConfigurationError` where it is not a possible path."""
    if not root.strip():
        raise _malformed(f"'{text}' does not name a folder." if text else "the path is empty.", text)
    if "\0" in root:
        raise _malformed("the path contains a NUL character.", text)
    if not root.isascii() and any("\ud800" <= letter <= "\udfff" for letter in root):
        raise _malformed("the path contains bytes that are not UTF-8.", ascii(text))
    return location_of(root)


def _malformed(message: str, text: str) -> ConfigurationError:
    return ConfigurationError(message, code="config.path", action=_EXAMPLES, path=text)
