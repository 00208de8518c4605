"""The passes of a loader of accelerate: their samples, and how a pass skips its first batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from torch.utils.data import IterableDataset, SequentialSampler


class LoaderShape(NamedTuple):
    """The facts that decide which samples a batch has: the number of samples (-1 if nobody knows), of the samples of a
    batch of all ranks, and of ranks."""

    num_samples: int
    batch_size: int
    world_size: int


def shape_of(loader: Any, *, world_size: int, per_rank: int) -> LoaderShape:
    """The shape of `loader`, whose batches have `per_rank` samples on each rank if it does not say otherwise."""
    num_samples = length_of(getattr(loader, "dataset", None))
    batch_size = getattr(loader, "total_batch_size", per_rank * world_size)
    return LoaderShape(-1 if num_samples is None else num_samples, batch_size, world_size)


def length_of(item: object) -> int | None:
    """The length of `item`; None if it has none."""
    try:
        return len(item)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def sampler_of(loader: Any) -> Any:
    """The sampler that gives the samples of `loader`; None if it has none."""
    return loader.get_sampler() if hasattr(loader, "get_sampler") else getattr(loader, "sampler", None)


def countable_sampler(loader: Any) -> Any:
    """The sampler of `loader`, if its order depends on the epoch alone; else None."""
    if not hasattr(loader, "set_sampler") or isinstance(loader, DataLoaderDispatcher):
        return None
    sampler = sampler_of(loader)
    return sampler if isinstance(sampler, SeedableRandomSampler | SequentialSampler) else None


def skipping(loader: Any, batches: int) -> Callable[[], None]:
    """Have `loader` skip its first batches. Returns a function that undoes it."""
    if hasattr(loader, "skip_batches") and (
        isinstance(loader, DataLoaderDispatcher) or isinstance(loader.dataset, IterableDataset)
    ):
        loader.skip_batches = batches
        return lambda: setattr(loader, "skip_batches", 0)
    rest = skip_first_batches(loader, batches)
    if not hasattr(loader, "base_dataloader"):
        return iterate(loader, lambda: iter(rest))
    before = loader.base_dataloader
    loader.base_dataloader = rest.base_dataloader
    return lambda: setattr(loader, "base_dataloader", before)


def iterate(loader: Any, begin: Callable[[], Iterator[Any]]) -> Callable[[], None]:
    """Have `begin` begin each iteration of `loader`. Returns a function that undoes it.

    Loops hold the loader itself, and an iteration begins with a method of its class, so the loader gets another class.
    Loaders of accelerate show that of the loader inside as theirs, hence the way through `object`.
    """
    kind = type(loader)
    set_class = vars(object)["__class__"].__set__
    set_class(loader, type(kind.__name__, (kind,), {"__iter__": lambda _: begin()}))

    def undo() -> None:
        set_class(loader, kind)

    return undo
