"""From the path or URL that a user writes to a store.

Only `location_of` turns a user's path into a `Location`, and only `open_store` knows the kinds of stores. Packages
register a further kind of store by its URL scheme: with `register_store` for one process, or, for all processes and
keepers, as an entry point of the group ``holdfast.stores`` of an installed package.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias
from urllib.parse import unquote

from holdfast.errors import ConfigurationError
from holdfast.store.base import SCHEME, Location, Store
from holdfast.store.object_urls import SCHEMES, check_options, object_location, query_of
from holdfast.store.posix import PosixStore
from holdfast.store.posix_errors import in_the_way
from holdfast.store.timed import TimedStore

_GROUP = "holdfast.stores"
#: The beginning of a URL that went through `pathlib`, which joins its slashes.
_JOINED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")


Opener: TypeAlias = Callable[[Location], Store]


def _open_objects(location: Location) -> Store:
    from holdfast.store.objects import ObjectStore  # obstore takes 30 ms to import, and runs threads

    return ObjectStore(location)


# One table for the whole process, because `save` and `load` are plain functions. Folders have no scheme and no entry.
_openers: dict[str, Opener] = dict.fromkeys(SCHEMES, _open_objects)


def register_store(scheme: str, opener: Opener) -> None:
    """Make this process open URLs that begin with ``scheme://`` with `opener`.

    Raises `ValueError` for ``file``, and for a scheme that has another opener.
    """
    scheme = scheme.lower()
    if scheme == "file" or _openers.setdefault(scheme, opener) is not opener:
        raise ValueError(f"another store already opens {scheme}://")


def open_store(location: Location) -> Store:
    """Open the store at `location`; its root need not exist. Raises `ConfigurationError` for unknown schemes."""
    scheme = SCHEME.match(location.url)
    if scheme is None:
        return PosixStore(location.url)
    opener = _opener(scheme[1].lower())
    if opener is None:
        raise _unknown(location.url, scheme[1])
    return opener(location)


def canonical(location: Location, *, timeout_s: float) -> Location:
    """`location` with the links in its path resolved, so that all paths of one folder give one location. A URL stays as
    it is, and so does a path that leads through a dangling link or a file: opening it raises an error that says so.

    Raises `StorageError`, code ``storage.timeout``, where the file system does not answer in time.
    """
    if location.folder is None:
        return location
    with TimedStore(open_store(location), timeout_s=timeout_s) as storage:
        if storage.limit.run("look at", location.url, lambda: in_the_way(location.url)) is not None:
            return location
        return Location(storage.resolved(), location.options)


def location_of(path: str) -> Location:
    """The location of the path or URL that a user wrote. Does not access a store.

    A path becomes absolute, with the current ``~`` and working directory; so does a ``file://`` URL. The query of an
    object store's URL becomes the options of the location.

    Raises `ConfigurationError`, code ``config.scheme`` for a URL of no known store, ``config.path`` where the working
    directory or a user does not exist, and as `object_location`.
    """
    path = local_path(path)
    scheme = SCHEME.match(path)
    if scheme is None:
        return Location(absolute(path))
    return object_location(path) if _is_of_objects(scheme[1]) else Location(path.rstrip("/"))


def with_options(location: Location, options: tuple[tuple[str, str], ...]) -> Location:
    """`location` with the options that its caller gave beside the URL, if any. Raises as `location_of`."""
    if not options:
        return location
    scheme = SCHEME.match(location.url)
    if scheme is not None and _is_of_objects(scheme[1]):
        check_options(scheme[1], dict(options))
    return Location(location.url, options)


def text_of(location: Location) -> str:
    """The text by which a user, or another process, names `location`: `location_of` turns it back, except for options
    that were given to the store of a package."""
    scheme = SCHEME.match(location.url)
    return location.url + (query_of(location) if scheme is not None and _is_of_objects(scheme[1]) else "")


def _is_of_objects(scheme: str) -> bool:
    return _openers.get(scheme.lower()) is _open_objects


def absolute(path: str) -> str:
    """`path` as an absolute path, with the current ``~`` and working directory.

    Raises `ConfigurationError`, code ``config.path``, where one of them does not exist.
    """
    expanded = os.path.expanduser(path)  # noqa: PTH111 - a Path raises a bare RuntimeError for an unknown user
    if expanded.startswith("~"):
        home = path.split("/", 1)[0]
        raise ConfigurationError(
            f"'{path}' begins with '{home}', but this system knows no home folder for it.",
            code="config.path",
            action=f"Write the whole path, or './{path}' for a folder whose name begins with '~'.",
            path=path,
        )
    try:
        return os.path.abspath(expanded)  # noqa: PTH100 - links stay as they are
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"'{path}' is relative, but the working directory of this process was removed.",
            code="config.path",
            action="Write the whole path.",
            path=path,
        ) from error


def local_path(text: str) -> str:
    """The path in `text`, which may be a path or a ``file://`` URL; the URL of another store is returned unchanged.

    Raises `ConfigurationError`, code ``config.scheme``, where `text` is the URL of no known store, and code
    ``config.path`` where it lacks one of the two slashes of the URL of a known one.
    """
    scheme = SCHEME.match(text)
    if scheme is None:
        _refuse_joined(text)
        return text
    if scheme[1].lower() != "file":
        if _opener(scheme[1].lower()) is None:
            raise _unknown(text, scheme[1])
        return text
    host, slash, path = text[scheme.end() :].partition("/")
    if host not in ("", "localhost") or not slash:
        raise _no_folder(text, " of another machine")
    return slash + unquote(path)


def _refuse_joined(text: str) -> None:
    """Raise the error of a URL that a `Path` was made of: it would name a folder of this machine, such as ``s3:``. The
    path may be absolute, too; where the working directory has a folder of that name, the user means the folder."""
    text = _made_absolute(text)
    joined = _JOINED.match(text)
    if joined is None or (joined[1].lower() != "file" and _opener(joined[1].lower()) is None):
        return
    rest = text[joined.end() :]
    raise ConfigurationError(
        f"'{text}' has one slash behind '{joined[1]}:', so it is no URL; pathlib.Path and os.path.abspath join the "
        "slashes of a URL.",
        code="config.path",
        action=f"Pass the URL as a str: '{joined[1]}://{'/' if joined[1].lower() == 'file' else ''}{rest}'. "
        f"For a folder of this name, write './{text}'.",
        path=text,
    )


def _made_absolute(text: str) -> str:
    """The text that somebody made the absolute path `text` of, if that is the path of no folder; else `text`."""
    if not os.path.isabs(text):  # noqa: PTH117 - a string, as in `absolute`
        return text
    with suppress(FileNotFoundError):  # the working directory was removed
        relative = text.removeprefix(os.path.join(os.getcwd(), ""))  # noqa: PTH109, PTH118
        joined = _JOINED.match(relative)
        if joined is not None and not os.path.lexists(text[: len(text) - len(relative)] + f"{joined[1]}:"):
            return relative
    return text


def _opener(scheme: str) -> Opener | None:
    if scheme not in _openers:
        from importlib.metadata import entry_points  # it takes 20 ms to import, and few need it

        for found in entry_points(group=_GROUP, name=scheme):
            register_store(scheme, found.load())
    if scheme not in _openers:
        from holdfast.store.fsspec_store import FsspecStore, is_known  # fsspec takes 50 ms to import

        if is_known(scheme):
            register_store(scheme, FsspecStore)
    return _openers.get(scheme)


def _unknown(text: str, scheme: str) -> ConfigurationError:
    if scheme.lower() == "hf":
        return ConfigurationError(
            f"'{text}' names a model of the Hugging Face Hub, which holdfast does not download.",
            code="config.scheme",
            action="Download it first, as by huggingface-cli download, and name the folder.",
            path=text,
        )
    return _no_folder(text, f" with {scheme}://, which no installed package opens")


def _no_folder(text: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"'{text}' is a URL{what}.",
        code="config.scheme",
        action="Use a folder of a local or shared file system, such as /shared/runs/a, or s3://, gs:// or az://.",
        path=text,
    )
