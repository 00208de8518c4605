"""The random numbers of a Megatron job, as the state of each rank that `RandomState` and Megatron's tracker have.

Megatron stores them once for each pair of a pipeline stage and a tensor-parallel rank, whose data-parallel ranks have
the same, unless each was seeded for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Final, NamedTuple

import numpy as np

from holdfast.format.names import component, join, rank_component
from holdfast.format.values import Node, Stateful, TableNode
from holdfast.interop.megatron_archives import ObjectArchive
from holdfast.interop.megatron_names import RandomShard
from holdfast.interop.pickle_machine import PickledObject, PickleError
from holdfast.interop.pickled_tree import PickledTree, RankParts, pickled_tree
from holdfast.interop.torch_globals import PickledTensor

#: The entries of `megatron_state`: the generators of Python, numpy and torch, and those of the tracker.
_RANDOM: Final = "random"
_TRACKER: Final = "model_parallel_random"
_MAX_RANKS: Final = 1 << 16


class StoredRandom(NamedTuple):
    """The random numbers of the ranks of one shard, and the archive that has them."""

    shard: RandomShard
    states: object
    source: ObjectArchive


class _ShardOwners(NamedTuple):
    """Which ranks a shard belongs to: the number of ranks, and how they are counted."""

    world_size: int
    stages: int
    columns: int
    in_stage: int

    def shard(self, rank: int) -> tuple[int, int, int]:
        """The stage and the column of a rank, and its number among the ranks that have both in common."""
        stage = rank // self.in_stage % self.stages
        outer = rank // (self.in_stage * self.stages)
        return (
            stage,
            rank % self.columns,
            outer * (self.in_stage // self.columns) + rank % self.in_stage // self.columns,
        )


def random_tree(stored: Iterable[StoredRandom], arguments: Mapping[str, object]) -> PickledTree:
    """The states of all ranks, as entries of a state. `arguments` are those of the job, which say how many ranks it
    had. An error stands for what cannot be read."""
    held = {(each.shard.stage, each.shard.column): each for each in stored}
    if not held:
        return PickledTree()
    try:
        return _tree(held, _layout(next(iter(held.values())).shard, arguments))
    except (PickleError, KeyError, IndexError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, PickleError) else f"they have another form ({error!s:.100})"
        return PickledTree(nodes=dict.fromkeys((_RANDOM, _TRACKER), PickleError(f"random numbers: {reason}")))


def _layout(shard: RandomShard, arguments: Mapping[str, object]) -> _ShardOwners:
    """The layout of the job. One without arguments is taken for one without data parallelism."""
    least = shard.stages * shard.columns
    given, context = arguments.get("world_size"), arguments.get("context_parallel_size")
    world_size = given if type(given) is int and given % least == 0 and given else least
    if not 0 < world_size <= _MAX_RANKS:
        raise PickleError(f"they are those of {world_size} ranks")
    in_stage = world_size // shard.stages
    if arguments.get("use_tp_pp_dp_mapping") is True:
        in_stage = shard.columns * (context if type(context) is int and context > 0 else 1)
        if world_size % (in_stage * shard.stages):
            raise PickleError("their ranks make up no layout")
    return _ShardOwners(world_size, shard.stages, shard.columns, in_stage)


def _tree(held: Mapping[tuple[int, int], StoredRandom], layout: _ShardOwners) -> PickledTree:
    read = {place: list(_states(each)) for place, each in held.items()}
    general: dict[int, object] = {}
    tracked: dict[int, dict[str, object]] = {}
    for rank in range(layout.world_size):
        stage, column, number = layout.shard(rank)
        states = read[stage, column]
        general[rank], tracked[rank] = states[number if len(states) > 1 else 0]
    tree = pickled_tree(_RANDOM, RankParts(general, layout.world_size))
    others = pickled_tree(_TRACKER, RankParts({**tracked}, layout.world_size))
    tree.nodes.update(others.nodes)
    tree.items.update(others.items)
    for rank in range(layout.world_size):
        tree.nodes[_of_rank(_RANDOM, rank)] = _stateful(tree.nodes[_of_rank(_RANDOM, rank)])
        names = tuple(component(name) for name in tracked[rank])
        tree.nodes[_of_rank(_TRACKER, rank)] = Stateful(TableNode("dict", names))
    return tree


def _of_rank(name: str, rank: int) -> str:
    return join(name, rank_component(rank))


def _stateful(node: Node | PickleError) -> Node:
    if not isinstance(node, TableNode):
        raise PickleError("they are no dict")
    return Stateful(node)


def _states(stored: StoredRandom) -> Iterator[tuple[object, dict[str, object]]]:
    """The states of the ranks of a shard: one, or one for each data-parallel rank."""
    states, source = stored.states, stored.source
    for each in states if isinstance(states, list) else [states]:
        if not isinstance(each, dict):
            raise PickleError("they are no dict")
        version, words, gauss = each["random_rng_state"]
        kind, array, position, has_gauss, cached = each["np_rng_state"]
        cuda = each.get("cuda_rng_state")
        general = {
            "python": {"version": version, "words": np.asarray(words, "<u4").tobytes(), "gauss": gauss},
            "numpy": {
                "kind": kind,
                "words": _array_bytes(array),
                "position": position,
                "has_gauss": has_gauss,
                "gauss": cached,
            },
            "torch": _tensor_bytes(source, each["torch_rng_state"]),
            "cuda": [] if cuda is None else [_tensor_bytes(source, cuda)],
            "device": 0,
        }
        trackers = each.get("rng_tracker_states")
        yield (
            general,
            {
                name: source.items(tensor)
                for name, tensor in (trackers if isinstance(trackers, dict) else {}).items()
                if isinstance(name, str) and isinstance(tensor, PickledTensor)
            },
        )


def _tensor_bytes(source: ObjectArchive, tensor: object) -> bytes:
    if not isinstance(tensor, PickledTensor) or tensor.dtype != "uint8":
        raise PickleError("a generator's state is no tensor of bytes")
    return source.read(tensor, prod(tensor.shape))


def _array_bytes(array: object) -> bytes:
    """The elements of numpy's array of 32-bit words."""
    state = array.state if isinstance(array, PickledObject) else None
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[4], bytes):
        raise PickleError("numpy's state is no array")
    kind = state[2]
    if not isinstance(kind, PickledObject) or kind.args[:1] != ("u4",):
        raise PickleError("numpy's state is no array of 32-bit words")
    return state[4]
