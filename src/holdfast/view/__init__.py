"""Lazy reading of a checkpoint: metadata without data, and any slice of any tensor by ranged reads."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy.typing as npt

from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import NotFoundError
from holdfast.format import values as value_codec
from holdfast.format.near import near
from holdfast.format.patterns import Globs
from holdfast.format.values import Open, TorchValue, Undecoded
from holdfast.interop.formats import find_state
from holdfast.options import check_flag
from holdfast.run.leases import ReadLease, leased
from holdfast.run.paths import parse, some_quoted
from holdfast.state.registered_types import decode
from holdfast.store.base import Location
from holdfast.view.nested import nested, tensors_in
from holdfast.view.order import Piece, in_file_order
from holdfast.view.source import ViewSource
from holdfast.view.tensor import LazyTensor, as_numpy, as_torch, numpy_dtype
from holdfast.wording import count

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LazyTensor", "Piece", "View", "open"]


class View:
    """A checkpoint, opened for reading. Needs no process group, opens no epoch, changes nothing. Safe for several
    threads.

    A view and its lazy tensors may be pickled, for spawned workers: each worker opens the same checkpoint again.
    """

    def __init__(self, checkpoint: StoredState, *, verify: bool, lease: ReadLease | None = None) -> None:
        self._checkpoint = checkpoint
        self._source = ViewSource(checkpoint, verify=verify)
        if lease is not None:
            finalize(self._source, lease.end)

    def __reduce__(self) -> tuple[object, ...]:
        return _over, (self._source,)

    @property
    def step(self) -> int:
        """The step it was saved at; -1 for a checkpoint of another system."""
        return self._checkpoint.record.step

    @property
    def place(self) -> str:
        """Its place in the run's history, such as ``3.12``; empty for a checkpoint of another system."""
        return str(self._checkpoint.record.place or "")

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that the save recorded, by name."""
        return dict(self._checkpoint.record.metrics)

    @property
    def path(self) -> str:
        """The checkpoint's folder."""
        return self._checkpoint.folder

    @property
    def in_history(self) -> bool:
        """Whether it is in the history of a run; false if it was opened as a folder outside any history."""
        return self._checkpoint.record.in_history

    @property
    def aliases(self) -> Mapping[str, str]:
        """The aliases of tied tensors, and for each alias the name that the tensor is stored under."""
        return self._checkpoint.manifest.body.aliases

    def __repr__(self) -> str:
        what = self._checkpoint.record.kind if not self.place else f"step {self.step} at {self.place}"
        return f"<View of {what}: {count(len(self._names), 'tensor')}\n  {self.path}>"

    @property
    def diverged(self) -> tuple[str, ...]:
        """Names of the tensors whose copies on several ranks differed when they were saved; one copy was stored."""
        return self._checkpoint.record.diverged

    def names(self) -> list[str]:
        """Names of all stored tensors, sorted."""
        return list(self._names)

    def value_names(self) -> list[str]:
        """Names of all values, sorted."""
        return sorted(
            path
            for path, node in self._checkpoint.nodes.items()
            if isinstance(value_codec.bare(node), value_codec.Leaf)
        )

    def value(self, name: str) -> object:
        """One value, or the values and lazy tensors below a name, in the containers they were saved in.

        A value of a registered type is decoded if the type is registered here; otherwise it is returned in its encoded
        form, with the name of the type. A `PerRank` is the list of all ranks' parts. A generator stays a `TorchValue`,
        with the name of its device and the bytes of its state, because this machine may not have that device.
        """
        nodes = self._checkpoint.nodes
        if name not in nodes and name in self:
            raise NotFoundError(
                f"{name!r} is a tensor, and no value.",
                code="not_found.value",
                action=f"Read it with view[{name!r}].",
                tensor=name,
                path=self.path,
            )
        return value_codec.rebuild(nodes, name, tensors=self.__getitem__, revive=_revived, decode=decode)

    def __getitem__(self, name: str) -> LazyTensor:
        """The tensor with this name or alias. Raises `NotFoundError`, which lists close matches."""
        if not isinstance(name, str):
            raise TypeError(f"index a view by the name of a tensor, not by {name!r}")
        number = self._number(name)
        if number is None:
            raise self._nothing(
                name, f"tensor {name!r}", "List its names with view.names().", instead=self._other(name)
            )
        return LazyTensor(self._source, number)

    def __iter__(self) -> Iterator[str]:
        """The names of all stored tensors, sorted."""
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._number(name) is not None

    def numpy(self, globs: str | Sequence[str] = "**") -> dict[str, npt.NDArray[Any]]:
        """All whole tensors whose names or aliases match, by name; a tied tensor is one array under each of its names.

        In a glob, ``*`` stands for any text without ``/``, and ``**`` for any text. A glob that matches the name of a
        container, such as ``model``, matches everything below it; a glob after ``!`` leaves names out. Reads each file
        once, in little memory besides the result. The arrays are those of `LazyTensor.numpy`.

        Raises `NotFoundError` if a glob matches nothing.
        """
        numbers = self._matching(globs)
        arrays = self._numpy(set(numbers.values()))
        return {name: arrays[number] for name, number in numbers.items()}

    def torch(self, globs: str | Sequence[str] = "**") -> dict[str, Tensor]:
        """As `numpy`, but torch tensors on the CPU."""
        numbers = self._matching(globs)
        tensors = self._torch(set(numbers.values()))
        return {name: tensors[number] for name, number in numbers.items()}

    def tree(self, name: str = "", *, numpy: bool = False) -> object:
        """Everything at and below `name` (by default: the whole checkpoint): values, and whole tensors (of torch, or as
        numpy arrays).

        Containers have the types that were saved. Modules, optimizers and parameters with slots become dictionaries by
        the parts of their names. Values of registered types are decoded as in `value`; with `numpy` they stay encoded,
        and torch dtypes, devices and sizes are `TorchValue`, too. Reads each file once, and only the values below
        `name`. Raises `NotFoundError` if nothing has this name.
        """
        nodes = nested(self._checkpoint.nodes, [*self._names, *self.aliases], name)
        if name not in nodes:
            raise self._nothing(name, f"tensor and no value at or below {name!r}", "List the names with view.names().")
        numbers = {tensor: self[tensor].number for tensor in tensors_in(nodes)}
        found: Mapping[int, object] = (self._numpy if numpy else self._torch)(set(numbers.values()))
        tensors = {tensor: found[number] for tensor, number in numbers.items()}.__getitem__
        if numpy:
            return value_codec.rebuild(nodes, name, tensors, decode=Undecoded)
        return value_codec.rebuild(nodes, name, tensors, revive=_revived, decode=decode)

    def in_file_order(self, globs: str | Sequence[str] = "**") -> Iterator[Piece]:
        """The stored pieces of all tensors whose names match, in the order of the files: for converters.

        Reads each file once, front to back, and a little ahead. Takes 16 MiB of memory besides the piece; a piece over
        64 MiB comes in several parts. The arrays belong to the caller. They have the dtypes of `LazyTensor.numpy`, or
        integers of the same size if numpy has no such dtype, and are read-only and mapped if `LazyTensor.numpy` would
        map them. A tensor without elements has no piece. Raises `NotFoundError` if a glob matches nothing, and
        `CorruptError` at the first damaged block.
        """
        return in_file_order(self._source, set(self._matching(globs, aliases=False).values()))

    @property
    def _names(self) -> Sequence[str]:
        return self._checkpoint.manifest.body.names

    def _number(self, name: str) -> int | None:
        """The number of the tensor with this name or alias. A search finds it without a table, because names are
        sorted."""
        name = self.aliases.get(name, name)
        at = bisect_left(self._names, name)
        return at if at < len(self._names) and self._names[at] == name else None

    def _matching(self, globs: str | Sequence[str], *, aliases: bool = True) -> dict[str, int]:
        wanted = Globs(globs)
        numbers = {name: number for number, name in enumerate(self._names) if name in wanted}
        if aliases:
            numbers |= {name: self[name].number for name in self.aliases if name in wanted}
        for glob in wanted.unmatched():
            raise self._nothing(glob, f"tensor whose name matches {glob!r}", "List the names with view.names().")
        return numbers

    def _numpy(self, numbers: Collection[int]) -> dict[int, npt.NDArray[Any]]:
        dtypes = {number: numpy_dtype(self._checkpoint.manifest.dtype(number)) for number in sorted(numbers)}
        held = self._source.whole(list(dtypes), private=False)
        writeable = self._source.verify
        return {n: as_numpy(array, dtypes[n], writeable=writeable) for n, array in zip(dtypes, held, strict=True)}

    def _torch(self, numbers: Collection[int]) -> dict[int, Tensor]:
        dtypes = {number: self._checkpoint.manifest.dtype(number) for number in sorted(numbers)}
        held = self._source.whole(list(dtypes), private=True)
        return {n: as_torch(array, dtypes[n]) for n, array in zip(dtypes, held, strict=True)}

    def _other(self, name: str) -> str:
        """Advice how to read a `name` that is not a tensor's; empty if nothing has this name."""
        below = (f"{name}/", f"{name}.")
        parts = [node for path, node in self._checkpoint.nodes.items() if path == name or path.startswith(below[0])]
        if parts and not any(
            isinstance(node := value_codec.bare(part), Open) and node.kind != "dict" for part in parts
        ):
            return f"It is a value, or holds values: read it with view.value({name!r})."
        if parts or any(other.startswith(below) for other in self._names):
            return f"It is not a tensor, but holds tensors: read all of them with view.tree({name!r})."
        return ""

    def _nothing(self, name: str, what: str, action: str, *, instead: str = "") -> NotFoundError:
        close = near(name, [*self._names, *self.aliases])
        return NotFoundError(
            f"{self.path} holds no {what}.",
            code="not_found.tensor",
            action=instead or (f"Did you mean {some_quoted(close)}?" if close else action),
            tensor=name,
            path=self.path,
        )


def open(path: str | os.PathLike[str] | Location, *, verify: bool = True) -> View:  # noqa: A001
    """Open a checkpoint for lazy reading: a run (its head), ``RUN@step=700``, ``RUN@3.12``, or a checkpoint folder;
    or a checkpoint of another system, as in `load`.

    Reads metadata only. With ``verify=False``, later reads do not check digests, and map local files if the elements
    lie in one piece.

    Raises:
        NotFoundError: there is no such run or checkpoint; the error lists close matches.
        CorruptError: the records or the manifest are damaged.
    """
    check_flag("verify", verify)
    found = find_state(parse(path))
    return View(found.state, verify=verify, lease=None if found.located is None else leased(found.located))


def _revived(value: TorchValue) -> object:
    """The torch dtype, device or size that `value` stands for; a generator stays encoded."""
    from holdfast.state.local_placements import revive  # here, because a view of other values does not need torch

    return value if value.kind == "generator" else revive(value)


def _over(source: ViewSource) -> View:
    return View(source.checkpoint, verify=source.verify)
