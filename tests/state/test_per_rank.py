from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.errors import CorruptError, IncompatibleError, StateError
from holdfast.format import values
from holdfast.format.names import own_part
from holdfast.format.values import Items, Node, Plain, Stateful, TableNode, TensorRef
from holdfast.mapping.parts import StoredTensor
from holdfast.plan.layout import Whole
from holdfast.state.bind import bind
from holdfast.state.binding import Binding
from holdfast.state.flatten import flatten
from holdfast.state.per_rank import PerRank
from tests.support.bound import Loader, State, bits, mlp


class Nodes(Mapping[str, Node]):
    """A checkpoint's nodes in one table per file, read when one of its values is looked up."""

    def __init__(self, tables: Sequence[bytes]) -> None:
        self._tables = [values.decode(table) for table in tables]
        self._home = {path: number for number, table in enumerate(self._tables) for path in table}
        self.read: set[int] = set()

    def __getitem__(self, path: str) -> Node:
        number = self._home[path]
        self.read.add(number)
        return self._tables[number][path]

    def __contains__(self, path: object) -> bool:
        return path in self._home

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


class Saved(NamedTuple):
    """The saves of all ranks; `tables` are rank 0's shared nodes and then every rank's own."""

    tensors: dict[str, torch.Tensor]
    stored: dict[str, StoredTensor]
    tables: list[bytes]


def save(*states: State) -> Saved:
    flats = [flatten(state, rank=rank, world_size=len(states)) for rank, state in enumerate(states)]
    assert len({values.encode(flat.nodes) for flat in flats}) == 1
    locals_ = {name: local for flat in flats for name, local in flat.tensors.items()}
    return Saved(
        {name: local.memory[0].clone() for name, local in locals_.items()},
        {name: StoredTensor(local.layout.dtype, local.layout.shape) for name, local in locals_.items()},
        [values.encode(nodes) for nodes in (flats[0].nodes, *(flat.own_nodes for flat in flats))],
    )


def bound(saved: Saved, into: State, rank: int, world_size: int, *, strict: bool = True) -> Binding:
    return bind(into, saved.stored, {}, Nodes(saved.tables), strict=strict, rank=rank, world_size=world_size)


def load(saved: Saved, into: State, rank: int, world_size: int) -> Binding:
    binding = bound(saved, into, rank, world_size)
    for target in binding.targets:
        target.local.memory[0].copy_(saved.tensors[target.source])
    binding.finish()
    return binding


def state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    own = {"seen": [seed, ("x", seed)], "cache": torch.rand(3, generator=generator), "rng": generator}
    return {"shared": torch.ones(2), "epoch": 7, "own": PerRank(own), "loader": PerRank(Loader({"cursor": [seed]}))}


def own(into: State) -> dict[str, object]:
    return cast("PerRank[dict[str, object]]", into["own"]).value


# --- saving ----------------------------------------------------------------------------------------------------------


def test_what_belongs_to_a_rank_has_nodes_of_its_own_and_tensors_that_only_it_names() -> None:
    cache = torch.zeros(2)
    flat = flatten({"a": {"b": PerRank([1, cache])}, "loader": PerRank(Loader(3))}, rank=2, world_size=4)
    assert flat.nodes["a/b"] == values.PerRankNode(4)
    assert flat.nodes["a"] == TableNode("dict", ("b",))
    assert flat.own_nodes == {
        "a/b/%rank=2": Items("list", 2),
        "a/b/%rank=2/0": Plain(1),
        "a/b/%rank=2/1": TensorRef(),
        "loader/%rank=2": Stateful(Plain(3)),
    }
    assert not [path for path in flat.nodes if own_part(path)]
    assert flat.tensors["a/b/%rank=2/1"].layout.spec == Whole("first")
    assert flat.tensors["a/b/%rank=2/1"].memory[0].data_ptr() == cache.data_ptr()


def test_a_key_that_looks_like_a_ranks_part_is_none() -> None:
    flat = flatten({"a": {"%rank=0": 1}})
    assert flat.own_nodes == {}
    assert "a/%25rank=0" in flat.nodes


def test_ranks_differ_in_what_is_their_own_and_share_the_rest() -> None:
    assert len(save(state(1), state(2), state(3)).tables) == 4


def loop() -> object:
    return {"deeper": PerRank(1)}


@pytest.mark.parametrize(
    ("held", "path"),
    [(mlp(), "own/%rank=0"), (torch.optim.SGD([torch.ones(1)]), "own/%rank=0"), (loop(), "own/%rank=0/deeper")],
    ids=["module", "optimizer", "PerRank"],
)
def test_modules_optimizers_and_other_parts_inside_are_refused(held: object, path: str) -> None:
    with pytest.raises(StateError) as caught:
        save({"own": PerRank(held)})
    assert (caught.value.code, caught.value.path) == ("state.unsupported_leaf", path)


def test_a_part_inside_an_objects_state_dict_is_refused() -> None:
    with pytest.raises(StateError, match=r"'loader/own'.*PerRank.*Put it directly into the state"):
        save({"loader": Loader({"own": PerRank(1)})})


def test_a_tensor_that_also_belongs_to_all_ranks_is_refused_with_both_names() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"state\.per_rank.*'a/%rank=0'.*'m/weight'"):
        save({"a": PerRank(model.weight), "m": model})


def test_dtensors_inside_are_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(StateError, match=r"'a/%rank=0'.*is in a PerRank"):
            save({"a": PerRank(tensor)})
    finally:
        dist.destroy_process_group()


def test_an_unknown_policy_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="'all'"):
        PerRank(1, on_resize="all")  # type: ignore[arg-type]


# --- loading on as many ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gets_its_own_part_back_in_place(rank: int) -> None:
    saved, into, expected = save(state(1), state(2)), state(9), state(1 + rank)
    mine, cache, seen, loader = own(into), own(into)["cache"], own(into)["seen"], into["loader"]
    binding = load(saved, into, rank, 2)
    assert own(into) is mine
    assert mine["cache"] is cache
    assert mine["seen"] is seen
    assert into["loader"] is loader
    assert flatten(into, rank=rank, world_size=2).own_nodes == flatten(expected, rank=rank, world_size=2).own_nodes
    assert bits(cast("torch.Tensor", cache)) == bits(cast("torch.Tensor", own(expected)["cache"]))
    assert (binding.missing, binding.unexpected) == ([], [])
    assert {f"own/%rank={rank}/cache", f"own/%rank={rank}/seen/0", f"loader/%rank={rank}/cursor/0"} <= {*binding.loaded}
    assert not [name for name in binding.loaded if own_part(name) and f"%rank={rank}" not in name]


def test_a_value_that_is_replaced_stands_in_the_live_part() -> None:
    into = PerRank[object](0)
    load(save({"n": PerRank((1, 2))}, {"n": PerRank((3, 4))}), {"n": into}, 1, 2)
    assert into.value == (3, 4)


def test_parts_stand_inside_lists_and_tuples() -> None:
    inside, beside = PerRank(0), PerRank(torch.zeros(1))
    saved = save({"t": (1, [PerRank(5)]), "l": [PerRank(torch.ones(1))]})
    load(saved, {"t": (0, [inside]), "l": [beside]}, 0, 1)
    assert inside.value == 5
    assert beside.value == 1


def test_a_rank_reads_no_values_of_other_ranks() -> None:
    saved = save(*map(state, range(5)))
    nodes = Nodes(saved.tables)
    binding = bind(state(9), saved.stored, {}, nodes, strict=True, rank=2, world_size=5)
    assert nodes.read == {0, 3}
    assert binding.unexpected == []


def test_names_on_one_side_of_a_ranks_own_part_are_named() -> None:
    saved = save({"own": PerRank({"a": 1, "b": torch.ones(1)})}, {"own": PerRank({"a": 1, "b": torch.ones(1)})})
    binding = bound(saved, {"own": PerRank({"c": 1})}, 1, 2, strict=False)
    assert binding.missing == ["own/%rank=1/c"]
    assert binding.unexpected == ["own/%rank=1/a", "own/%rank=1/b"]
    with pytest.raises(IncompatibleError, match=r"incompatible\.names.*own/%rank=1/c.*own/%rank=1/{a, b}"):
        bound(saved, {"own": PerRank({"c": 1})}, 1, 2)


def test_a_whole_part_on_one_side_only_is_one_name() -> None:
    saved = save({"own": PerRank({"a": 1, "b": torch.ones(1)})}, {"own": PerRank({"a": 1, "b": torch.ones(1)})})
    binding = bound(saved, {"other": PerRank({"c": [1, 2]})}, 0, 2, strict=False)
    assert (binding.missing, binding.unexpected) == (["other"], ["own"])


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (PerRank(1), 1),
        (1, PerRank(1)),
        (PerRank([1]), [1]),
        ([PerRank(1)], [1]),
        (PerRank(Loader(1)), Loader(1)),
        (PerRank(torch.ones(1)), torch.ones(1)),
        (torch.ones(1), PerRank(torch.ones(1))),
        (PerRank(torch.ones(1)), PerRank(1)),
    ],
    ids=lambda item: type(item).__name__,
)
def test_what_belongs_to_each_rank_does_not_fill_what_belongs_to_all(stored: object, live: object) -> None:
    with pytest.raises(IncompatibleError, match=r"incompatible\.kind.*'x"):
        bound(save({"x": stored}), {"x": live}, 0, 1)


# --- loading on another number of ranks ------------------------------------------------------------------------------


def test_another_number_of_ranks_is_an_error_that_names_path_sizes_and_policies() -> None:
    with pytest.raises(IncompatibleError) as caught:
        bound(save(state(1), state(2), state(3)), state(9), 1, 2, strict=False)
    assert caught.value.code == "incompatible.per_rank"
    expected = ("'own'", "'loader'", "saved by 3 ranks", "loaded by 2 ranks", "on_resize", '"first"', "function")
    assert all(part in str(caught.value) for part in expected)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 3), (2, 3)])
def test_first_gives_every_rank_what_rank_0_had(rank: int, world_size: int) -> None:
    saved, into = save(state(1), state(2)), state(9)
    cache = own(into)["cache"]
    for name in ("own", "loader"):
        cast("PerRank[object]", into[name]).on_resize = "first"
    binding = load(saved, into, rank, world_size)
    assert own(into)["seen"] == [1, ("x", 1)]
    assert own(into)["cache"] is cache
    assert bits(cast("torch.Tensor", cache)) == bits(cast("torch.Tensor", own(state(1))["cache"]))
    assert cast("PerRank[Loader]", into["loader"]).value.state == {"cursor": [1]}
    assert (binding.missing, binding.unexpected) == ([], [])


def test_a_function_gets_the_parts_of_all_saved_ranks_and_gives_the_value() -> None:
    calls: list[tuple[int, int]] = []

    def merge(parts: list[object], rank: int, world_size: int) -> object:
        calls.append((rank, world_size))
        caches = cast("list[dict[str, torch.Tensor]]", parts)
        return [sum(part["n"] for part in caches), torch.cat([part["cache"] for part in caches])]

    states: list[State] = [{"own": PerRank({"n": n, "cache": torch.full((2,), n)})} for n in (1, 2, 3)]
    saved = save(*states)
    into = PerRank[object](None, on_resize=merge)
    binding = load(saved, {"own": into}, 1, 2)
    total, cache = cast("list[object]", into.value)
    assert total == 6
    assert torch.equal(cast("torch.Tensor", cache), torch.tensor([1, 1, 2, 2, 3, 3]))
    assert calls == [(1, 2)]
    assert [*binding.loaded] == [f"own/%rank={rank}/{name}" for rank in range(3) for name in ("cache", "n")]
    assert binding.unexpected == []


def test_an_object_loads_what_the_function_made_of_all_states() -> None:
    loader = Loader()
    saved = save({"loader": PerRank(Loader([1, 2]))}, {"loader": PerRank(Loader([3]))})
    load(saved, {"loader": PerRank(loader, on_resize=lambda parts, rank, world_size: {"all": parts})}, 0, 1)
    assert loader.state == {"all": [[1, 2], [3]]}


def _noted(seed: int) -> dict[str, object]:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return {
        "tensor": torch.full((3,), float(seed)),
        "array": np.full(2, seed),
        "dict": {"n": seed, "inner": {"w": torch.full((2,), seed)}},
        "list": [seed, torch.full((1,), seed)],
        "generator": generator,
    }


def test_what_a_function_gives_goes_on_in_the_variables_of_the_job() -> None:
    """The live objects were cut off: the job changed them, and the next save stored what the load had given."""
    states: list[State] = [{name: PerRank(item) for name, item in _noted(seed).items()} for seed in (5, 6)]
    saved = save(*states)
    live, expected = _noted(1), _noted(6)
    into: State = {name: PerRank(item, on_resize=lambda parts, rank, size: parts[1]) for name, item in live.items()}
    inner = cast("dict[str, dict[str, torch.Tensor]]", live["dict"])["inner"]
    deep = [inner, inner["w"], cast("list[object]", live["list"])[1]]
    load(saved, into, 0, 1)
    assert all(cast("PerRank[object]", into[name]).value is item for name, item in live.items())
    assert cast("dict[str, object]", live["dict"])["inner"] is deep[0]
    assert inner["w"] is deep[1]
    assert cast("list[object]", live["list"])[1] is deep[2]
    generators = [cast("torch.Generator", of.pop("generator")) for of in (live, expected)]
    assert bits(generators[0].get_state()) == bits(generators[1].get_state())
    assert str(live) == str(expected)


def test_what_a_function_gives_takes_the_place_of_a_value_that_it_does_not_fit() -> None:
    saved = save({"own": PerRank([1, torch.ones(3)])}, {"own": PerRank([2, torch.zeros(3)])})
    own = [0, torch.ones(1), "more"]
    into = PerRank[object](own, on_resize=lambda parts, rank, size: parts[0])
    load(saved, {"own": into}, 0, 1)
    assert into.value is own
    assert str(own) == str([1, torch.ones(3)])
    none = PerRank[object](None, on_resize=lambda parts, rank, size: {"all": parts})
    load(saved, {"own": none}, 0, 1)
    assert list(cast("dict[str, object]", none.value)) == ["all"]


def test_a_function_does_not_silently_replace_an_object_inside_a_container_by_its_state() -> None:
    def state(n: int) -> dict[str, object]:
        return {"loaders": [Loader([n])], "n": n}

    saved = save({"own": PerRank(state(1))}, {"own": PerRank(state(2))})
    into = PerRank(state(0), on_resize=lambda parts, rank, size: cast("dict[str, object]", parts[0]))
    with pytest.raises(IncompatibleError, match=r"own/loaders/0.*PerRank of its own") as caught:
        load(saved, {"own": into}, 0, 1)
    assert caught.value.code == "incompatible.per_rank"
    load(saved, {"own": into}, 0, 2)
    assert cast("list[Loader]", into.value["loaders"])[0].state == [1]


def test_a_function_is_not_called_on_as_many_ranks() -> None:
    def never(parts: list[object], rank: int, world_size: int) -> object:
        raise AssertionError(parts, rank, world_size)

    into = PerRank(0, on_resize=never)
    load(save({"n": PerRank(1)}, {"n": PerRank(2)}), {"n": into}, 1, 2)
    assert into.value == 2


# --- reading ---------------------------------------------------------------------------------------------------------


def test_read_by_name_a_part_is_the_value_and_the_whole_a_list_of_all_parts() -> None:
    nodes = Nodes(save({"n": {"own": PerRank([1])}}, {"n": {"own": PerRank([2])}}).tables)
    assert values.rebuild(nodes, "n/own/%rank=1", str) == [2]
    assert values.rebuild(nodes, "n/own", str) == [[1], [2]]
    assert values.rebuild(nodes, "n", str) == {"own": [[1], [2]]}


@pytest.mark.parametrize("world_size", [0, -1, 1 << 40])
def test_an_impossible_number_of_ranks_is_corrupt(world_size: int) -> None:
    with pytest.raises(CorruptError, match="impossible number of ranks"):
        values.decode(values.encode({"x": values.PerRankNode(world_size)}))
