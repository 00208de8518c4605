"""Jobs under FSDP1: what a rank holds in flat parameters is stored under the names of the unwrapped model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import holdfast
from holdfast.errors import IncompatibleError, StateError
from holdfast.snapshot.capture import Snapshot
from tests.jobs.fsdp1_cells import Wrapping, build, full_state, reload, save_trained, stored, train
from tests.support.ranks import run_ranks

FULL, FLAT = Wrapping("FULL_SHARD"), Wrapping("FULL_SHARD", original=False)
ALL = [
    FULL,
    FLAT,
    *(
        Wrapping(way, original)
        for way in ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        for original in (True, False)
    ),
]
OPTIONS = [
    Wrapping("FULL_SHARD", original, **{option: True})
    for original in (True, False)
    for option in ("bf16", "frozen", "ignores")
]


def check_job(tmp_path: Path, wrapping: Wrapping, others: list[Wrapping], *, world_size: int = 4) -> None:
    """Save a job, compare the checkpoint with what torch gathers, and load it in other layouts on two ranks."""
    run = str(tmp_path / "run")
    (truth, during), *_ = run_ranks(world_size, save_trained, run, wrapping)
    found = stored(run)
    assert during == 0
    if truth:
        assert found.keys() == truth.keys()
        assert [name for name in truth if not torch.equal(found[name], truth[name])] == []
    for number, other in enumerate(others):
        again = str(tmp_path / str(number))
        run_ranks(1 if other.way == "plain" else 2, reload, run, again, other)
        loaded = stored(again)
        assert loaded.keys() == found.keys(), other
        assert [name for name in found if not torch.equal(found[name], loaded[name])] == [], other


def test_a_flat_parameter_on_four_ranks_loads_on_two_ranks_into_original_parameters(tmp_path: Path) -> None:
    check_job(tmp_path, FLAT, [FULL])


def test_original_parameters_on_four_ranks_load_on_two_ranks_into_flat_ones(tmp_path: Path) -> None:
    check_job(tmp_path, FULL, [FLAT])


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ALL, ids=str)
def test_a_job_loads_in_every_other_layout(tmp_path: Path, wrapping: Wrapping) -> None:
    others = [*ALL, Wrapping("fsdp2"), Wrapping("ddp"), Wrapping("plain")]
    check_job(tmp_path, wrapping, others)


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", [Wrapping("fsdp2"), Wrapping("ddp")], ids=str)
def test_a_job_of_another_layout_loads_under_fsdp1(tmp_path: Path, wrapping: Wrapping) -> None:
    check_job(tmp_path, wrapping, ALL)


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", OPTIONS, ids=str)
def test_a_job_with_an_option_of_fsdp1_loads_on_another_number_of_ranks(tmp_path: Path, wrapping: Wrapping) -> None:
    check_job(tmp_path, wrapping, [wrapping, wrapping._replace(original=not wrapping.original)], world_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("way", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_job_with_parameters_on_the_host_loads_with_and_without_them_there(
    tmp_path: Path, way: Literal["FULL_SHARD", "SHARD_GRAD_OP"], original: bool
) -> None:
    offloads = Wrapping(way, original, offloads=True)
    check_job(tmp_path, offloads, [offloads._replace(original=not original), FULL, FLAT, Wrapping("plain")])


@pytest.mark.slow
@pytest.mark.parametrize("original", [True, False])
def test_a_job_goes_on_with_parameters_on_the_host(tmp_path: Path, original: bool) -> None:
    check_job(tmp_path, FLAT, [Wrapping("FULL_SHARD", original, offloads=True)])


# --- saves in the background -----------------------------------------------------------------------------------------


def saved_while_training(run: str, node_dir: Path, wrapping: Wrapping) -> list[str]:
    """Save in the background, between a forward and a backward, and go on training at once. Returns the names of the
    tensors that were stored in another state than that of the instant."""
    state = build(wrapping, seed=0)
    train(state, steps=2)
    model, optimizer = state["model"], state["optimizer"]
    memory = holdfast.Memory(node_dir=node_dir)
    wrong = []
    with holdfast.Checkpointer(run, state, memory=memory) as checkpointer:
        for step in range(3):
            truth = full_state(state, wrapping)
            loss = model(torch.arange(7)).float().square().mean()
            handle = checkpointer.save(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.durable.wait(40)
            found = stored(run)
            truth |= {name: torch.tensor(step + 2.0) for name in truth if name.endswith("/step")}
            wrong += [name for name, tensor in truth.items() if not torch.equal(found[name], tensor)]
    return wrong


@pytest.mark.parametrize("wrapping", [FULL, Wrapping("SHARD_GRAD_OP", original=False)], ids=str)
def test_a_background_save_between_forward_and_backward_has_that_instant(
    tmp_path: Path, node_dir: Path, wrapping: Wrapping
) -> None:
    assert run_ranks(2, saved_while_training, str(tmp_path / "run"), node_dir, wrapping) == [[]] * 2


def walks_alike(wrapping: Wrapping) -> list[bool]:
    state = build(wrapping, seed=0)
    train(state, steps=1)
    last = Snapshot(state, rank=0, world_size=2).flat().remembered
    return [Snapshot(state, rank=0, world_size=2, last=last).is_as_before]


def test_the_next_background_save_does_not_wait_for_a_new_plan() -> None:
    assert run_ranks(2, walks_alike, FLAT) == [[True]] * 2
    assert run_ranks(2, walks_alike, FULL) == [[True]] * 2


# --- states of FSDP1 in which a naive reading is wrong -------------------------------------------------------------


def outputs_after_an_evaluation(run: str, wrapping: Wrapping) -> list[float]:
    saved, loaded = build(wrapping, seed=0), build(wrapping, seed=1)
    holdfast.save(run, saved, 0)
    with torch.no_grad():
        loaded["model"](torch.arange(7))  # FSDP1 keeps the full parameters of the root after this
        holdfast.load(run, into=loaded)
        return [float(each["model"](torch.arange(7)).double().sum()) for each in (saved, loaded)]


@pytest.mark.parametrize("wrapping", [FULL, FLAT], ids=str)
def test_a_load_after_an_evaluation_reaches_the_next_forward(tmp_path: Path, wrapping: Wrapping) -> None:
    for expected, found in run_ranks(2, outputs_after_an_evaluation, str(tmp_path / "run"), wrapping):
        assert expected == found


def refused(run: str) -> list[str]:
    """The errors of states that cannot be saved, as codes and texts."""
    state = build(FULL, seed=0)
    train(state, steps=1)
    model, optimizer = state["model"], state["optimizer"]
    held = build(Wrapping("NO_SHARD"), seed=dist.get_rank())
    replaced = build(FULL, seed=0)
    parameter = next(each for each in replaced["model"].parameters() if each.numel())
    parameter.data = parameter.data.clone()
    factored = torch.optim.Adafactor([parameter for parameter in model.parameters() if parameter.numel()])
    factored.state[factored.param_groups[0]["params"][0]] = {"row_var": torch.ones(3, 1)}
    states = {
        "inner": {"model": model.module},
        "diverged": held,
        "replaced": replaced,
        "factored": {"model": model, "optimizer": factored},
        "unnamed": {"optimizer": optimizer},
    }
    found = []
    for number, (name, each) in enumerate(states.items()):
        with pytest.raises(StateError) as caught:
            holdfast.save(f"{run}-{name}", each, number)
        found.append(f"{name}: {caught.value.code} {caught.value}")
    with FullyShardedDataParallel.summon_full_params(model), pytest.raises(StateError) as caught:
        holdfast.save(f"{run}-summoned", state, 1)
    return [*found, f"summoned: {caught.value.code} {caught.value}"]


def test_states_of_fsdp1_that_cannot_be_saved_are_refused_with_advice(tmp_path: Path) -> None:
    found, _ = run_ranks(2, refused, str(tmp_path / "run"))
    codes = [line.split(" [")[0] for line in found]
    assert codes == [
        "inner: state.flat_parameters",
        "diverged: state.diverged",
        "replaced: state.flat_parameters",
        "factored: state.optimizer",
        "unnamed: state.unnamed_parameter",
        "summoned: state.flat_parameters",
    ]


def parts_of_a_flat_unit(run: str) -> list[str]:
    """The errors of a save and of a load of modules from deeper inside a unit, after a step and after an evaluation."""
    state = build(FLAT, seed=0)
    train(state, steps=1)
    inner = state["model"].module
    found = []
    for moment in ("trained", "evaluated"):
        for name in ("embed", "conv", "up", "scale", "head"):  # (`down` is a unit itself)
            with pytest.raises(StateError) as caught:
                holdfast.save(f"{run}-{moment}-{name}", {"model": getattr(inner, name)}, 0)
            found.append(caught.value.code)
        with torch.no_grad():
            state["model"](torch.arange(7))
    holdfast.save(run, state, 0)
    with pytest.raises(StateError) as caught:
        holdfast.load(run, into={"model": nn.ModuleDict({"up": inner.up})}, select="model/up.**")
    return [*found, caught.value.code]


def test_a_module_from_inside_a_unit_is_refused_instead_of_saved_without_its_parameters(tmp_path: Path) -> None:
    for found in run_ranks(2, parts_of_a_flat_unit, str(tmp_path / "run")):
        assert set(found) == {"state.flat_parameters"}


def loaded_where_some_parameters_have_no_state(run: str) -> tuple[str, str]:
    plain = build(Wrapping("ddp"), seed=0)
    optimizer = plain["optimizer"]
    train(plain, steps=1)
    del optimizer.state[plain["model"].module.up.bias]
    holdfast.save(run, plain, 0)
    flat, original = build(FLAT, seed=1), build(FULL, seed=1)
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(run, into=flat)
    return caught.value.code, str(holdfast.load(run, into=original).next_step)


def test_state_of_some_parameters_of_a_flat_one_is_refused_and_loads_into_original_ones(tmp_path: Path) -> None:
    for found in run_ranks(2, loaded_where_some_parameters_have_no_state, str(tmp_path / "run")):
        assert found == ("incompatible.flat_slots", "1")


def saved_in_part(run: str) -> list[str]:
    state = build(FLAT, seed=0)
    holdfast.save(run, state, 0, select="model/down.**")
    other = build(FULL, seed=1)
    holdfast.load(run, into=other, select="model/down.**")
    return holdfast.open(run).names()


def test_a_selection_takes_a_part_of_a_flat_parameter(tmp_path: Path) -> None:
    names = [f"model/down.{name}" for name in ("0.bias", "0.weight", "1.bias", "1.weight")]
    assert run_ranks(2, saved_in_part, str(tmp_path / "run")) == [names] * 2


def tiny_flat_parameter() -> dict[str, Any]:
    """A unit of one element: on all ranks but the first, its flat parameter is nothing but padding."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), use_orig_params=False, device_id=cpu)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def steps_after_a_load(run: str) -> list[float]:
    state = tiny_flat_parameter()
    if dist.get_world_size() == 2:
        train_tiny(state, steps=3)
        holdfast.save(run, state, 0)
        state = tiny_flat_parameter()
    holdfast.load(run, into=state)
    train_tiny(state, steps=1)
    return [slots["step"].item() for slots in state["optimizer"].state.values()]


def train_tiny(state: dict[str, Any], *, steps: int) -> None:
    for _ in range(steps):
        state["model"](torch.ones(1, 1)).sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def test_a_rank_with_nothing_but_padding_counts_steps_after_a_load_as_the_others_do(tmp_path: Path) -> None:
    for world_size in (2, 3):
        assert run_ranks(world_size, steps_after_a_load, str(tmp_path / "run")) == [[4.0]] * world_size
