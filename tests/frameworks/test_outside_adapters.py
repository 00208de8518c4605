"""Adapters that another package registers: real jobs, on other worlds than they saved on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import ConfigurationError, HoldfastError, IncompatibleError, StateError
from holdfast.frameworks import BindingSource, Finish, Sink, registry
from tests.frameworks.outside_adapter import ShardedMomentum, ShardedMomentumAdapter
from tests.support.ranks import run_ranks

NUM_STEPS = 3


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_adapters", registry._adapters)
    holdfast.register_adapter(ShardedMomentumAdapter())
    yield
    registry._adapter_of_type.cache_clear()


def job(*, seed: int, rank: int = 0, world_size: int = 1) -> tuple[dict[str, object], ShardedMomentum]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = ShardedMomentum(model.parameters(), rank=rank, world_size=world_size)
    return {"model": model, "optimizer": optimizer}, optimizer


def truth() -> dict[str, list[bytes]]:
    """The state that one rank would hold after all steps."""
    _, optimizer = job(seed=0)
    for _ in range(NUM_STEPS):
        optimizer.step()
    return whole([held(optimizer)])


def held(optimizer: ShardedMomentum) -> dict[str, list[list[float]]]:
    return {
        "masters": [each.tolist() for each in optimizer.masters],
        "momenta": [each.tolist() for each in optimizer.momenta],
    }


def whole(parts: list[dict[str, list[list[float]]]]) -> dict[str, list[bytes]]:
    """The parts of all ranks, put together: bits per parameter."""
    return {
        kind: [
            torch.tensor([element for flat in flats for element in flat]).numpy().tobytes()
            for flats in zip(*(part[kind] for part in parts), strict=True)
        ]
        for kind in ("masters", "momenta")
    }


def _save(run: str) -> None:
    holdfast.register_adapter(ShardedMomentumAdapter())
    state, optimizer = job(seed=0, rank=dist.get_rank(), world_size=dist.get_world_size())
    for _ in range(NUM_STEPS):
        optimizer.step()
    holdfast.save(run, state, NUM_STEPS)


def _load(run: str) -> tuple[int, dict[str, list[list[float]]]]:
    holdfast.register_adapter(ShardedMomentumAdapter())
    state, optimizer = job(seed=1, rank=dist.get_rank(), world_size=dist.get_world_size())
    holdfast.load(run, state)
    return optimizer.num_steps, held(optimizer)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_sharded_optimizer_of_another_package_resumes_on_another_world(tmp_path: Path, world_size: int) -> None:
    run = str(tmp_path / "run")
    run_ranks(2, _save, run)
    loaded = run_ranks(world_size, _load, run)
    assert {num_steps for num_steps, _ in loaded} == {NUM_STEPS}
    assert whole([part for _, part in loaded]) == truth()


def test_what_an_adapter_says_nothing_of_is_copied_before_a_background_save_returns(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    state, optimizer = job(seed=0)
    with holdfast.Checkpointer(run, state, memory=None) as checkpointer:
        for _ in range(NUM_STEPS):
            optimizer.step()
        checkpointer.save(NUM_STEPS)
        optimizer.step()
    other, restored = job(seed=1)
    holdfast.load(run, other)
    assert (restored.num_steps, whole([held(restored)])) == (NUM_STEPS, truth())


def test_it_is_selected_by_its_path_and_as_a_whole(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    state, optimizer = job(seed=0)
    optimizer.step()
    holdfast.save(run, state, 1)
    other, untouched = job(seed=1)
    before = whole([held(untouched)])
    holdfast.load(run, other, select="model")
    assert (untouched.num_steps, whole([held(untouched)])) == (0, before)
    holdfast.load(run, other, select=["model", "optimizer"])
    assert (untouched.num_steps, whole([held(untouched)])) == (1, whole([held(optimizer)]))


def test_a_checkpoint_without_it_or_with_another_kind_in_its_place_is_refused(tmp_path: Path) -> None:
    state, optimizer = job(seed=0)
    holdfast.save(tmp_path / "without", {"model": state["model"]}, 1)
    with pytest.raises(IncompatibleError, match="optimizer/num_steps"):
        holdfast.load(tmp_path / "without", state)
    holdfast.save(tmp_path / "other", {"model": state["model"], "optimizer": 3}, 1)
    with pytest.raises(IncompatibleError, match="'optimizer'"):
        holdfast.load(tmp_path / "other", state)
    assert optimizer.num_steps == 0


def test_it_does_not_belong_into_a_per_rank(tmp_path: Path) -> None:
    state, optimizer = job(seed=0)
    with pytest.raises(StateError, match="not into a PerRank"):
        holdfast.save(tmp_path / "run", {"model": state["model"], "mine": holdfast.PerRank(optimizer)}, 1)


class Recorder(nn.Module):
    """A module that holdfast could save by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))


class RecorderAdapter:
    needs_names = is_divisible = spans_ranks = False

    def accepts(self, kind: type) -> bool:
        return issubclass(kind, Recorder)

    def describe(self, path: str, item: Any, sink: Sink) -> bool:
        sink.whole(path, {"elements": item.weight.tolist()})
        return True

    def bind(self, path: str, item: Any, source: BindingSource) -> Finish:
        def write(state: Any) -> None:
            item.weight.data = torch.tensor(state["elements"])

        source.restore(write, source.opaque(path), is_random=False)
        return lambda: item


def test_the_adapter_that_was_registered_last_comes_first(tmp_path: Path) -> None:
    holdfast.register_adapter(RecorderAdapter())
    holdfast.save(tmp_path / "run", {"recorder": Recorder()}, 1)
    view = holdfast.open(tmp_path / "run")
    assert (list(view), view.value("recorder")) == ([], {"elements": [0.0, 1.0, 2.0]})
    other = Recorder()
    nn.init.zeros_(other.weight)
    holdfast.load(tmp_path / "run", {"recorder": other})
    assert torch.equal(other.weight, torch.arange(3.0))


def test_what_lacks_a_part_of_the_protocol_is_no_adapter() -> None:
    class Half:
        needs_names = is_divisible = spans_ranks = False

        def accepts(self, kind: type) -> bool:
            return False

    with pytest.raises(ConfigurationError, match="it lacks describe, bind") as caught:
        holdfast.register_adapter(Half())  # type: ignore[arg-type]
    assert caught.value.code == "config.adapter"


class Broken(ShardedMomentumAdapter):
    """Fails in one of its methods."""

    def __init__(self, method: str) -> None:
        self._method = method

    def accepts(self, kind: type) -> bool:
        self._fail_in("accepts")
        return super().accepts(kind)

    def describe(self, path: str, item: Any, sink: Sink) -> bool:
        self._fail_in("describe")
        return super().describe(path, item, sink)

    def bind(self, path: str, item: Any, source: BindingSource) -> Finish:
        self._fail_in("bind")
        finish = super().bind(path, item, source)

        def failing() -> object:
            self._fail_in("finish")
            return finish()

        return failing

    def _fail_in(self, method: str) -> None:
        if method == self._method:
            raise ZeroDivisionError("of the user")


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("accepts", "config.adapter"),
        ("describe", "state.object"),
        ("bind", "incompatible.object"),
        ("finish", "incompatible.object"),
    ],
)
def test_what_an_adapter_of_others_raises_names_it(tmp_path: Path, method: str, code: str) -> None:
    state, _ = job(seed=0)
    holdfast.save(tmp_path / "run", state, 1)
    holdfast.register_adapter(Broken(method))
    call = partial(holdfast.save, step=2) if method == "describe" else holdfast.load
    with pytest.raises(HoldfastError, match=r"Broken raised ZeroDivisionError.*of the user") as caught:
        call(tmp_path / "run", state)
    assert caught.value.code == code
