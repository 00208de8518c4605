"""The first half of a save, on one rank: describe the state, and agree with all ranks on a plan and a place for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.control.channel import Channel, Deadline
from holdfast.format.values import Node
from holdfast.phases import Stopwatch, attempt
from holdfast.run.paths import canonical
from holdfast.saving.coordinator import Coordinator, PlanMemory, Request
from holdfast.saving.local import NUM_TURNS, Local
from holdfast.saving.messages import Answer, Compare, Planned, Questions
from holdfast.saving.share import Share
from holdfast.state.gather import Remembered
from holdfast.storage.base import Storage

_Key = tuple[str, tuple[int, ...]]

#: Of the last save, per run and group: rank 0's knowledge of all ranks, each rank's share, and what its walk found.
_plans: dict[_Key, PlanMemory] = {}
_shares: dict[_Key, Share] = {}
_walks: dict[_Key, Sequence[Remembered]] = {}


class Planning:
    """One save's planning on one rank. `ranks` are the global ranks of the group, in its order."""

    def __init__(
        self, channel: Channel, deadline: Deadline, request: Request, ranks: Sequence[int], watch: Stopwatch
    ) -> None:
        self._channel = channel
        self._deadline = deadline
        self._rank = ranks[channel.rank]
        self._key = (canonical(request.storage.uri), tuple(ranks))
        self._watch = watch
        self.coordinator = Coordinator(request, ranks, _plans.get(self._key))

    def agree(self, state: Mapping[str, object]) -> tuple[Planned, Local]:
        """What all ranks have agreed on, and what this one described. Collective."""
        known = _shares.get(self._key)
        local: list[Local] = []
        with self._watch.phase("describe"):
            described = attempt(lambda: self._describe(state, known, local))
            answer = self._channel.exchange("describe", described, self.coordinator.ask, self._deadline)
        mine = local[0]
        with self._watch.phase("plan"):
            while not isinstance(asked := msgspec.msgpack.decode(answer, type=Answer), Planned):
                answer = self._replied(asked, mine)
        return asked, mine

    def share(self, storage: Storage, planned: Planned) -> Share:
        """This rank's part in the plan, which is remembered for the next save."""
        share = _shares[self._key] = Share.of(storage, planned, self._rank, _shares.get(self._key))
        if self.coordinator.memory is not None:
            _plans[self._key] = self.coordinator.memory
        return share

    def values(self, mine: Local) -> dict[str, Node]:
        """The values that this rank's data file holds."""
        values = dict(mine.flat.own_nodes)
        if self._channel.rank == 0:
            values.update(self.coordinator.values or mine.flat.nodes)
        return values

    def _describe(self, state: Mapping[str, object], known: Share | None, local: list[Local]) -> bytes:
        number, world_size = self._channel.rank, self._channel.world_size
        last = _walks.get(self._key, ())
        mine = Local.of(state, number=number, rank=self._rank, world_size=world_size, last=last)
        local.append(mine)
        _walks[self._key] = mine.flat.remembered
        turn = None if known is None else known.turn % NUM_TURNS
        return mine.describe(turn, alone=world_size == 1)

    def _replied(self, asked: Questions | Compare, mine: Local) -> bytes:
        """The answer to what this rank replies to a question of rank 0. All ranks follow the same answers."""
        if isinstance(asked, Compare):
            digests = attempt(lambda: mine.compare(asked))
            return self._channel.exchange("compare", digests, self.coordinator.compare, self._deadline)
        details = attempt(lambda: mine.answer(asked))
        return self._channel.exchange(
            "plan", details, lambda payloads: self.coordinator.plan(asked, mine, payloads), self._deadline
        )
