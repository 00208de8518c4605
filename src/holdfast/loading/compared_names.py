"""The comparison of a checkpoint's names with those of a live state, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.errors import IncompatibleError
from holdfast.format.names import own_part
from holdfast.format.patterns import Globs, check_matched
from holdfast.format.values import Node
from holdfast.geometry import Shape
from holdfast.mapping.parts import StoredTensor
from holdfast.state.binding import Binding
from holdfast.state.differences import difference
from holdfast.state.meta import check_fillable


class Names(msgspec.Struct, frozen=True, array_like=True):
    """The differences in names that one rank finds, or all ranks together: names that only one side has, tensors that
    stay on the meta device (`on_meta`), and those of them that no checkpoint can have (`unfillable`).

    `unmatched` has for each option its globs that match no live name, each with similar names. `missing_shapes` are the
    shapes of missing tensors. `num_loaded` counts the names that are loaded, `num_filled` the live tensors that the
    checkpoint has, and `num_lost` those that it does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    on_meta: tuple[str, ...]
    unfillable: tuple[str, ...]
    unmatched: dict[str, dict[str, list[str]]]
    missing_shapes: dict[str, Shape] = {}
    num_loaded: int = 0
    num_filled: int = 0
    num_lost: int = 0

    @staticmethod
    def of(binding: Binding, globs: Mapping[str, Globs | bool | None]) -> Names:
        """The names that one rank found; `globs` are those of each option, after a look-up of all live names."""
        unmatched = {option: given.unmatched() for option, given in globs.items() if isinstance(given, Globs)}
        missing, unexpected = tuple(binding.missing), tuple(binding.unexpected)
        return Names(
            missing,
            unexpected,
            tuple(binding.on_meta),
            tuple(binding.unfillable),
            unmatched,
            binding.missing_shapes,
            len(binding.loaded),
            len(binding.targets),
            binding.num_lost,
        )


def compared(
    ranks: Sequence[Names],
    stored: Mapping[str, StoredTensor],
    nodes: Mapping[str, Node],
    *,
    strict: bool,
    allow_empty: bool = False,
    select: Globs | None = None,
) -> Names:
    """The names that some rank misses, the names that no rank expects, and the tensors that stay on the meta device on
    some rank.

    `stored` and `nodes` are the checkpoint's tensors and values, after a mapping. `select` has the live names that the
    load fills.

    Raises:
        IncompatibleError: with `strict`, there are such names, or tensors on the meta device that no checkpoint can
            have; a glob matches no live name of any rank; without `allow_empty`, nothing is loaded, or no tensor into
            a state with tensors.
    """
    missing = sorted(set().union(*(rank.missing for rank in ranks)))
    shared = set(ranks[0].unexpected).intersection(*(rank.unexpected for rank in ranks[1:]))
    # Only the rank to which a name belongs alone can expect it.
    own = {name for rank in ranks for name in rank.unexpected if own_part(name) is not None}
    unexpected = sorted(shared | own)
    for option in ranks[0].unmatched:
        check_matched(option, [rank.unmatched[option] for rank in ranks], where="the live state")
    shapes = {name: shape for rank in ranks for name, shape in rank.missing_shapes.items()}
    if strict and (missing or unexpected):
        raise difference(missing, unexpected, stored, nodes, shapes, select=select)
    if not strict and not allow_empty and _is_empty(ranks):
        raise _nothing(difference(missing, unexpected, stored, nodes, shapes, select=select))
    unfillable = sorted({name for rank in ranks for name in rank.unfillable})
    if strict:
        check_fillable(unfillable)
    on_meta = sorted({name for rank in ranks for name in rank.on_meta})
    return Names(tuple(missing), tuple(unexpected), tuple(on_meta), tuple(unfillable), {})


def _is_empty(ranks: Sequence[Names]) -> bool:
    """Whether nothing is loaded, or only values into a state with tensors: then names are probably misspelt."""
    if any(rank.num_filled for rank in ranks):
        return False
    return any(rank.num_lost for rank in ranks) or not any(rank.num_loaded for rank in ranks)


def _nothing(names: IncompatibleError) -> IncompatibleError:
    return IncompatibleError(
        f"No tensor of the live state is in the checkpoint, so the load would not change it. {names.message}",
        code="incompatible.nothing",
        action="Give both the same names, map the stored ones with mapping=, or pass allow_empty=True to load nothing.",
        tensor=names.tensor,
        details=names.details,
    )
