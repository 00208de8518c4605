"""Snapshots hold the state of one instant, bit for bit, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

from holdfast.errors import StateError
from holdfast.frameworks.torch_dtypes import DTYPE_NAMES
from holdfast.geometry import Box, FlatRange
from holdfast.plan.layout import TensorLayout, Whole
from holdfast.snapshot import capture as snapshot_module
from holdfast.snapshot.capture import Snapshot
from holdfast.snapshot.guard import Guard
from holdfast.snapshot.routes import RoutedPart, Routes
from holdfast.state.collect import LocalTensor
from holdfast.state.flatten import flatten
from tests.support.bound import bits

State = dict[str, object]


def model(*, max_norm: float | None = None) -> nn.Module:
    return nn.Sequential(nn.Embedding(40, 16, max_norm=max_norm), nn.BatchNorm1d(16), nn.Linear(16, 8))


def averaged(average: torch.Tensor, model: torch.Tensor, _: object) -> torch.Tensor:
    return average + 0.1 * (model - average)


def adamw(module: nn.Module) -> AdamW:
    return AdamW(module.parameters(), lr=0.05)


def trained(module: nn.Module, *optimizers: Optimizer) -> None:
    """One forward and backward."""
    module(torch.randint(0, 40, (32,))).square().sum().backward()


def stepped(module: nn.Module, *optimizers: Optimizer) -> None:
    """One whole step."""
    trained(module)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def held(state: State) -> set[str]:
    """Names of what a guard holds still for a snapshot."""
    return flatten(state).tensors.keys() - Snapshot(state, rank=0, world_size=1)._at_once


class Taken:
    """A snapshot of a state, and what the state was at its instant."""

    def __init__(self, state: State, guard: Guard) -> None:
        self.snapshot = Snapshot(state, rank=0, world_size=1)
        guard.hook(self.snapshot.optimizers)
        tensors = flatten(state).tensors
        self._routed = Routed(tensors)
        self._then = {name: bits(local.memory[0]) for name, local in tensors.items()}

    def copy(self) -> None:
        self.snapshot.copy(self.snapshot.flat().tensors, self._routed.routes)

    def assert_holds_the_instant(self) -> None:
        assert self._routed.copied() == self._then


class Routed:
    """Routes of whole tensors into memory of their own."""

    def __init__(self, tensors: Mapping[str, LocalTensor]) -> None:
        parts: list[RoutedPart] = []
        self._stops: list[int] = []
        nbytes = 0
        for name, local in tensors.items():
            (memory,) = local.memory
            parts.append(RoutedPart(name, Box((0,) * memory.ndim, tuple(memory.shape)), nbytes))
            self._stops.append(nbytes + memory.nbytes)
            nbytes += -(-memory.nbytes // 16) * 16
        self._parts = parts
        self._data = np.zeros(max(nbytes, 1), np.uint8)
        self.routes = Routes(parts, self._data, rank=0)

    def copied(self) -> dict[str, bytes]:
        """The copied tensors, by name."""
        parts = zip(self._parts, self._stops, strict=True)
        return {part.name: self._data[part.start : stop].tobytes() for part, stop in parts}


def tensors_of(**tensors: torch.Tensor) -> dict[str, LocalTensor]:
    """Plain tensors, each all that there is of it."""
    return {
        name: LocalTensor(TensorLayout(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), Whole("split")), (tensor,))
        for name, tensor in tensors.items()
    }


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard()
    yield guard
    guard.unhook()


@contextmanager
def copying(taken: Taken, guard: Guard, *, after_s: float) -> Iterator[None]:
    """Copy in the background, beginning late, while the block trains."""
    begin, hold = threading.Event(), guard.hold(timeout_s=1)
    copier: SimpleQueue[int] = SimpleQueue()

    def copy() -> None:
        copier.put(threading.get_native_id())
        begin.wait(after_s)
        try:
            taken.copy()
        finally:
            hold.release()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(copy)
        hold.pass_on(copier.get())
        try:
            yield
        finally:
            begin.set()
        done.result()


def test_what_only_optimizers_change_is_guarded_and_nothing_else() -> None:
    module, frozen = model(), nn.Linear(4, 4)
    average = AveragedModel(module, avg_fn=averaged)
    optimizer = adamw(module)
    stepped(module, optimizer)
    state = {"model": module, "frozen": frozen, "average": average.module, "optimizer": optimizer, "x": torch.ones(3)}
    names = held(state)
    weights = {f"model/{name}" for name, _ in module.named_parameters()}
    slots = {f"optimizer/state/{name}/{slot}" for name in weights for slot in ("exp_avg", "exp_avg_sq", "step")}
    assert names == weights | slots


def test_an_embedding_that_a_forward_changes_is_not_guarded_but_its_slots_are() -> None:
    module = model(max_norm=0.1)
    optimizer = adamw(module)
    stepped(module, optimizer)
    names = held({"model": module, "optimizer": optimizer})
    assert "model/0.weight" not in names
    assert {"model/2.weight", "optimizer/state/model/0.weight/exp_avg"} <= names


def test_an_optimizer_that_may_step_in_a_graph_guards_nothing() -> None:
    module = model()
    optimizer = adamw(module)
    stepped(module, optimizer)
    optimizer.param_groups[0]["capturable"] = True
    assert not held({"model": module, "optimizer": optimizer})


def test_what_is_not_guarded_is_set_aside_when_the_snapshot_is_taken(guard: Guard) -> None:
    tensor = torch.arange(100.0)
    taken = Taken({"x": tensor, "y": tensor.reshape(10, 10).T.contiguous().T}, guard)
    assert taken.snapshot.instant.is_set
    tensor.zero_()
    taken.copy()
    taken.assert_holds_the_instant()


def test_a_step_waits_for_the_copy_and_the_forward_does_not(guard: Guard) -> None:
    module = model()
    optimizer = adamw(module)
    stepped(module, optimizer)
    taken = Taken({"model": module, "optimizer": optimizer}, guard)
    with ThreadPoolExecutor(1) as pool:
        hold = guard.hold(timeout_s=1)
        trained(module)
        step = pool.submit(optimizer.step)
        with pytest.raises(TimeoutError):
            step.result(timeout=0.2)
        taken.copy()
        hold.release()
        step.result(timeout=10)
    taken.assert_holds_the_instant()
    assert guard.waited_s > 0.1


def in_place_buffers(state: State) -> None:
    stepped(state["model"], state["optimizer"])  # type: ignore[arg-type]


def accumulation(state: State) -> None:
    for _ in range(3):
        trained(state["model"])  # type: ignore[arg-type]
    state["optimizer"].step()  # type: ignore[attr-defined]


def two_optimizers(state: State) -> None:
    stepped(state["model"], state["optimizer"], state["other"])  # type: ignore[arg-type]


def average(state: State) -> None:
    stepped(state["model"], state["optimizer"])  # type: ignore[arg-type]
    state["averaged"].update_parameters(state["model"])  # type: ignore[attr-defined]


def plain_state() -> State:
    module = model()
    return {"model": module, "optimizer": adamw(module)}


def clipped_state() -> State:
    module = model(max_norm=0.1)
    return {"model": module, "optimizer": adamw(module)}


def state_of_two() -> State:
    module = model()
    first, *rest = module.parameters()
    return {"model": module, "optimizer": AdamW([first]), "other": SGD(rest, lr=0.1, momentum=0.9)}


def averaged_state() -> State:
    state = plain_state()
    module = state["model"]
    assert isinstance(module, nn.Module)
    return state | {"averaged": AveragedModel(module, avg_fn=averaged)}


def capturable_state() -> State:
    state = plain_state()
    in_place_buffers(state)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, Optimizer)
    optimizer.param_groups[0]["capturable"] = True
    return state


def plain_tensor() -> State:
    return {"x": torch.arange(100.0)}


@pytest.mark.parametrize("make", [plain_tensor, capturable_state, plain_state])
def test_where_too_much_is_to_be_set_aside_whoever_saves_waits_until_it_is_copied(
    guard: Guard, make: Callable[[], State], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_ASIDE_NBYTES", 0)
    state = make()
    taken = Taken(state, guard)
    with ThreadPoolExecutor(2) as pool:
        waited = pool.submit(taken.snapshot.instant.wait)
        with pytest.raises(TimeoutError):
            waited.result(timeout=0.1)
        copied = pool.submit(taken.copy)
        waited.result(timeout=10)
        for local in flatten(state).tensors.values():
            if local.layout.name in taken.snapshot._at_once:
                local.memory[0].zero_()
        copied.result(timeout=10)
    taken.assert_holds_the_instant()


def test_whoever_waits_for_a_snapshot_that_failed_goes_on(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_ASIDE_NBYTES", 0)
    taken = Taken(plain_tensor(), guard)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(taken.snapshot.instant.wait)
        with pytest.raises(TimeoutError):
            waited.result(timeout=0.1)
        taken.snapshot.end()
        assert waited.result(timeout=10)


def test_a_slot_that_came_after_the_instant_is_not_in_the_snapshot(guard: Guard) -> None:
    state = plain_state()
    in_place_buffers(state)
    taken = Taken(state, guard)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, Optimizer)
    slots = next(iter(optimizer.state.values()))
    slots["exp_avg"] = torch.zeros_like(slots["exp_avg"])
    slots["another"] = torch.zeros(3)
    taken.copy()
    taken.assert_holds_the_instant()


@pytest.mark.parametrize("late_s", [0.0, 0.005, 0.05])
@pytest.mark.parametrize(
    ("make", "train"),
    [
        (plain_state, in_place_buffers),
        (clipped_state, in_place_buffers),
        (plain_state, accumulation),
        (state_of_two, two_optimizers),
        (averaged_state, average),
    ],
    ids=["buffers", "max_norm", "accumulation", "two optimizers", "average"],
)
def test_whatever_a_loop_does_a_snapshot_is_of_one_instant(
    guard: Guard, make: Callable[[], State], train: Callable[[State], None], late_s: float
) -> None:
    state = make()
    train(state)
    for _ in range(4):
        taken = Taken(state, guard)
        with copying(taken, guard, after_s=late_s):
            train(state)
        taken.assert_holds_the_instant()


def test_a_change_that_no_step_made_voids_the_snapshot_and_names_the_tensor(guard: Guard) -> None:
    # As schedule-free optimizers do when they switch between training and evaluation.
    state = plain_state()
    in_place_buffers(state)
    taken = Taken(state, guard)
    module = state["model"]
    assert isinstance(module, nn.Module)
    with torch.no_grad():
        module.get_parameter("2.weight").lerp_(torch.zeros(8, 16), 0.5)
    with pytest.raises(StateError, match=r"model/2\.weight.*was changed while it was being copied") as caught:
        taken.copy()
    assert caught.value.code == "state.changed"


def test_memory_that_was_taken_away_voids_the_snapshot(guard: Guard) -> None:
    # As offloading does.
    state = plain_state()
    in_place_buffers(state)
    taken = Taken(state, guard)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, Optimizer)
    slot = next(iter(optimizer.state.values()))["exp_avg"]
    slot.data = slot.clone()
    with pytest.raises(StateError, match=r"exp_avg'? was changed"):
        taken.copy()


def test_writes_that_torch_does_not_see_wait_under_the_guard(guard: Guard) -> None:
    state = plain_state()
    module = state["model"]
    assert isinstance(module, nn.Module)
    taken = Taken(state, guard)
    with copying(taken, guard, after_s=0.05):
        guard.wait()
        module.get_parameter("2.weight").data.zero_()
    taken.assert_holds_the_instant()


def test_a_parameter_that_got_other_memory_is_saved_as_it_was(guard: Guard) -> None:
    state = plain_state()
    module = state["model"]
    assert isinstance(module, nn.Module)
    taken = Taken(state, guard)
    module.get_parameter("2.weight").data = torch.zeros(8, 16)
    taken.copy()
    taken.assert_holds_the_instant()


@pytest.mark.parametrize(("first", "numel"), [(0, 35), (3, 17), (34, 1), (7, 21)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128])
def test_ranges_of_memory_however_it_is_strided(first: int, numel: int, dtype: torch.dtype) -> None:
    for tensor in (torch.randn(5, 7).to(dtype), torch.randn(7, 5).to(dtype).T, torch.randn(5, 14).to(dtype)[:, ::2]):
        data = np.zeros(numel * tensor.element_size(), np.uint8)
        routes = Routes([RoutedPart("x", FlatRange(first, first + numel), 0)], data, rank=0)
        for _ in range(2):
            data[:] = 0
            snapshot_module._copy(routes.pairs(tensors_of(x=tensor)))
            wanted = tensor.contiguous().reshape(-1)[first : first + numel]
            assert data.tobytes() == bits(wanted)


def test_copies_are_made_in_calls_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_CALL_NBYTES", 64)
    calls: list[int] = []
    copy = torch._foreach_copy_

    def counted(targets: list[torch.Tensor], sources: list[torch.Tensor], **options: bool) -> None:
        calls.append(sum(target.nbytes for target in targets))
        copy(targets, sources, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    tensors = tensors_of(**{f"x{number}": torch.full((9,), number) for number in range(5)})
    routed = Routed(tensors)
    snapshot_module._copy(routed.routes.pairs(tensors))
    assert routed.copied() == {name: bits(local.memory[0]) for name, local in tensors.items()}
    assert calls == [72] * 5


def test_later_copies_take_what_tensors_hold_and_where_they_are_by_then() -> None:
    signalling = torch.tensor([0x7F800001, 0x7FC12345, 1], dtype=torch.int32).view(torch.float32)
    first = tensors_of(x=torch.randn(3), y=torch.tensor([True, False]), z=torch.randn(4, 6).T)
    routed = Routed(first)
    snapshot_module._copy(routed.routes.pairs({"x": first["x"]}))
    later = tensors_of(
        x=signalling, y=torch.tensor([2, 3], dtype=torch.uint8).view(torch.bool), z=torch.randn(6, 8)[:, ::2]
    )
    for _ in range(2):
        snapshot_module._copy(routed.routes.pairs(later))
        assert routed.copied() == {name: bits(local.memory[0]) for name, local in later.items()}


def test_tensors_of_inference_are_not_guarded(guard: Guard) -> None:
    module = nn.Linear(3, 2)
    with torch.inference_mode():
        module.weight = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    state: State = {"model": module, "optimizer": optimizer}
    module.bias.grad = torch.ones(2)
    optimizer.step()
    assert held(state) == {"model/bias", "optimizer/state/model/bias/momentum_buffer"}
    taken = Taken(state, guard)
    taken.copy()
    taken.assert_holds_the_instant()
    with torch.inference_mode():
        optimizer.state[module.bias]["momentum_buffer"] = torch.ones(2)
    assert held(state) == {"model/bias"}
    taken = Taken(state, guard)
    taken.copy()
    taken.assert_holds_the_instant()


def test_a_sparse_slot_is_refused_by_its_name() -> None:
    module = nn.Linear(3, 2)
    optimizer = SGD(module.parameters(), lr=0.1)
    module.weight.grad = torch.ones(2, 3)
    optimizer.state[module.weight]["seen"] = torch.eye(2).to_sparse()
    with pytest.raises(StateError, match=r"optimizer/state/model/weight/seen.*layout torch\.sparse_coo"):
        Snapshot({"model": module, "optimizer": optimizer}, rank=0, world_size=1)


def test_what_is_guarded_follows_the_optimizer_and_its_tensors() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Embedding(4, 2))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = SGD(module[0].parameters(), lr=0.1, momentum=0.9)
    state: State = {"model": module, "optimizer": optimizer}
    assert held(state) == {"model/0.weight", "model/0.bias"}
    optimizer.add_param_group({"params": module[1].weight})
    assert held(state) == {"model/0.weight", "model/0.bias", "model/1.weight"}
    optimizer.param_groups[1]["params"] = [module[2].weight]
    assert held(state) == {"model/0.weight", "model/0.bias", "model/2.weight"}
    embedding = module[2]
    assert isinstance(embedding, nn.Embedding)
    embedding.max_norm = 1.0
    assert held(state) == {"model/0.weight", "model/0.bias"}
    optimizer.param_groups[0]["capturable"] = True
    assert not held(state)


def test_hooks_are_set_once_and_taken_away(guard: Guard) -> None:
    state = plain_state()
    optimizer = state["optimizer"]
    assert isinstance(optimizer, Optimizer)
    for _ in range(3):
        guard.hook([optimizer])
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    guard.unhook()
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_a_large_tensor_on_an_accelerator_is_copied_in_parts_that_make_up_the_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_CALL_NBYTES", 64)
    source = torch.arange(3 * 5 * 7).reshape(3, 5, 7).to(dtype)
    target = torch.zeros_like(source)
    for targets, sources in snapshot_module._parts(target, source):
        assert sum(part.nbytes for part in targets) <= 64
        torch._foreach_copy_(targets, sources)
    assert torch.equal(target, source)
