"""Agreement of all ranks on a step that lies ahead, without a message in any other step.

A rank that wants all ranks to act (to save, say) proposes a step a little ahead of its own. The others hear of it in a
background thread. Each rank that has not reached the proposed step promises to look for the verdict there; the promise
that completes the count of ranks makes the verdict "yes". A rank that is at the step already, or past it, makes the
verdict "no", and the proposer chooses a later step. So the thread that trains reads a local dict in every step, and
waits only where it reaches a proposed step before the verdict.

All ranks act in the same steps, whatever dies or is late, because of three rules:

* Proposals are numbered, and a number's proposal and verdict are registers: the first value that a rank claims for one
  stays. Ranks take the numbers one after the other.
* The verdict is "yes" only after every rank has promised. A rank promises only before it enters the step, and a rank
  that has promised does not leave the step without the verdict.
* A rank that waits for a verdict too long claims "no". Whatever the register then holds is the verdict for all.

The verdict of number n may be forgotten when n + 1 has the verdict "yes": each rank that promised n + 1 knew it.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

import msgspec

from holdfast.decoding import decode_msgpack
from holdfast.latch import Latch

_YES: Final = b"yes"
_NO: Final = b"no"


class Registers(Protocol):
    """Values and counters that all ranks share. Each object is for one thread."""

    def claim(self, key: str, value: bytes) -> bytes:
        """Store `value` under `key` unless the key has a value. Returns the value that the key has."""

    def read(self, key: str) -> bytes | None:
        """The value under `key`, if it has one."""

    def count(self, key: str) -> int:
        """Add one to the counter `key`, atomically, and return the new value."""

    def forget(self, key: str) -> None:
        """Remove `key`, if it exists."""


class ProposedStep(msgspec.Struct, frozen=True):
    """A step after which all ranks are to act, the reason, whether the loop `ends` then, whether the act is a save
    to memory alone, and for how many seconds the proposer has known the reason."""

    step: int
    reason: str
    ends: bool = False
    memory_only: bool = False
    age_s: float = 0.0


class Appointment:
    """A proposed step that this rank has promised to stop at."""

    def __init__(self, number: int, proposed: ProposedStep) -> None:
        self.number = number
        self.proposed = proposed
        #: The time (of `time.monotonic`) at which this rank heard of the proposal.
        self.heard_s = time.monotonic()
        #: Whether all ranks act; None before the verdict is known here.
        self.is_agreed: bool | None = None
        self.decided = Latch()

    def decide(self, *, is_agreed: bool) -> None:
        """Note the verdict."""
        self.is_agreed = is_agreed
        self.decided.set()


class StepAhead:
    """One rank's part of the agreement. The thread that trains calls `arrive`, `give_up` and `propose`; the background
    thread calls `look`. There is no lock, because an exception (Ctrl-C) may come between any two steps of the thread
    that trains; the comments say why the order of reads and writes suffices (under the interpreter's lock they happen
    one after the other).
    """

    def __init__(self, *, world_size: int, is_first_rank: bool) -> None:
        self._world_size = world_size
        self._is_first_rank = is_first_rank
        #: Whether this rank has answered the proposal of the number that it deals with, and waits for the verdict.
        self._has_answered = False
        #: The last step that the thread that trains has entered.
        self._step = -1
        #: The promises of this rank, by step.
        self._appointments: dict[int, Appointment] = {}
        #: The number that this rank deals with, and the appointment for it, if this rank promised.
        self._number = 0
        self._answered: Appointment | None = None
        #: Whether the thread that trains is asking for a verdict.
        self._is_asking = False
        self._num_forgotten = 0
        #: The number of proposals that did not find all ranks in time.
        self.num_refused = 0

    def is_idle(self, *, until: int) -> bool:
        """Whether no proposal waits for its verdict, and nothing is agreed on for a step after the present one and up
        to `until`, as far as this rank knows. (A step that is agreed on may be far away, where steps have become
        slower.)"""
        return not self._has_answered and not any(self._step < step <= until for step in tuple(self._appointments))

    @property
    def number(self) -> int:
        """The number of the next proposal, as far as this rank knows."""
        return self._number

    def arrive(self, step: int) -> Appointment | None:
        """Enter `step`. Returns the appointment to keep: wait until it is decided, or `give_up`."""
        # First the step, then the appointments. `_promise` writes the appointment first and then reads the step, so at
        # least one of the two threads sees what the other has written, and no promise is made for a step that this
        # thread passes without a look.
        self._step = step
        return self._appointments.pop(step, None) if self._appointments else None

    def give_up(self, appointment: Appointment, registers: Registers) -> None:
        """Decide `appointment` at once: all ranks act if the last promise has been made, else none does."""
        # `look` does not go on to the next number while this is set, so nobody can forget the verdict meanwhile.
        self._is_asking = True
        try:
            if appointment.is_agreed is None:
                verdict = registers.claim(_verdict_key(appointment.number), _NO)
                appointment.decide(is_agreed=verdict == _YES)
        finally:
            self._is_asking = False

    def withdraw(self, registers: Registers) -> bool:
        """Decide all appointments ahead at once, as `give_up` does. Returns whether none of them was agreed on, so that
        this rank may leave."""
        for appointment in tuple(self._appointments.values()):
            self.give_up(appointment, registers)
            if appointment.is_agreed and appointment.proposed.step > self._step:
                return False
        return True

    def propose(self, proposed: ProposedStep, registers: Registers) -> int:
        """Propose a step, and return the number of the proposal. If another rank has proposed a step under this number,
        that one counts."""
        number = self._number
        registers.claim(_proposal_key(number), msgspec.msgpack.encode(proposed))
        return number

    def look(self, registers: Registers) -> bool:
        """Look once at the proposal or the verdict that is due next, and deal with it. Returns whether there was one:
        then it is worth looking again at once."""
        if not self._has_answered:
            data = registers.read(_proposal_key(self._number))
            if data is None:
                return False
            self._answer(decode_msgpack(data, ProposedStep), registers)
            return True
        verdict = registers.read(_verdict_key(self._number))
        if verdict is None:
            return False
        self._conclude(registers, is_agreed=verdict == _YES)
        return True

    def _answer(self, proposed: ProposedStep, registers: Registers) -> None:
        self._answered = self._promise(proposed)
        self._has_answered = True
        if self._answered is None:
            registers.claim(_verdict_key(self._number), _NO)
        elif registers.count(_promises_key(self._number)) == self._world_size:
            registers.claim(_verdict_key(self._number), _YES)

    def _promise(self, proposed: ProposedStep) -> Appointment | None:
        """The appointment that the thread that trains will find at the proposed step; None if it may be too late."""
        if proposed.step in self._appointments:
            return None
        appointment = Appointment(self._number, proposed)
        self._appointments[proposed.step] = appointment
        if self._step < proposed.step:
            return appointment
        # The thread that trains may have found it just now: it then waits for the verdict, which will be "no".
        self._appointments.pop(proposed.step, None)
        return None

    def _conclude(self, registers: Registers, *, is_agreed: bool) -> None:
        appointment, number = self._answered, self._number
        if appointment is not None:
            appointment.decide(is_agreed=is_agreed)
            if not is_agreed:
                self._appointments.pop(appointment.proposed.step, None)
        if self._is_asking:
            return  # `give_up` reads the verdict; look again
        self.num_refused += not is_agreed
        self._answered = None
        # First the number: a proposer that finds this rank idle must find the new number.
        self._number = number + 1
        self._has_answered = False
        if is_agreed and self._is_first_rank:
            self._forget_before(number, registers)

    def _forget_before(self, number: int, registers: Registers) -> None:
        """Remove the registers of all numbers before `number`, which all ranks have agreed on."""
        for old in range(self._num_forgotten, number):
            for key in (_proposal_key(old), _promises_key(old), _verdict_key(old)):
                registers.forget(key)
        self._num_forgotten = number


def _proposal_key(number: int) -> str:
    return f"step/{number}"


def _promises_key(number: int) -> str:
    return f"promises/{number}"


def _verdict_key(number: int) -> str:
    return f"verdict/{number}"
