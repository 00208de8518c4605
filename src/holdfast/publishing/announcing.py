"""What rank 0 does in a transfer when all ranks have agreed on a plan: it tells all of them the manifest."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.agreement.messages import Compare, Questions
from holdfast.agreement.planner import AgreedPlan
from holdfast.format import values as value_codec
from holdfast.format.records import Place
from holdfast.plan.save import CheckpointIdentity


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """The plan: the manifest of the source (empty: all ranks know it), and the values that belong to all ranks."""

    plan_id: str
    manifest: bytes
    values: bytes


#: What rank 0 sends until the plan is placed.
ANSWERS: Final = Questions | Compare | Announced


class Announcing:
    """A plan has no place in any history, and is stored nowhere."""

    def place(self, agreed: AgreedPlan) -> Announced:
        """Tell what the plan is."""
        manifest, plan_id = b"", agreed.memory.plan_id
        if not agreed.is_known:
            identity = CheckpointIdentity(plan_id, "0" * 32, Place(1, 1), step=0, created=0.0, metrics={})
            manifest = agreed.memory.draft.encode(identity, agreed.diverged)
        return Announced(plan_id, manifest, value_codec.encode(agreed.values))
