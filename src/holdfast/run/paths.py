"""What a user writes to name a run or a checkpoint: one grammar for the library and the command line.

====================  ==================================================
``RUN``               the head of the run in folder RUN
``RUN@step=700``      the newest commit of step 700 on the head's lineage
``RUN@3.12``          the commit at place 3.12 (epoch 3, number 12)
``RUN/checkpoints/X`` a checkpoint folder
====================  ==================================================

Only a final ``@step=...`` or ``@<int>.<int>`` selects; any other ``@`` belongs to the path. (A folder whose own
name ends like a selector is named with a slash after it.)

`parse` makes every path absolute and expands a leading ``~``, so a later change of the working directory moves nothing.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from holdfast.errors import ConfigurationError, NotFoundError
from holdfast.format.near import near
from holdfast.format.records import MARKER_KEY, Place
from holdfast.run.foreign import file_kind, folder_kind
from holdfast.store.base import Store
from holdfast.store.posix import PosixStore
from holdfast.store.posix_errors import in_the_way

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SELECTOR = re.compile(r"(?P<root>.*)@(?:step=(?P<step>[^/@]*)|(?P<epoch>[0-9]+)\.(?P<seq>[0-9]+))", re.DOTALL)
_MAX_LISTED = 20
_EXAMPLES = "Write RUN, RUN@step=700, RUN@3.12 (epoch 3, number 12) or the path of a checkpoint folder."


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed path: the folder `root` and what was selected in it (at most one of `step` and `place`). `origin` says,
    for messages, how a path that was not absolute led to `root`."""

    root: str
    step: int | None = None
    place: Place | None = None
    origin: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        if self.step is not None:
            return f"{self.root}@step={self.step}"
        return self.root if self.place is None else f"{self.root}@{self.place}"


def parse(path: str | os.PathLike[str]) -> Target:
    """The run or checkpoint that `path` names: an absolute path, as of now. Nothing is looked up in storage.

    A malformed selector, an empty path, the home of an unknown user and the URL of an object store are a
    `ConfigurationError`, code ``config.path`` or ``config.scheme``.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path is a str or an os.PathLike of str, not of {type(text).__name__}")
    text = local_path(text)
    match = _SELECTOR.fullmatch(text)
    folder = text if match is None else match["root"]
    root = _folder(folder, text)
    origin = _origin(folder)
    if match is None:
        return Target(root, origin=origin)
    if match["step"] is not None:
        if not re.fullmatch(r"[0-9]{1,18}", match["step"]):
            raise _malformed(f"the step in '{text}' is not a whole number.", text)
        return Target(root, step=int(match["step"]), origin=origin)
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,9}", match[part]) for part in ("epoch", "seq")):
        raise _malformed(f"'{text}' selects a place that cannot exist: epochs and numbers count from 1.", text)
    return Target(root, place=Place(int(match["epoch"]), int(match["seq"])), origin=origin)


def _origin(folder: str) -> str | None:
    """How `folder`, which exists or not, became an absolute path; None for one that was absolute."""
    if os.path.isabs(folder):  # noqa: PTH117 - a string, as in `absolute`
        return None
    if folder.startswith("~"):
        return f"'{folder}'"
    return f"'{folder}' in the working directory '{Path.cwd()}'"


def absolute(path: str) -> str:
    """`path` from the root of the file system, with ``~`` and the working directory as they are now.

    `ConfigurationError`, code ``config.path``, where one of them does not exist.
    """
    expanded = os.path.expanduser(path)  # noqa: PTH111 - a Path raises a bare RuntimeError for an unknown user
    if expanded.startswith("~"):
        home = path.split("/", 1)[0]
        raise ConfigurationError(
            f"'{path}' begins with '{home}', and this system knows no home folder for it.",
            code="config.path",
            action=f"Write the whole path, or './{path}' for a folder whose name begins with '~'.",
            path=path,
        )
    try:
        return os.path.abspath(expanded)  # noqa: PTH100 - links stay as they are
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"'{path}' is relative, and the working directory of this process was removed.",
            code="config.path",
            action="Write the whole path.",
            path=path,
        ) from error


def local_path(text: str) -> str:
    """The path that `text` is, which may be a ``file://`` URL.

    Raise `ConfigurationError`, code ``config.scheme``, where `text` is a URL of another kind.
    """
    scheme = _SCHEME.match(text)
    if scheme is None:
        return text
    host, slash, path = text[scheme.end() :].partition("/")
    if scheme[1].lower() == "file" and host in ("", "localhost") and slash:
        return slash + unquote(path)
    what = " of another machine"
    if scheme[1].lower() != "file":
        what = f" with {scheme[1]}://, and object stores are not supported yet"
    raise ConfigurationError(
        f"'{text}' is a URL{what}.",
        code="config.scheme",
        action="Use a folder of a local or shared file system, such as /shared/runs/a.",
        path=text,
    )


def storage_at(root: str) -> Store:
    """The storage whose root is the folder `root`, which need not exist. The only place that knows the kinds."""
    return PosixStore(local_path(root))


def no_run(storage: Store, origin: str | None = None) -> NotFoundError:
    """The error for a root that holds no run: what is there instead, and what is near. `origin` is that of the `Target`
    that led there."""
    names = storage.list("")
    path = Path(storage.uri).absolute()
    beside = _beside(storage.uri)
    around = beside.list("") if beside is not None else []
    below = [n for n in names[:_MAX_LISTED] if storage.nbytes(f"{n}/{MARKER_KEY}") is not None]
    close = near(path.name, around)
    foreign = folder_kind(names)
    if beside is not None and not names and beside.nbytes(path.name) is not None:
        foreign = file_kind(path)
    action = "Check the path."
    if foreign is not None:
        what, action = f"it is {foreign.what}.", foreign.action
    elif names:
        what = f"it exists but is not a holdfast run (it holds {some(names)})."
    elif (obstacle := in_the_way(str(path))) is not None:
        what = f"{obstacle}."
    elif path.name in around:
        what = "it exists but is not a holdfast run (it is empty)."
    else:
        what = "there is no such folder."
    if below:
        action = f"Name one of the runs in it: {some(below)}."
    elif close and foreign is None:
        action = f"Did you mean {some(close)}, in the same folder?"
    if "@" in path.name:
        action += " A selector is written RUN@step=700 or RUN@3.12."
    return NotFoundError(
        f"no holdfast run at '{storage.uri}'{f' ({origin})' if origin else ''}: {what}",
        code="not_found.run",
        action=action,
        path=storage.uri,
    )


def some(names: list[str]) -> str:
    """A few of `names`, for a message."""
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _beside(uri: str) -> Store | None:
    """The folder that would hold `uri`; None where `uri` is no path."""
    return None if _SCHEME.match(uri) else storage_at(str(Path(uri).absolute().parent))


def _folder(root: str, text: str) -> str:
    """`root` as an absolute path, refused where it names nothing."""
    if not root.strip():
        raise _malformed(f"'{text}' names no folder." if text else "the path is empty.", text)
    if "\0" in root:
        raise _malformed("the path contains a NUL character.", text)
    return absolute(root)


def _malformed(message: str, text: str) -> ConfigurationError:
    return ConfigurationError(message, code="config.path", action=_EXAMPLES, path=text)
