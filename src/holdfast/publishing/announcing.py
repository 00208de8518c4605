"""Rank 0's step in a transfer after all ranks have agreed on a plan: send the manifest to all of them."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.agreement.messages import Compare, Questions
from holdfast.agreement.planner import AgreedPlan
from holdfast.format import values as value_codec
from holdfast.format.records import Place
from holdfast.plan.save import CheckpointIdentity


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """The plan of a transfer: the manifest of the source (empty: all ranks know it), and the values that belong to all
    ranks."""

    plan_id: str
    manifest: bytes
    values: bytes


#: The messages that rank 0 may send until all ranks know the plan.
ANSWERS: Final = Questions | Compare | Announced


class Announcing:
    """The `Placing` of a transfer: its plan gets no place in any history, and is stored nowhere."""

    def place(self, agreed: AgreedPlan) -> Announced:
        """The message about the plan, with the manifest unless all ranks know it."""
        manifest, plan_id = b"", agreed.memory.plan_id
        if not agreed.is_known:
            identity = CheckpointIdentity(plan_id, "0" * 32, Place(1, 1), step=0, created=0.0, metrics={})
            manifest = agreed.memory.draft.encode(identity, agreed.diverged)
        return Announced(plan_id, manifest, value_codec.encode(agreed.values))
