"""The buckets of a distributed optimizer in a folder of Megatron (``dp_reshardable``), as what a load fills it from.

In the format ``dp_zero_gather_scatter`` all buckets of a buffer are one, without the padding between them.

A bucket is a 1-d tensor of the elements of many parameters, in the order of the job that saved it. A job with the same
tensor, pipeline and expert parallelism, and the same sizes of buckets, has the same buckets, whatever its number of
data-parallel ranks: each rank has ranges of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from holdfast.format.names import component, join
from holdfast.frameworks import BindingSource
from holdfast.frameworks.megatron_trained import BucketPlace, TrainedRange
from holdfast.frameworks.piecewise import Piecewise
from holdfast.geometry import Box, FlatRange
from holdfast.interop.megatron_names import BUCKETS
from holdfast.mapping.megatron_optimizers import MASTER
from holdfast.mapping.parts import StoredTensor

#: In the name of a bucket; that of a whole buffer lacks it.
_BUCKET: Final = ".bucket_idx_"
_CODE: Final = "incompatible.megatron_buckets"
_SAME: Final = (
    "was saved in buckets ({}), which only a job with the same tensor, pipeline and expert parallelism and "
    "the same bucket sizes has"
)


def has_buckets(path: str, source: BindingSource) -> bool:
    """Whether the optimizer at `path` is stored in buckets."""
    return join(path, BUCKETS) in source.nodes


class BucketLoad:
    """The load of a chain of optimizers from buckets; `chain` has the ranges that each of them trains on this rank.

    Binds the live slots. Refuses the load where the checkpoint has other buckets than the job.
    """

    def __init__(self, path: str, chain: Sequence[Sequence[TrainedRange]], source: BindingSource) -> None:
        self._path = path
        self._source = source
        self._made: list[tuple[TrainedRange, Mapping[str, torch.Tensor]]] = []
        self._pieces: dict[str, list[tuple[FlatRange | Box, torch.Tensor]]] = {}
        fits = [
            self._add(f"chained_{number}." if len(chain) > 1 else "", each)
            for number, ranges in enumerate(chain)
            for each in ranges
        ]
        if not all(fits):
            names = list(source.stored_below(join(path, BUCKETS)))
            is_gathered = not any(_BUCKET in name for name in names)
            source.refuse(_CODE, path, _SAME.format("dp_zero_gather_scatter" if is_gathered else "dp_reshardable"))
            for name in names:
                source.mark(name)
            return
        for name, pieces in self._pieces.items():
            stored = source.stored(name)
            assert stored is not None
            source.live(name, Piecewise(stored.shape, pieces, replicas="split"))

    def finish(self) -> None:
        """Give the optimizers the slots that they did not have."""
        for each, slots in self._made:
            each.inner.state[each.main].update(slots)

    def _add(self, prefix: str, each: TrainedRange) -> bool:
        """Add the slots of one range. Returns whether the checkpoint has its bucket."""
        for place in each.places:
            above = join(self._path, BUCKETS, component(prefix + place.key))
            stored = {name.rpartition("/")[2]: name for name in self._source.stored_below(above)}
            if stored:
                return self._add_slots(each, place, stored)
        return False

    def _add_slots(self, each: TrainedRange, place: BucketPlace, stored: Mapping[str, str]) -> bool:
        tensors = {slot: tensor for slot, name in stored.items() if (tensor := self._source.stored(name)) is not None}
        if MASTER not in tensors or any(tensor.shape != (place.numel,) for tensor in tensors.values()):
            return False
        for slot, memory in self._memory(each, tensors).items():
            self._add_piece(stored[slot], place, memory)
        if not each.is_master:
            self._source.mark(stored[MASTER])
        return True

    def _memory(self, each: TrainedRange, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        """The memory of the slots that are stored, new where the optimizer has none yet."""
        live = {**each.slots(), **({MASTER: each.main} if each.is_master else {})}
        lacking = {slot: getattr(torch, tensor.dtype) for slot, tensor in stored.items() if slot not in (*live, MASTER)}
        made = {slot: torch.zeros_like(each.main.detach(), dtype=dtype) for slot, dtype in lacking.items()}
        if made:
            self._made.append((each, made))
        return {**live, **made}

    def _add_piece(self, name: str, place: BucketPlace, memory: torch.Tensor) -> None:
        flat = memory.detach().view(-1)
        self._pieces.setdefault(name, []).append((FlatRange(place.start, place.start + flat.numel()), flat))
