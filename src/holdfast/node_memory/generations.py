"""Generations: the manifest of the checkpoint whose data files lie in slots, and the run that it belongs to.

Beside the slots of a node lies one file per generation. It holds all that a keeper, or a later job, needs to make a
checkpoint of the slots. The first rank of the node to reach that point creates it atomically; all ranks would write the
same bytes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import msgspec
import xxhash

from holdfast.decoding import decode_msgpack
from holdfast.errors import ConfigurationError, CorruptError
from holdfast.format.records import Place
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.store.base import Location

_PREFIX: Final = "generation-"
_GIVEN_UP_PREFIX: Final = "given-up-"
_PROTECTED_PREFIX: Final = "protected-"
_MAGIC: Final = b"HFGENER1"
_DIGEST_NBYTES: Final = 16


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint in memory, with its encoded `manifest`. It will be written to ``checkpoints/<folder>`` of the run at
    `run`, whose store is opened with `options`. Its epoch was opened with `incarnation` (empty: not recorded). Its
    files go to the folder `disk` of the node first (empty: to the run at once)."""

    run: str
    folder: str
    checkpoint_id: str
    place: Place
    step: int
    manifest: bytes
    incarnation: str = ""
    options: tuple[tuple[str, str], ...] = ()
    disk: str = ""

    @property
    def location(self) -> Location:
        """The location of the run."""
        return Location(self.run, self.options)


def write_generation(folder: NodeFolder, generation: Generation) -> None:
    """Write `generation` to `folder`; does nothing if it is there already."""
    name = _PREFIX + generation.checkpoint_id
    if name in folder.names():
        return
    folder.write(name, encode_generation(generation))


def encode_generation(generation: Generation) -> bytes:
    """The bytes of a generation's file."""
    payload = msgspec.msgpack.encode(generation)
    return _MAGIC + xxhash.xxh3_128_digest(payload) + payload


def read_generation(folder: NodeFolder, checkpoint_id: str) -> Generation:
    """Read the generation of a checkpoint.

    Raises `FileNotFoundError` where there is none, and `CorruptError` where its file is damaged, or other users may
    use it.
    """
    name = _PREFIX + checkpoint_id
    data = b""
    with suppress(ConfigurationError), os.fdopen(folder.open(name), "rb") as file:
        data = file.read()
    return decode_generation(data, path=str(folder.path / name), tier="node memory")


def decode_generation(data: bytes, *, path: str, tier: str) -> Generation:
    """The generation in the bytes of its file at `path`. Raises `CorruptError` where they are damaged."""
    start = len(_MAGIC) + _DIGEST_NBYTES
    payload = data[start:]
    if data[:start] == _MAGIC + xxhash.xxh3_128_digest(payload):
        with suppress(msgspec.DecodeError):
            return decode_msgpack(payload, Generation)
    raise CorruptError(
        f"'{path}' is damaged.",
        code="corrupt.generation",
        action="No action needed: holdfast skips it, and uses an older one or storage.",
        path=path,
        tier=tier,
    )


def give_up_generation(folder: NodeFolder, checkpoint_id: str) -> None:
    """Tell the keeper to free the slots of a generation that can never be whole, because some rank has no part of
    it."""
    with suppress(FileExistsError, FileNotFoundError):  # a folder that was removed has no slots to free
        os.close(folder.create(_GIVEN_UP_PREFIX + checkpoint_id))


def given_up_ids(folder: NodeFolder) -> set[str]:
    """The checkpoint ids of all generations that were given up."""
    return {name.removeprefix(_GIVEN_UP_PREFIX) for name in folder.names() if name.startswith(_GIVEN_UP_PREFIX)}


def mark_protected(folder: NodeFolder, checkpoint_id: str) -> None:
    """Record that each file of a generation, of all nodes, has all its copies on other nodes."""
    with suppress(FileExistsError, FileNotFoundError):
        os.close(folder.create(_PROTECTED_PREFIX + checkpoint_id))


def unmark_protected(folder: NodeFolder, checkpoint_id: str) -> None:
    """Record that a generation has to be protected anew."""
    folder.discard(_PROTECTED_PREFIX + checkpoint_id)


def is_protected(folder: NodeFolder, checkpoint_id: str) -> bool:
    """Whether a generation is protected."""
    return folder.has(_PROTECTED_PREFIX + checkpoint_id)


def protected_ids(folder: NodeFolder) -> set[str]:
    """The checkpoint ids of all generations that are protected."""
    return {name.removeprefix(_PROTECTED_PREFIX) for name in folder.names() if name.startswith(_PROTECTED_PREFIX)}


def remove_generation(folder: NodeFolder, checkpoint_id: str) -> None:
    """Remove the files about a generation, if they are there and can be removed."""
    folder.discard(_PROTECTED_PREFIX + checkpoint_id)  # first: a mark without its generation would mean nothing
    folder.discard(_PREFIX + checkpoint_id)
    folder.discard(_GIVEN_UP_PREFIX + checkpoint_id)


def generation_ids(folder: NodeFolder) -> list[str]:
    """The checkpoint ids of all generations in `folder`, also of those of which only marks are left."""
    held = {name.removeprefix(_PREFIX) for name in folder.names() if name.startswith(_PREFIX)}
    return sorted(held | protected_ids(folder))
