"""Rank 0's step in a transfer after all ranks have agreed on a plan: send the table of the state to all of them."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.agreement.plan_messages import Compare, Questions
from holdfast.agreement.planner import AgreedPlan
from holdfast.format import values as value_codec


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """The plan of a transfer: the table of the source (empty: all ranks know it), and the values that belong to all
    ranks."""

    plan_id: str
    table: bytes
    values: bytes


#: The messages that rank 0 may send until all ranks know the plan.
ANSWERS: Final = Questions | Compare | Announced


class Announcing:
    """The `Placing` of a transfer: its plan gets no place in any history, and is stored nowhere."""

    def place(self, agreed: AgreedPlan) -> Announced:
        """The message about the plan, with the table unless all ranks know it."""
        table = b"" if agreed.is_known else agreed.memory.draft.encode_table()
        return Announced(agreed.memory.plan_id, table, value_codec.encode(agreed.values))
