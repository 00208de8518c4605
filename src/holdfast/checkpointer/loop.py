"""The decisions of one training loop: whether a save follows the step that just ended."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from typing import Final
from weakref import WeakValueDictionary

from torch.distributed import ProcessGroup

from holdfast.checkpointer.auto_trigger import AutoTrigger
from holdfast.checkpointer.events import SaveEvent
from holdfast.checkpointer.loop_metrics import LoopMetrics
from holdfast.checkpointer.loop_rules import LoopRules
from holdfast.checkpointer.memory_option import Memory
from holdfast.checkpointer.preemption import Preemption
from holdfast.checkpointer.request_trigger import RequestTrigger
from holdfast.checkpointer.restore_report import RestoreReport
from holdfast.checkpointer.shared_wishes import SharedWishes, WishesOfOne, WishesOfRanks
from holdfast.checkpointer.signals import SignalNote
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel, member_of
from holdfast.errors import ConfigurationError
from holdfast.phases import LOG
from holdfast.policy.pace import Choice
from holdfast.policy.schedule import StepSchedule
from holdfast.policy.triggers import Metrics, Trigger, triggers_of
from holdfast.policy.when import Auto, OnRequest, SavePolicy
from holdfast.policy.wish import Wish, stronger
from holdfast.protection.policies import Parity
from holdfast.run.session import JOB
from holdfast.store.base import Location

#: Parts of an evaluation are counted up from a multiple of this.
_MAX_PARTS: Final = 1 << 32
#: There is one registry per process, because two loops of a process would train one state.
_loops: Final[WeakValueDictionary[tuple[int, Location], Loop]] = WeakValueDictionary()


class Loop:
    """Decides after each step of one training loop whether a save follows, identically on all ranks of `group`.

    Steps of a schedule need no agreement. What only one rank knows (a time, a metric, a request) is a wish of that
    rank, and the ranks agree on a step ahead. A wish is granted by the next save, whatever asked for that.
    """

    def __init__(
        self,
        policy: SavePolicy,
        run: Location,
        signals: Mapping[int, SignalNote],
        *,
        group: ProcessGroup | None,
        memory: Memory | None,
    ) -> None:
        """Raises `ConfigurationError`, code ``config.two_loops``, if this process has another loop on `run`."""
        self._key = (os.getpid(), run)
        if self._key in _loops:
            gc.collect()  # the other one may belong to a Checkpointer that nobody can close, because it was dropped
        if self._key in _loops:
            raise _second_loop(run)
        self._group = group
        member = member_of(group)
        self._is_first_rank = is_first_rank = member is None or member.rank == 0
        policies = tuple(policy.parts())
        self._policy = policy
        self._schedule = StepSchedule(policies)
        self._triggers: list[Trigger] = []
        now_s = time.monotonic()
        if is_first_rank:
            self._triggers.extend(triggers_of(policies, now_s=now_s))
        world_size = 1 if member is None else member.world_size
        self._autos = [
            AutoTrigger(each, run, world_size=world_size, now_s=now_s, has_memory=memory is not None)
            for each in policies
            if isinstance(each, Auto) and is_first_rank
        ]
        self._triggers.extend(self._autos)
        self._requests = [
            RequestTrigger(each, run, signals, is_first_rank=is_first_rank)
            for each in policies
            if isinstance(each, OnRequest)
        ]
        self._triggers.extend(self._requests)
        self.preemption = Preemption(policies, signals)
        self._wishes = _wishes_of(group, "saves")
        self.metrics = LoopMetrics()
        #: The agreement on the end of an evaluation, whose parts are counted like steps; None before the first one.
        self._evaluation: SharedWishes | None = None
        self._part = 0
        #: The reason why all ranks have broken off an evaluation; the next step ends the loop.
        self._broken_off: str | None = None
        self._has_broken_off = False
        self._wish: Wish | None = None
        self._has_parity = memory is not None and isinstance(memory.protect, Parity)
        #: A wish of all ranks, for the next step that ends.
        self._wish_of_all: Wish | None = None
        #: The step that has to end next; None if any may.
        self._next: int | None = None
        #: Whether the state was restored since the last step ended.
        self._was_restored = False
        #: Whether the ranks have to exchange a message before they agree on anything. Each loop does so once, because
        #: ranks may have joined in an earlier call that failed for others.
        self._must_meet = True
        _loops[self._key] = self

    @property
    def choice(self) -> Choice | None:
        """The present choice of the policy `Auto`; None before the first one, and on ranks that do not choose."""
        return self._autos[0].choice if self._autos else None

    def rules(self, total: int) -> LoopRules:
        """The rules of a loop of `total` steps, which all ranks must have alike."""
        return LoopRules.of(self._policy, total)

    def expect(self, restored: RestoreReport) -> None:
        """The state was restored: the next step that ends has to be the one after. If the checkpoint was rebuilt from
        parity, that does not protect it any more, so that step is saved to memory, which the nodes of this job protect.
        """
        self._next = restored.next_step
        self._was_restored, self._must_meet = True, False
        if self._has_parity and restored.tier == "peer memory":
            self._wish_of_all = Wish("parity protects the restored checkpoint no longer", memory_only=True)

    def check_restorable(self) -> None:
        """Raise `ConfigurationError`, code ``config.step_order``, if steps of this job have ended already: a restore
        would undo them."""
        if self._next is not None:
            raise _unrestored(self._next - 1)

    def begin(self, step: int, *, last: int, anew: bool) -> int:
        """The loop begins with `step`, unless another step is expected and it does not begin `anew`, and ends with
        `last`, which a save follows whatever the policy says. Returns the first step."""
        if self._next is None or anew:
            self._next = step
        JOB.note_trained()
        self._was_restored = False
        self._schedule.last = last
        if self._next > last and self._is_first_rank:
            LOG.info("the next step would be %d, so nothing is left of %d steps", self._next, last + 1)
        return self._next

    def due(self, step: int, metrics: Metrics | None) -> Wish | None:
        """The save that follows `step`; None if there is none. The same on all ranks.

        Raises `ConfigurationError`, code ``config.step_order``, if another step should have ended.
        """
        if self._next is not None and step != self._next:
            raise _out_of_order(step, self._next)
        self._next = step + 1
        self._was_restored = False
        JOB.note_trained()
        self.preemption.arm()
        self._meet(f"step {step}")
        agreed = self._wishes.enter(step, patience_s=self.preemption.known_left_s)
        if agreed is not None and agreed.ends:
            self.preemption.agree(age_s=agreed.age_s)
        broken_off, self._broken_off = self._broken_off, None
        if broken_off is not None:
            return Wish(broken_off)
        due = None if agreed is None else Wish(agreed.reason, agreed.memory_only)
        due = stronger(stronger(due, self._schedule.wish(step)), self._wish_of_all)
        now_s = time.monotonic()
        for trigger in self._triggers:
            self._wish = stronger(trigger.wish(metrics, now_s), self._wish)
        preempted = None if self.preemption.has_ended else self.preemption.reason
        if preempted is not None:
            # Another save does not grant this: all ranks have to know that the loop ends with it.
            age_s = self.preemption.age_s
            if self._wishes.wish(step, Wish(preempted), scheduled=None, ends=True, age_s=age_s):
                self.preemption.agree()
                return Wish(preempted)
            if self.preemption.has_waited() and self._wishes.withdraw():
                self.preemption.give_up()
                return None
        elif self._wish is not None and stronger(due, self._wish) is not due:
            scheduled = self._schedule.next_after(step, memory_only=self._wish.memory_only)
            return self._wish if self._wishes.wish(step, self._wish, scheduled=scheduled) else due
        return due

    @property
    def is_over(self) -> bool:
        """Whether the loop ends with the last step that ended. After an evaluation that was broken off, one more step
        has to end, because the last one may not be saved."""
        return self.preemption.has_ended and self._broken_off is None

    @property
    def is_preempted(self) -> bool:
        """Whether the loop ends for a preemption, and something is left to do. After a save of the last one of its
        steps, nothing is, but for an evaluation that was broken off."""
        last = self._schedule.last
        is_done = last is not None and self._next is not None and self._next > last and not self._has_broken_off
        return self.preemption.is_given_up or (self.preemption.is_agreed and not is_done)

    def begin_evaluation(self) -> None:
        """An evaluation begins. Its parts have the same numbers on all ranks, whatever earlier ones had."""
        self._part = (self._part // _MAX_PARTS + 1) * _MAX_PARTS

    def breaks_off(self) -> bool:
        """Whether all ranks break off their evaluation, of which each has just done the same part, because one of them
        has heard of a preemption."""
        if self.preemption.has_ended:
            return True
        self._meet("evaluation")
        if self._evaluation is None:
            self._evaluation = _wishes_of(self._group, "evaluations")
        self._part += 1
        agreed = self._evaluation.enter(self._part, patience_s=self.preemption.known_left_s)
        reason = self.preemption.reason
        age_s = self.preemption.age_s
        if agreed is not None:
            self._broken_off, age_s = agreed.reason, agreed.age_s
        elif reason is not None:
            granted = self._evaluation.wish(self._part, Wish(reason), scheduled=None, ends=True, age_s=age_s)
            self._broken_off = reason if granted else None
        if self._broken_off is None:
            return False
        self._has_broken_off = True
        self.preemption.agree(age_s=age_s)
        return True

    def next_after(self, step: int) -> int:
        """The number of the step that comes after `step`: another one than the next if the state was restored in that
        step. Raises `ConfigurationError`, code ``config.step_missing``, if `step` has not ended."""
        assert self._next is not None
        if self._next <= step and not self._was_restored:
            raise ConfigurationError(
                f"step {step} of the loop ended without a call of step(), so nothing decided whether to save.",
                code="config.step_missing",
                action="Call checkpointer.step(step) at the end of each step.",
                step=step,
            )
        return self._next

    def saved(self, begun_s: float, *, memory_only: bool) -> None:
        """A save has begun at the time `begun_s` (of `time.monotonic`): it grants the wishes that this rank had then;
        one to memory alone those for such a save."""
        if self._wish is not None and (self._wish.memory_only or not memory_only):
            self._wish = None
        self._wish_of_all = None
        now_s = time.monotonic()
        for trigger in self._triggers:
            trigger.saved(now_s, begun_s=begun_s, memory_only=memory_only)

    def hear(self, event: SaveEvent) -> None:
        """Hear an event of a save. Any thread may call this."""
        for each in self._autos:
            each.hear(event)

    def close(self) -> None:
        """The loop has ended."""
        _loops.pop(self._key, None)
        self._close_wishes()
        self.preemption.close()
        for auto in self._autos:
            auto.close()
        for request in self._requests:
            request.close()

    def _meet(self, place: str) -> None:
        """Exchange a message with the other ranks, unless this loop has done so in their present process group: they
        agree on nothing before. `place` names what all of them are about to do."""
        is_stale = self._wishes.is_stale
        self._must_meet |= is_stale
        if not self._must_meet:
            return
        if is_stale:
            self._close_wishes()
        deadline = Deadline(self.preemption.patience_s)
        default_channel(place, self._group, deadline=deadline).confirm("meeting", b"", deadline)
        if is_stale:
            self._wishes, self._evaluation = _wishes_of(self._group, "saves"), None
        self._must_meet = False

    def _close_wishes(self) -> None:
        for wishes in (self._wishes, self._evaluation):
            if wishes is not None:
                wishes.close()


def _wishes_of(group: ProcessGroup | None, use: str) -> SharedWishes:
    member = member_of(group)
    return WishesOfOne() if member is None or member.world_size == 1 else WishesOfRanks(member, use)


def _second_loop(run: Location) -> ConfigurationError:
    return ConfigurationError(
        f"two Checkpointers of this process decide when to save into '{run}'.",
        code="config.two_loops",
        action="Call step() of one of them, and close() it before another one takes its place.",
        path=run.url,
    )


def _out_of_order(step: int, expected: int) -> ConfigurationError:
    return ConfigurationError(
        f"step({step}) was called where step({expected}) comes next.",
        code="config.step_order",
        action="Call step() once after each step, with the number of that step; the first one after restore() is "
        "report.next_step.",
        step=step,
    )


def _unrestored(step: int) -> ConfigurationError:
    return ConfigurationError(
        f"step({step}) was called before steps() began, which restores the state and would undo that step.",
        code="config.step_order",
        action="Train inside the loop over steps(), or call restore() before the first step.",
        step=step,
    )
