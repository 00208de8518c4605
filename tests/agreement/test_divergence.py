"""Tensors that several ranks hold without a declaration: copies are compared only where necessary, and a difference is
refused or marked."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast import Checkpointer, FlatRange, Memory, Piecewise
from holdfast.control.channel import Channel
from holdfast.errors import StateError
from holdfast.format import manifest as fmt
from holdfast.format.records import Diverged
from holdfast.geometry import whole
from holdfast.plan.layout import Mesh, Pieces, Placed, TensorLayout, Whole
from holdfast.plan.layout import Shard as ShardPlacement
from holdfast.plan.save import plan_save
from holdfast.run.history import Run
from holdfast.state.local_memory import digest_of
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support import independent_reader
from tests.support.models import start_new_job
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.worlds import World, worlds

State = dict[str, object]
MakeState = Callable[[], State]


@dataclass
class Seen:
    """Phases of the exchanges of saves, and numbers of elements that were digested."""

    phases: list[str] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Seen]:
    """Note what this rank exchanges and digests."""
    seen, exchange = Seen(), Channel.exchange

    def noting_exchange(channel: Channel, phase: str, *rest: Any, **kinds: Any) -> Any:
        seen.phases.append(phase)
        return exchange(channel, phase, *rest, **kinds)

    def noting_digest(tensor: torch.Tensor) -> bytes:
        seen.numels.append(tensor.numel())
        return digest_of(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "exchange", noting_exchange)
        patch.setattr("holdfast.agreement.local.digest_of", noting_digest)
        yield seen


# The tensors that a save compares.


def sharded(whole: torch.Tensor) -> torch.Tensor:
    """`whole` divided over the two ranks of this rank's half of the job."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    return distribute_tensor(whole, meshes[dist.get_rank() // 2], [Shard(0)], src_data_rank=None)


def stages() -> State:
    """A pipeline of two stages, each sharded over its own ranks, without a common name."""
    return {f"layer{dist.get_rank() // 2}": sharded(torch.arange(8.0))}


def tied_stages() -> State:
    """The same with one weight that both stages hold."""
    return stages() | {"tied": sharded(torch.arange(6.0))}


def replicas() -> State:
    """Plain tensors, the same on all ranks."""
    return {"a": torch.zeros(3), "b": torch.zeros(4)}


def replicas_and_more() -> State:
    """Plain tensors, of which every other rank has one more."""
    return replicas() | ({"c": torch.zeros(5)} if dist.get_rank() % 2 else {})


def ranges() -> State:
    """A tensor of which each rank holds a part of its own."""
    start = 3 * dist.get_rank()
    return {"master": Piecewise((3, 4), [(FlatRange(start, start + 3), torch.zeros(3))])}


def copied_ranges() -> State:
    """A tensor that ranks 0 and 2 hold the first part of, ranks 1 and 3 the second."""
    start, stop = ((0, 7), (7, 12))[dist.get_rank() % 2]
    return {"master": Piecewise((3, 4), [(FlatRange(start, stop), torch.arange(start, stop) * 1.0)])}


def ranges_of_two_kinds() -> State:
    """The same, described by ranks 2 and 3 with one more tensor, so that no two ranks describe themselves alike."""
    return copied_ranges() | ({f"own{dist.get_rank()}": torch.zeros(1)} if dist.get_rank() > 1 else {})


def save_twice(folder: str, make: MakeState) -> tuple[Seen, Seen]:
    start_new_job()
    found = []
    for step in range(2):
        with watched() as seen:
            holdfast.save(f"{folder}/run", make(), step, timeout_s=40)
        found.append(seen)
    return found[0], found[1]


PLANNED, COMPARED = ["describe", "plan", "commit"], ["describe", "plan", "compare", "commit"]


@pytest.mark.parametrize(
    ("make", "phases", "numels"),
    [
        (stages, PLANNED, [[], [], [], []]),
        (tied_stages, COMPARED, [[3], [3], [3], [3]]),
        (replicas, PLANNED, [[3, 4]] * 4),
        (replicas_and_more, COMPARED, [[3, 4], [3, 4, 5]] * 2),
        (ranges, PLANNED, [[], [], [], []]),
        (copied_ranges, COMPARED, [[4, 3], [1, 4]] * 2),
        (ranges_of_two_kinds, COMPARED, [[4, 3], [1, 4], [1, 4, 3], [1, 1, 4]]),
    ],
    ids=lambda case: case.__name__ if callable(case) else "",
)
@pytest.mark.few(3)
def test_only_what_several_ranks_hold_undeclared_is_compared_and_each_part_digested_once(
    tmp_path: Path, make: MakeState, phases: list[str], numels: list[list[int]]
) -> None:
    for rank, (first, second) in enumerate(run_ranks(4, save_twice, str(tmp_path), make)):
        assert first.phases == phases
        assert first.numels == numels[rank]
        assert "compare" not in second.phases


def differing_stage() -> State:
    return stages() | {"tied": sharded(torch.arange(6.0) + (torch.arange(6) > 3) * float(dist.get_rank() // 2))}


def differing_range() -> State:
    state = copied_ranges()
    if dist.get_rank() == 3:
        state["master"] = Piecewise((3, 4), [(FlatRange(7, 12), torch.zeros(5))])
    return state


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (differing_stage, r"'tied' .* between ranks \[1\] and \[3\], at \[3:6\]\."),
        (differing_range, r"'master' .* between ranks \[1\] and \[3\], at \["),
    ],
)
def test_a_part_that_differs_at_the_first_save_is_refused_with_its_ranks(
    tmp_path: Path, make: MakeState, said: str
) -> None:
    with pytest.raises(RanksFailedError, match=said) as failed:
        run_ranks(4, save_twice, str(tmp_path), make)
    assert {getattr(error, "code", None) for error in failed.value.by_rank.values()} == {"state.diverged"}
    assert len(failed.value.by_rank) == 4
    assert not (tmp_path / "run").exists()


# The tensors of a plan that a save compares.

HALVES = [Placed(Mesh((2,), ranks), (ShardPlacement(0),)) for ranks in ((0, 1), (2, 3))]
LOW, HIGH = Pieces.ranges(FlatRange(0, 3)), Pieces.ranges(FlatRange(3, 8))


@pytest.mark.parametrize(
    ("specs", "undeclared", "undeclared_across_kinds"),
    [
        ([Whole("compare")] * 4, True, True),
        ([Whole("split")] * 4, False, False),
        ([Whole("first")] * 4, False, False),
        ([None, Whole("compare"), None, None], False, False),
        ([Whole("compare"), Whole("compare"), None, None], True, False),
        ([Whole("compare"), None, Whole("split"), None], True, True),
        ([HALVES[0], HALVES[0], None, None], False, False),
        ([HALVES[0], HALVES[0], HALVES[1], HALVES[1]], True, True),
        ([LOW, HIGH, None, None], False, False),
        ([LOW, HIGH, LOW, HIGH], True, True),
        ([LOW, LOW, None, HIGH], True, False),
    ],
)
def test_a_plan_knows_which_tensors_several_ranks_hold_undeclared(
    specs: list[Whole | Placed | Pieces | None], undeclared: bool, undeclared_across_kinds: bool
) -> None:
    layouts = [[] if spec is None else [TensorLayout("w", "float32", (8,), spec)] for spec in specs]
    plan = plan_save(*World(layouts, {}).sent())
    assert plan.undeclared(np.arange(4)) == (("w",) if undeclared else ())
    assert plan.undeclared(np.asarray([0, 0, 2, 2])) == (("w",) if undeclared_across_kinds else ())


@given(worlds())
def test_what_is_undeclared_is_what_several_ranks_want_compared(world: World) -> None:
    plan = plan_save(*world.sent())
    held = Counter(
        (tensor.name, part)
        for tensors in world.layouts
        for tensor in tensors
        if not isinstance(tensor.spec, Placed) and tensor.spec.replicas == "compare"
        for part in (tensor.spec.parts if isinstance(tensor.spec, Pieces) else [whole(tensor.shape)])
        if prod(tensor.shape) and part.numel
    )
    expected = {name for (name, _), num_holders in held.items() if num_holders > 1}
    assert plan.undeclared(np.arange(len(world.layouts))) == tuple(sorted(expected))
    assert plan.undeclared(np.zeros(len(world.layouts), np.int64)) == ()


# Tensors that differ later.

NUM_SAVES = 20


def drift(folder: str, alike: bool, on_divergence: Literal["warn", "error"]) -> tuple[list[str], list[tuple[str, ...]]]:
    """A plain tensor that is equal at first and one ulp off on rank 1 later: what was logged, and marked per save.

    Ranks that are not `alike` have a tensor of their own too."""
    start_new_job()
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    scale = torch.ones(1000)
    state = {"scale": scale} | ({} if alike else {f"own{dist.get_rank()}": torch.zeros(1)})
    marked = []
    for step in range(NUM_SAVES):  # more than one turn of the rotating share
        if step == 2 and dist.get_rank() == 1:
            scale += torch.finfo(torch.float32).eps
        marked.append(holdfast.save(f"{folder}/run", state, step, on_divergence=on_divergence).diverged)
    logging.getLogger("holdfast").removeHandler(handler)
    return warned, marked


@pytest.mark.parametrize("alike", [True, False])
def test_drift_is_a_warning_and_a_mark_and_one_holders_copy_is_saved_whole(tmp_path: Path, alike: bool) -> None:
    (warned, marked), (warned_on_1, marked_on_1) = run_ranks(2, drift, str(tmp_path), alike, "warn")
    found = next(step for step, names in enumerate(marked) if names)
    assert marked[found:] == [("scale",)] * (NUM_SAVES - found)  # and not only where its turn comes
    assert marked_on_1 == marked
    assert warned_on_1 == []
    (text,) = warned
    assert text.startswith(f"step {found}: Tensor 'scale'")
    assert "[0] and [1]" in text
    view = holdfast.open(f"{tmp_path}/run@step={found}")
    assert view.diverged == ("scale",)
    assert len(set(view["scale"][...].tolist())) == 1
    loaded = holdfast.load(f"{tmp_path}/run@step={found}", {"scale": torch.zeros(1000)}, strict=False)
    assert loaded.diverged == ("scale",)


def test_the_mark_stands_in_the_manifest_and_in_the_commit_of_the_save_that_found_it(tmp_path: Path) -> None:
    (_, marked), _ = run_ranks(2, drift, str(tmp_path), True, "warn")
    storage = open_store(Location(str(tmp_path / "run")))
    for commit in Run.open(storage).lineage():
        manifest = fmt.decode(storage.read(f"checkpoints/{commit.checkpoint}/{fmt.NAME}"), path="manifest")
        assert manifest.body.diverged == marked[commit.step]
        assert commit.diverged == Diverged.of(marked[commit.step])
    last = NUM_SAVES - 1
    (folder,) = (tmp_path / "run" / "checkpoints").glob(f"step-{last:010}-*")
    assert independent_reader.read(folder).step == last


def grow(folder: str, through: str) -> str:
    """A state that gets a tensor of each rank's own at its second save."""
    start_new_job()
    state = {"scale": torch.ones(100)}
    if through == "save":
        holdfast.save(f"{folder}/run", state, 0)
        state["mine"] = torch.full((100,), float(dist.get_rank()))
        with pytest.raises(StateError, match="'mine' has copies on several ranks") as caught:
            holdfast.save(f"{folder}/run", state, 1)
    else:
        Path(f"{folder}/node").mkdir(exist_ok=True)
        with Checkpointer(f"{folder}/run", state, memory=Memory(node_dir=Path(folder) / "node")) as checkpointer:
            checkpointer.save(0).durable.wait(60)
            state["mine"] = torch.full((100,), float(dist.get_rank()))
            with pytest.raises(StateError, match="'mine' has copies on several ranks") as caught:
                checkpointer.save(1).durable.wait(60)
            del state["mine"]
            checkpointer.save(2).durable.wait(60)
    return caught.value.code


@pytest.mark.parametrize("through", ["save", "Checkpointer"])
def test_a_tensor_that_comes_later_and_differs_is_an_error_as_at_the_first_save(tmp_path: Path, through: str) -> None:
    assert run_ranks(2, grow, str(tmp_path), through) == ["state.diverged"] * 2
    assert "mine" not in holdfast.open(tmp_path / "run").names()


def drift_strictly(folder: str, alike: bool) -> str:
    with pytest.raises(StateError) as caught:
        drift(folder, alike, "error")
    return caught.value.code


@pytest.mark.parametrize("alike", [True, False])
def test_drift_is_an_error_where_that_is_asked_for(tmp_path: Path, alike: bool) -> None:
    assert run_ranks(2, drift_strictly, str(tmp_path), alike) == ["state.diverged"] * 2
