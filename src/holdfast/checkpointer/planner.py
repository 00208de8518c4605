"""The plan of a save into memory: that of any save, told to all ranks, and stored by those who make it durable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from holdfast.agreement.coordinator import Coordinator, PlanMemory, Request
from holdfast.agreement.planning import Planning
from holdfast.checkpointer.backoff import Backoff
from holdfast.checkpointer.messages import Agreed, Room, Standing, Told
from holdfast.decoding import decode_msgpack
from holdfast.format import records
from holdfast.run.session import JOB


class StagePlanner(Coordinator):
    """Rank 0's side."""

    def __init__(self, request: Request, ranks: Sequence[int], memory: PlanMemory | None) -> None:
        super().__init__(request, ranks, memory)
        self._told: list[Told] = []

    def ask(self, payloads: Sequence[bytes]) -> bytes:
        """As `Coordinator.ask`; payloads are `Told`."""
        self._told = [decode_msgpack(payload, Told) for payload in payloads]
        return super().ask([told.described for told in self._told])

    def publish(self, memory: PlanMemory, diverged: tuple[str, ...]) -> bytes:
        """Take the next place of the run, and tell what is to be staged for it: `Agreed`, encoded."""
        identity = self._begin()
        assert self._run is not None
        self.memory = replace(memory, num_saves=memory.num_saves + 1)
        known = all(told.plan_id == memory.plan_id for told in self._told)
        return msgspec.msgpack.encode(
            Agreed(
                records.folder_name(identity.step, identity.checkpoint_id),
                identity.checkpoint_id,
                identity.run_id,
                identity.place,
                JOB.incarnation(self._run),
                identity.step,
                identity.created,
                dict(identity.metrics),
                diverged,
                memory.plan_id,
                b"" if known else memory.draft.encode(identity, diverged),
            )
        )


def room(payloads: Sequence[bytes], run_id: str) -> Room:
    """On rank 0: whether all ranks have room for another snapshot of the run, from the `Standing` of each."""
    standings = [decode_msgpack(payload, Standing) for payload in payloads]
    sealed = [each.sealed for each in standings]
    needed = None if None in sealed else min(each for each in sealed if each is not None)
    full = tuple(number for number, each in enumerate(standings) if not each.has_room(needed))
    given_up = tuple(sorted({each for standing in standings for each in standing.given_up}))
    as_before = all(standing.is_as_before for standing in standings)
    trouble = next((standing.trouble for standing in standings if standing.trouble is not None), None)
    heard = [standing.reached for standing in standings]
    reached = None if None in heard else min(each for each in heard if each is not None)
    all_looked = all(standing.has_looked for standing in standings)
    backoff = Backoff.merged([standing.backoff for standing in standings])
    held_up = next((standings[number].held_up for number in full if standings[number].held_up), "")
    return Room(run_id, needed, full, given_up, as_before, trouble, reached, all_looked, backoff, held_up)


class StagePlanning(Planning[Agreed]):
    """One rank's side."""

    def told(self, described: bytes) -> bytes:
        """`Told`, encoded."""
        share = self._known.share
        return msgspec.msgpack.encode(Told(described, "" if share is None else share.plan_id))
