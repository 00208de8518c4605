"""The plan of a transfer: that of a save of the source, told to all ranks instead of stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from holdfast.agreement.coordinator import Coordinator, PlanMemory, Request
from holdfast.agreement.messages import Compare, Questions
from holdfast.format import values as value_codec
from holdfast.format.records import Place
from holdfast.format.values import Node
from holdfast.plan.save import Identity
from holdfast.store.timed import TimedStore


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells first: its source as in a save, and the last plan of this group that it knows ("": none)."""

    described: bytes
    plan_id: str


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """The plan: the manifest of the source (empty: all ranks know it), and the values that belong to all ranks."""

    plan_id: str
    manifest: bytes
    values: bytes


Answer = Questions | Compare | Announced


class Planner(Coordinator):
    """Rank 0's side of one transfer. `memory` is a plan that all ranks know, `nodes` are the values of rank 0."""

    def __init__(
        self, storage: TimedStore, ranks: Sequence[int], memory: PlanMemory | None, nodes: Mapping[str, Node]
    ) -> None:
        # Copies that are found to differ are always an error: which of them would be the published one?
        request = Request(storage, step=0, metrics={}, takeover=False, created=0.0, strict=True)
        super().__init__(request, ranks, memory)
        self._nodes = nodes

    def publish(self, memory: PlanMemory, diverged: tuple[str, ...]) -> bytes:
        """Take the plan of `memory` and tell what it is: `Announced`, encoded."""
        manifest = b""
        if self.memory is None or self.memory.plan_id != memory.plan_id:
            identity = Identity(memory.plan_id, "0" * 32, Place(1, 1), step=0, created=0.0, metrics={})
            manifest = memory.draft.encode(identity, diverged)
        self.memory = replace(memory, num_saves=memory.num_saves + 1)
        nodes = self._nodes if self.values is None else self.values
        return msgspec.msgpack.encode(Announced(memory.plan_id, manifest, value_codec.encode(nodes)))
