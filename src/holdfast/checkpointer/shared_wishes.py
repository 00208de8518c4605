"""From a wish of one rank to a step after which all ranks save."""

from __future__ import annotations

import logging
import time
from typing import Final, Protocol

import torch.distributed as dist
from msgspec.structs import replace

from holdfast.agreement.lead import Lead
from holdfast.agreement.step_ahead import ProposedStep, StepAhead
from holdfast.checkpointer.rounds import Rounds
from holdfast.control.registers import SharedRegisters
from holdfast.control.torch_store import Member, is_current
from holdfast.errors import HoldfastError, StorageError
from holdfast.policy.wish import Wish

_log = logging.getLogger(__name__)

#: Interval at which a rank looks for proposals; longer in large jobs, so that one store serves all ranks.
_POLL_S: Final = 0.1
_MAX_POLLS_PER_S: Final = 5000
#: Time that a rank waits at a proposed step for the promises of the others.
_PATIENCE_S: Final = 10.0
#: Time limit for one request to the job's store.
_REQUEST_S: Final = 10.0
#: Time for which a rank proposes nothing after it could not.
_SILENCE_S: Final = 60.0
#: Pause of the background thread after the store did not answer.
_OUTAGE_S: Final = 5.0
#: The register that a rank sets when its loop has ended.
_LEFT: Final = "left"


class SharedWishes(Protocol):
    """The wishes of all ranks for a save. All ranks enter the same steps."""

    def enter(self, step: int, *, patience_s: float) -> ProposedStep | None:
        """Enter `step`. Returns what all ranks have agreed on, if they have agreed to save after it, with the present
        age of the reason. Seldom blocks, and at most for `patience_s`."""

    def wish(self, step: int, wish: Wish, *, scheduled: int | None, ends: bool = False, age_s: float = 0.0) -> bool:
        """This rank, which has entered `step`, wants a save, and has known the reason for `age_s` seconds; with `ends`,
        all ranks then end the loop. Returns whether the save follows this step already. May be called in every step
        until there is a save. `scheduled` is the next step that a save follows anyway which grants the wish; if it is
        near, this does nothing."""

    def withdraw(self) -> bool:
        """Take back the promises of this rank, which wants to end its loop alone. Returns False if all ranks have
        agreed on a step ahead, which this rank then has to reach."""

    @property
    def is_stale(self) -> bool:
        """Whether the ranks have got another process group since, so that they need other `SharedWishes`."""

    def close(self) -> None:
        """The loop has ended."""


class WishesOfOne:
    """The wishes of the only rank: each is granted at once."""

    def enter(self, step: int, *, patience_s: float) -> ProposedStep | None:
        """As `SharedWishes.enter`."""
        return None

    def wish(self, step: int, wish: Wish, *, scheduled: int | None, ends: bool = False, age_s: float = 0.0) -> bool:
        """As `SharedWishes.wish`."""
        return True

    def withdraw(self) -> bool:
        """As `SharedWishes.withdraw`."""
        return True

    @property
    def is_stale(self) -> bool:
        """As `SharedWishes.is_stale`."""
        return False

    def close(self) -> None:
        """As `SharedWishes.close`."""


class WishesOfRanks:
    """The wishes of the ranks of a job, which agree on a step ahead (`StepAhead`). `use` names what they agree on. Make
    it on all ranks, in the same order among the calls of the library. The ranks agree on nothing before they have
    exchanged a message."""

    def __init__(self, member: Member, use: str) -> None:
        poll_s = max(_POLL_S, member.world_size / _MAX_POLLS_PER_S)
        self._registers = SharedRegisters(member, use, timeout_s=_REQUEST_S)
        self._ahead = StepAhead(world_size=member.world_size, is_first_rank=member.rank == 0)
        # Every rank hears of a proposal within one interval, and of the verdict within another.
        self._lead = Lead(2 * poll_s)
        self._entered_s: float | None = None
        #: The number of this rank's last proposal and the time of it, until its verdict is known.
        self._proposed: tuple[int, float] | None = None
        self._num_refused = 0
        self._member = member
        #: This rank proposes nothing before this time.
        self._silent_until_s = 0.0
        self._rounds = Rounds(_Listener(self._ahead, self._registers, poll_s).look, name=f"holdfast-{use}")

    def enter(self, step: int, *, patience_s: float) -> ProposedStep | None:
        """As `SharedWishes.enter`."""
        now_s = time.monotonic()
        if self._entered_s is not None:
            self._lead.note_step(now_s - self._entered_s)
        self._entered_s = now_s
        if self._proposed is not None:
            self._learn(*self._proposed, now_s)
        appointment = self._ahead.arrive(step)
        if appointment is None:
            return None
        try:
            appointment.decided.wait(min(_PATIENCE_S, patience_s))
        finally:  # also on Ctrl-C, for the others wait for this rank
            self._ahead.give_up(appointment, self._registers.foreground)
        self._entered_s = None  # a save takes its own time
        if not appointment.is_agreed:
            return None
        proposed = appointment.proposed
        return replace(proposed, age_s=proposed.age_s + time.monotonic() - appointment.heard_s)

    def wish(self, step: int, wish: Wish, *, scheduled: int | None, ends: bool = False, age_s: float = 0.0) -> bool:
        """As `SharedWishes.wish`."""
        ahead = step + self._lead.steps
        if (
            self._proposed is None
            and self._registers.has_joined
            and self._ahead.is_idle(until=ahead)
            and (scheduled is None or ahead < scheduled)
            and time.monotonic() >= self._silent_until_s
        ):
            self._propose(ProposedStep(ahead, wish.reason, ends, wish.memory_only, age_s))
        return False

    def _propose(self, proposed: ProposedStep) -> None:
        registers = self._registers.foreground
        try:
            left = registers.read(_LEFT)
            if left is None:
                self._proposed = self._ahead.propose(proposed, registers), time.monotonic()
                return
            why = f"rank {left.decode()} has ended its loop"
        except StorageError as error:
            why = str(error)
        self._silent_until_s = time.monotonic() + _SILENCE_S
        _log.warning("a save is wanted (%s), but the ranks cannot agree on it: %s", proposed.reason, why)

    def withdraw(self) -> bool:
        """As `SharedWishes.withdraw`."""
        try:
            return self._ahead.withdraw(self._registers.foreground)
        except StorageError as error:
            _log.debug("the promises of this rank cannot be taken back, because the store is gone: %s", error)
            return True

    @property
    def is_stale(self) -> bool:
        """As `SharedWishes.is_stale`."""
        return not is_current(self._member)

    def close(self) -> None:
        """As `SharedWishes.close`."""
        self._rounds.close()
        try:
            if self._registers.has_joined:
                self._registers.foreground.claim(_LEFT, str(self._member.rank).encode())
        except StorageError as error:
            _log.debug("the other ranks do not hear that this rank has ended its loop: %s", error)
        self._registers.leave()

    def _learn(self, number: int, proposed_s: float, now_s: float) -> None:
        """Look for the verdict on this rank's last proposal."""
        if self._ahead.number == number:
            return
        self._proposed = None
        if self._ahead.num_refused > self._num_refused:
            self._lead.note_refusal()
        else:
            self._lead.note_verdict(now_s - proposed_s)
        self._num_refused = self._ahead.num_refused


class _Listener:
    """Answers the proposals of all ranks, every `poll_s`, until the process group is gone."""

    def __init__(self, ahead: StepAhead, registers: SharedRegisters, poll_s: float) -> None:
        self._ahead = ahead
        self._registers = registers
        self._poll_s = poll_s
        self._has_warned = False

    def look(self) -> float | None:
        """Answer all proposals. Returns the pause until the next look; None where there will be none."""
        if not dist.is_initialized():
            return None
        try:
            while self._registers.has_joined and self._ahead.look(self._registers.background):
                pass
        except HoldfastError as error:
            if not self._has_warned and dist.is_initialized():
                self._has_warned = True
                _log.warning("this rank does not hear of saves that other ranks want; it tries again: %s", error)
            return _OUTAGE_S
        return self._poll_s
