"""The sizes of the data files that the next save will write: all ranks plan it once, and nothing gets a place.

Ranks describe their layouts as for a save (see ``holdfast.agreement.planning``), but compare no copies: the plan takes
it that copies are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.agreement.assignment import WriteAssignment
from holdfast.agreement.local import RankState
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.format import manifest as fmt
from holdfast.phases import done, told
from holdfast.plan.save import ManifestTemplate, RankMessage, RankValues, plan_save
from holdfast.state.flatten import FlatState

_NAME: Final = "the plan of the next save"


class _Summary(msgspec.Struct, frozen=True):
    """One rank's layout in short, and the bytes of its values."""

    digest: bytes
    columns: bytes
    values_nbytes: int


def expected_nbytes(flat: FlatState | Exception, ranks: Sequence[int], channel: Channel, deadline: Deadline) -> int:
    """The size of the data files that this rank would write if the state `flat` were saved; 0 if it writes none.
    `ranks` are the global ranks of the job. The tensors may be on the meta device. Collective.

    Raises, on all ranks, the error of a rank whose state could not be walked (`flat`), and of one that cannot be
    planned.
    """
    rank = ranks[channel.rank]
    mine = told(flat, lambda flat: RankState.of(flat, number=channel.rank, rank=rank))
    summaries: list[_Summary] = []

    def ask(messages: list[_Summary]) -> tuple[int, ...]:
        summaries[:] = messages
        first: dict[bytes, int] = {}
        for number, message in enumerate(messages):
            first.setdefault(message.digest, number)
        return tuple(first.values())

    def plan(bodies: list[bytes]) -> bytes:
        known = {summaries[number].digest: body for number, body in enumerate(bodies) if body}
        messages = [RankMessage(message.digest, message.columns) for message in summaries]
        values = tuple(
            RankValues(each, message.values_nbytes, (f"of rank {each}",))
            for each, message in zip(ranks, summaries, strict=True)
            if message.values_nbytes
        )
        return ManifestTemplate.of(plan_save(messages, known, ranks=ranks), values).encode_table()

    asked = channel.exchange(
        "expected layouts", told(mine, _summary), ask, deadline, takes=_Summary, gives=tuple[int, ...]
    )
    body = done(mine).layout.body if channel.rank in asked else b""
    table = fmt.decode_table(channel.exchange("expected files", body, plan, deadline), path=_NAME)
    return WriteAssignment.in_manifest("", table, rank).nbytes


def _summary(mine: RankState) -> _Summary:
    described = mine.describe(None, plan_id="", alone=True)
    shared = described.values_nbytes if mine.number == 0 else 0
    return _Summary(mine.layout.digest, mine.layout.columns, shared + described.own_nbytes)
