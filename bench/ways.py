"""A way to save and load a state, which every contender is to the runner; and where it does so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from bench.raw import RawImage
from bench.schema import Contender
from bench.state import Live, Recipe, State
from holdfast.run.history import Run
from holdfast.run.removal import remove_checkpoint
from holdfast.store.base import Location
from holdfast.store.urls import open_store


class Pending(NamedTuple):
    """A save that may still be under way on this rank when its call returns; by default, one that is over.

    `wait` returns when it is durable, as far as the contender makes it so, and raises why it failed. The state may
    change when `unlock` has returned: by then it `is_copied`, or the contender waits in the change itself. `persist_s`
    are the seconds from the end of the copy until all was durable, where the contender tells.
    """

    wait: Callable[[], object] = lambda: None
    is_over: Callable[[], bool] = lambda: True
    is_copied: Callable[[], bool] = lambda: True
    unlock: Callable[[], object] = lambda: None
    persist_s: Callable[[], float | None] = lambda: None

    @staticmethod
    def of(ended: Future[Any], copied: Future[Any] | None = None) -> Pending:
        """A save with a future for its end, and one for a copy in the background."""
        return Pending(ended.result, ended.done, *(() if copied is None else (copied.done, copied.result)))


class Comparable(Protocol):
    """The state that a load fills: a turn clears it before the load, and compares it with the saved one after it."""

    def clear(self) -> None: ...

    def digests(self) -> dict[str, str]: ...


@dataclass
class Site:
    """The recipe of the state that a rank saves, and the places for it: a folder on the device, and one in memory."""

    recipe: Recipe
    folder: Path
    node_dir: Path

    @cached_property
    def state(self) -> State:
        return self.recipe.build(dist.get_world_size())

    @cached_property
    def live(self) -> Live:
        return Live(self.state)

    @cached_property
    def image(self) -> RawImage:
        """The bytes that the raw limit writes for this rank."""
        return RawImage(self.state.share(dist.get_rank(), dist.get_world_size()))


class Way:
    """A contender's way to save and load a state. All methods are collective; each way has `load`, and `save` or
    `begin`, whose first call sets up what it needs.
    """

    name = ""
    #: The step that makes its saves durable.
    durable = "no"
    #: The optional package that it needs.
    package = ""
    #: All its saves go into one run; of another way, each goes into a folder of its own.
    one_run = False

    def __init__(self, site: Site, entrant: str) -> None:
        self.site = site
        self.state = site.state
        self.entrant = entrant

    @classmethod
    def about(cls) -> Contender:
        return Contender(cls.name, cls.durable)

    def place(self, what: object) -> Path:
        """The folder that it saves `what` into, and loads it from."""
        return self.site.folder / self.entrant.replace(" ", "-") / ("run" if self.one_run else str(what))

    def discard(self, folder: Path) -> None:
        """Delete what is in `folder`, of a run all but its head. For one rank to call."""
        if self.one_run:
            run = opened(folder)
            for commit in list(run.lineage())[1:]:
                remove_checkpoint(run, commit)
        else:
            shutil.rmtree(folder)

    @property
    def memory(self) -> Comparable:
        return self.state

    def save(self, folder: Path) -> None:
        """Save into `folder`. Returns when this rank's part is durable."""
        self.begin(folder).wait()

    def begin(self, folder: Path) -> Pending:
        """Save into `folder`, or begin to; what training waits for is the time of this call."""
        self.save(folder)
        return Pending()

    def load(self, folder: Path) -> None:
        """Load the last save, which went into `folder`, into the same memory."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything, when all that was begun is over."""


def opened(folder: Path) -> Run:
    return Run.open(open_store(Location(str(folder))))
