"""`plan_load`: predicts the outcome of a load into a live state on this rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from holdfast.control.torch_store import group_ranks
from holdfast.format.patterns import Globs
from holdfast.interop.formats import find_state
from holdfast.loading.load_options import LoadOptions
from holdfast.loading.wanted import wanted
from holdfast.mapping import Rule
from holdfast.mapping.apply import mapped
from holdfast.mapping.parts import stored_tensors
from holdfast.reports import listed, origin, printed, size
from holdfast.run.paths import parse
from holdfast.state.bind import bind
from holdfast.state.match import Terms
from holdfast.store.base import Location
from holdfast.wording import count


@dataclass(frozen=True, repr=False)
class LoadPlan:
    """The outcome of a load on one rank, as far as this rank can predict it alone.

    Names are as in `LoadReport`, but of this rank: another rank may hold names that are `unexpected` here. `unmatched`
    are globs of ``select`` and ``cast`` that match no live name here. `read_nbytes` has for each data file the bytes of
    the blocks that this rank needs, wholly or in part; the ranks of a node read a block only once that several need.
    """

    step: int
    place: str
    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unmatched: tuple[str, ...]
    resharded: tuple[str, ...]
    cast: tuple[str, ...]
    needed_nbytes: int
    read_nbytes: Mapping[str, int]

    def __repr__(self) -> str:
        names = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "globs that match nothing": self.unmatched,
            "cast": self.cast,
            "resharded": self.resharded,
        }
        lines = [line for what, which in names.items() for line in listed(what, which)]
        first = f"{origin(self.step, self.place)}: {count(len(self.loaded), 'name')}, {size(self.needed_nbytes)}"
        return printed("LoadPlan", first, self.path, *lines)


def plan_load(
    path: str | os.PathLike[str] | Location,
    into: Mapping[str, object],
    *,
    select: str | Sequence[str] | None = None,
    mapping: Sequence[Rule] | None = None,
    cast: bool | str | Sequence[str] | None = None,
    group: ProcessGroup | None = None,
) -> LoadPlan:
    """Predict what `load` would do with the same arguments on this rank. Loads nothing, and does not change `into`.

    Blocking, but not collective: any rank may call it alone. Reads the records, the manifest and values, but no
    tensors. Until it returns, it takes memory for optimizer state that the live optimizers do not have yet.

    Raises as `load` does, except for names that only one side has and globs that match nothing: it lists those.
    """
    options = LoadOptions(select, mapping, cast)
    checkpoint = find_state(parse(path)).state
    record = checkpoint.record
    ranks = group_ranks(group)
    rank = dist.get_rank() if len(ranks) > 1 else ranks[0]
    chosen, casts = options.select(), options.cast()
    body = checkpoint.manifest.body
    table = mapped(options.mapping, stored_tensors(checkpoint.manifest), body.aliases, checkpoint.nodes)
    terms = Terms(chosen, casts, table.equal, table.partly_kept(), is_strict=False)
    binding = bind(
        into,
        table.stored,
        table.aliases,
        table.nodes,
        strict=False,
        rank=ranks.index(rank),
        world_size=len(ranks),
        terms=terms,
    )
    needs = wanted(checkpoint, binding, table.parts, rank)
    jobs = checkpoint.jobs(needs.wants, needs.targets)
    return LoadPlan(
        step=record.step,
        place=str(record.place or ""),
        path=checkpoint.folder,
        loaded=tuple(binding.loaded),
        missing=tuple(binding.missing),
        unexpected=tuple(binding.unexpected),
        unmatched=tuple(glob for given in (chosen, casts) if isinstance(given, Globs) for glob in given.unmatched()),
        resharded=tuple(sorted(needs.resharded(checkpoint))),
        cast=tuple(sorted(needs.cast)),
        needed_nbytes=needs.targets.nbytes,
        read_nbytes={checkpoint.key(file): int((job.ranges() @ [-1, 1]).sum()) for file, job in jobs},
    )
