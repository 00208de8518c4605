"""States on a GPU: a save captures one instant, and work queued on the GPU does not overwrite a restored state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.node_memory.slots import Slot, slot_names
from tests.checkpointer.test_checkpointer import folder_of
from tests.support.bound import bits
from tests.support.keepers import end_keepers

pytestmark = pytest.mark.gpu

#: The largest tensor is copied in several calls.
WIDTH = 5000
#: Of a clock that all GPUs have: about half a second.
LATE = 10**9


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    end_keepers(memory.node_dir)


@contextmanager
def behind_other_work(*, own_stream: bool) -> Iterator[None]:
    """Work that is queued in this block runs half a second later, on the default stream or on another."""
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE)  # type: ignore[no-untyped-call]
        yield


class Loop:
    """A model with a buffer and an optimizer, after a step; one of its tensors is not contiguous."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, WIDTH, device="cuda")
        self.seen = torch.zeros(1000, device="cuda")
        self.model.register_buffer("seen", self.seen)
        self.model.turned = nn.Parameter(torch.randn(300, 200, device="cuda").t())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer}
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for number, slots in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}/{name}": tensor for name, tensor in slots.items()}
        return found

    def copies(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.tensors().items()}

    @torch.no_grad()
    def change(self) -> None:
        for tensor in self.tensors().values():
            tensor.add_(1)


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    torch.cuda.synchronize()
    assert {name: bits(tensor.cpu()) for name, tensor in expected.items()} == {
        name: bits(tensor.cpu()) for name, tensor in found.items()
    }


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_save_is_of_its_instant_whatever_is_queued(run: str, memory: Memory, own_stream: bool) -> None:
    loop = Loop()
    torch.cuda.synchronize()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.save(0).durable.wait()
        for step in range(1, 4):  # into slots that were filled before, too
            with behind_other_work(own_stream=own_stream):
                loop.change()  # runs when the call of save is long over
                expected = loop.copies()
                handle = checkpointer.save(step)
                loop.seen.fill_(7)  # is set aside
                with checkpointer.guard():
                    loop.change()
            handle.durable.wait()
            torch.cuda.synchronize()
            restored = Loop()
            holdfast.load(run, into=restored.state)
            assert_same(expected, restored.tensors())


def test_slots_are_registered_so_that_the_device_fills_them_by_itself(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.save(0).durable.wait()
        assert checkpointer._tier is not None
        arena = checkpointer._tier.stager._memory.used.arena
        assert arena.wait(60)
        slots = arena._slots
        assert [torch.from_numpy(slot.data).is_pinned() for slot in slots] == [True, True]
    with folder_of(run, memory.node_dir) as folder, Slot(folder, slot_names(folder)[0]) as slot:
        assert not torch.from_numpy(slot.data).is_pinned()


@pytest.mark.parametrize("own_stream", [False, True])
def test_what_is_restored_is_not_written_over_by_what_was_queued(run: str, memory: Memory, own_stream: bool) -> None:
    loop = Loop()
    expected = loop.copies()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.save(0).durable.wait()
    restored = Loop()
    with behind_other_work(own_stream=own_stream):
        restored.change()
        with Checkpointer(run, restored.state, memory=memory) as checkpointer:
            assert checkpointer.restore().tier == "node memory"
        assert_same(expected, restored.tensors())


def test_a_synchronous_save_waits_for_what_was_queued(run: str) -> None:
    loop = Loop()
    with behind_other_work(own_stream=True):
        loop.change()
        expected = loop.copies()
        holdfast.save(run, loop.state, 0)
    restored = Loop()
    holdfast.load(run, into=restored.state)
    assert_same(expected, restored.tensors())
