"""The work after a restore that makes the first save quick, and the restored snapshot safe.

Memory is taken early: its size follows from a plan of the state, with the optimizer slots of a first step. Nodes
protect again what they hold, if some of them were lost.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from torch.distributed import ProcessGroup

from holdfast.agreement.expected_files import expected_nbytes
from holdfast.checkpointer.background import Background
from holdfast.checkpointer.memory_tier import MemoryTier
from holdfast.checkpointer.reprotection import Reprotection
from holdfast.checkpointer.restoring import Restored
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.format.patterns import Globs
from holdfast.phases import attempt, done
from holdfast.snapshot.device import devices_of
from holdfast.state.expected_state import expected_state
from holdfast.state.flatten import FlatState, flatten

_log = logging.getLogger(__name__)
#: Limit for what is added to the size of large states: each of two slots and their copies has it.
_MAX_MARGIN_NBYTES: Final = 3 << 20


def prepare_saves(
    tier: MemoryTier,
    restored: Restored,
    state: Mapping[str, object],
    *,
    select: str | Sequence[str] | None,
    group: ProcessGroup | None,
    deadline: Deadline,
) -> None:
    """Have the nodes protect what was `restored` from their memory, and begin to prepare memory, in what is left of the
    restore's time, until `deadline`. Collective."""
    if tier.stager.policy:
        # In a time of its own: where keepers do not answer, the restore took all of its time, and it has succeeded.
        meeting_deadline = Deadline(deadline.timeout_s)
        channel = default_channel("restore", group, deadline=meeting_deadline)
        part = attempt(lambda: tier.stager.protected_part(_flattened(state, channel, select), channel))
        channel.confirm("state", part, meeting_deadline)
        work = Reprotection(tier.stager, done(part), restored.left, channel.in_background(), meeting_deadline)
        tier.begin(Background(work))
    if restored.report.tier != "node memory":  # which has the slots of the last job
        reserve_memory(tier, state, select=select, group=group, deadline=deadline)


def _flattened(
    state: Mapping[str, object], channel: Channel, select: str | Sequence[str] | None, *, meta: bool = False
) -> FlatState:
    globs = None if select is None else Globs(select)
    return flatten(state, rank=channel.rank, world_size=channel.world_size, select=globs, meta=meta)


def reserve_memory(
    tier: MemoryTier,
    state: Mapping[str, object],
    *,
    select: str | Sequence[str] | None,
    group: ProcessGroup | None,
    deadline: Deadline,
) -> None:
    """Begin to prepare memory for saves of `state` in the background, so that the first save does not wait for it.
    Collective. Whatever prevents that is not an error: the first save takes memory itself, and raises what is wrong.
    """
    channel = default_channel("restore", group, deadline=deadline)
    flat = attempt(lambda: _flattened(expected_state(state), channel, select, meta=True))
    try:
        nbytes = expected_nbytes(flat, group_ranks(group), channel, deadline)
        channel.await_readers(deadline)
        memory = chain.from_iterable(each.memory for each in done(flat).tensors.values())
        tier.reserve(_with_margin(nbytes), device=next(iter(devices_of(memory)), None))
    except Exception as error:  # noqa: BLE001 - a reservation promises nothing; what is wrong, the first save meets too
        _log.info("memory for the first save is not reserved: %s", error)


def _with_margin(nbytes: int) -> int:
    """A size with room for what the plan leaves out: the state of schedulers and random generators, say."""
    return nbytes + min(nbytes // 64, _MAX_MARGIN_NBYTES) + (1 << 20) if nbytes else 0
