"""The plan of a save into memory: that of any save, told to all ranks, and stored by those who make it durable."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from holdfast.checkpointer.messages import Agreed, Skipped, Told
from holdfast.format import records
from holdfast.plan.save import Identity
from holdfast.run.history import Run
from holdfast.run.session import JOB
from holdfast.saving.coordinator import Coordinator, PlanMemory, Request
from holdfast.saving.planning import Planning


class StagePlanner(Coordinator):
    """Rank 0's side. With `skips`, nothing is planned while some rank has no slot."""

    def __init__(self, request: Request, ranks: Sequence[int], memory: PlanMemory | None, *, skips: bool) -> None:
        super().__init__(request, ranks, memory)
        self._skips = skips
        self._told: list[Told] = []

    def ask(self, payloads: Sequence[bytes]) -> bytes:
        """As `Coordinator.ask`, or `Skipped`."""
        self._told = [msgspec.msgpack.decode(payload, type=Told) for payload in payloads]
        full = tuple(number for number, told in enumerate(self._told) if told.full)
        if full and self._skips:
            return msgspec.msgpack.encode(Skipped(full, self._given_up))
        return super().ask([told.described for told in self._told])

    def publish(self, memory: PlanMemory, diverged: tuple[str, ...]) -> bytes:
        """Take the next place of the run, and tell what is to be staged for it: `Agreed`, encoded."""
        run = Run.create(self._storage)
        place = JOB.begin(run, takeover=self._request.takeover, world_size=len(self._told))
        identity = Identity(
            checkpoint_id=secrets.token_hex(8),
            run_id=run.run_id,
            place=place,
            step=self._request.step,
            created=self._request.created,
            metrics=self._request.metrics,
        )
        self.memory = replace(memory, num_saves=memory.num_saves + 1)
        known = all(told.plan_id == memory.plan_id for told in self._told)
        sealed = [told.sealed for told in self._told]
        return msgspec.msgpack.encode(
            Agreed(
                records.folder_name(identity.step, identity.checkpoint_id),
                identity.checkpoint_id,
                run.run_id,
                place,
                identity.step,
                identity.created,
                dict(identity.metrics),
                diverged,
                memory.plan_id,
                b"" if known else memory.draft.encode(identity, diverged),
                None if None in sealed else min(each for each in sealed if each is not None),
                self._given_up,
            )
        )

    @property
    def _given_up(self) -> tuple[str, ...]:
        return tuple(sorted({each for told in self._told for each in told.given_up}))


class StagePlanning(Planning[Agreed | Skipped]):
    """One rank's side; `tell` makes what it tells of what it described."""

    tell: Callable[[bytes], Told]

    def told(self, described: bytes) -> bytes:
        """`Told`, encoded."""
        return msgspec.msgpack.encode(self.tell(described))
