"""The errors of saves into memory that failed, were skipped, or are not durable yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from holdfast.checkpointer.snapshot_messages import SnapshotRoom
from holdfast.errors import ConfigurationError, DeadlineError, FencedError, HoldfastError, StateError, StorageError
from holdfast.format.records import Place
from holdfast.store.base import Location
from holdfast.wording import count

#: The code of errors that say that storage has no space.
FULL: Final = "storage.full"
#: Most steps that a message names one by one.
_MOST_NAMED: Final = 6
#: The beginning of errors that last until somebody changes the set-up.
_SET_UP: Final = "[config."
#: Codes of errors after which saves go to storage for a while: this node's memory cannot be used now.
_UNUSABLE: Final = frozenset({"config.memory", "config.keeper", "config.not_private", "storage.memory"})


def is_unusable(error: HoldfastError) -> bool:
    """Whether `error` says that the memory of a node cannot be used now, so that saves go to storage."""
    return error.code in _UNUSABLE


def incomplete(step: int) -> StateError:
    """The save of `step` was given up, because some rank could not copy its part, or its node has lost it."""
    return StateError(
        f"step {step} was given up: a rank failed to copy its part, or its node has lost it, so the checkpoint can "
        "never be whole.",
        code="state.incomplete",
        action="Read the log of that rank for the cause. The next save tries again.",
        step=step,
    )


def kept_on_node(steps: Sequence[int], *, on_disk: Collection[int]) -> tuple[str, ...]:
    """The details of an error about snapshots of `steps` that are not durable yet: where this rank's parts are safe.
    Those of the steps `on_disk` are on the disk of the node."""
    disk, memory = [step for step in steps if step in on_disk], [step for step in steps if step not in on_disk]
    kept = [f"of {_named(disk)} on the disk of its node"] if disk else []
    kept += [f"of {_named(memory)} in the memory of its node, until the node goes down"] if memory else []
    if not kept:
        return ()
    later = (
        "The keeper goes on without this process: it brings these steps to the run when the store takes them, the "
        "oldest first. holdfast ls lists them then, and a restore on the same nodes finds them before."
    )
    return f"The part of this rank is safe: {'; '.join(kept)}.", later


def _named(steps: Sequence[int]) -> str:
    """Steps in words; of many, only the first and the last one."""
    if len(steps) > _MOST_NAMED:
        return f"{count(len(steps), 'step')} from {min(steps)} to {max(steps)}"
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(map(str, steps))


def unwatched(step: int) -> DeadlineError:
    """The save of `step` was not durable yet when its `Checkpointer` was closed, which ended the watching."""
    return DeadlineError(
        f"step {step} was staged, but not yet durable, when its Checkpointer was closed.",
        code="timeout.closed",
        action="Wait for the keeper, which makes it durable; `holdfast ls` lists it then.",
        step=step,
    )


def unprotected(step: int) -> ConfigurationError:
    """The save of `step` is not one that copies on other nodes protect."""
    return ConfigurationError(
        f"step {step} has no copies on other nodes, because nothing asks for them, or it went to storage.",
        code="config.unprotected",
        action="Pass memory=Memory(protect=Copies(1)) to the Checkpointer.",
        step=step,
    )


def replaced_unprotected(step: int, why: str) -> StorageError:
    """A newer save took the memory of `step` before it had all its copies, for the reason `why` ("": none is known)."""
    return StorageError(
        f"step {step} was replaced in memory before other nodes had copies of it.",
        code="storage.unprotected",
        action="No action needed if this is rare: newer ones are protected. Else save less often.",
        step=step,
        retryable=True,
        details=(why,) if why else (),
    )


def removed(step: int) -> StorageError:
    """The only copy of `step` is lost: it was damaged, or it was removed and no keeper has it mapped."""
    return StorageError(
        f"step {step} is lost: its snapshot in the memory of the node was damaged, or was removed and the keeper died.",
        code="storage.memory_removed",
        action="Keep others from removing the memory (RemoveIPC=no in logind.conf). The next save tries again.",
        step=step,
        tier="node memory",
    )


def not_yet_given_back(path: Path) -> StorageError:
    """The memory at `path` is being given back, but is still in use."""
    return StorageError(
        f"The memory at '{path}' cannot be used yet: it holds snapshots that are not durable.",
        code="storage.memory",
        action="No action needed: a later save tries memory again.",
        path=str(path),
        tier="node memory",
    )


def unusable(error: HoldfastError) -> StorageError:
    """`error`, as an error about memory that earlier saves could use."""
    return StorageError(
        f"The memory of this node cannot be used any more: {error.message}",
        code="storage.memory",
        action=error.action,
        path=error.path,
        tier="node memory",
    )


def superseded(step: int, why: str) -> HoldfastError:
    """The keeper did not commit `step`. `why` is the reason ("": the checkpoint is not whole)."""
    if why:
        return FencedError(
            f"step {step} is not committed: {why}", code="fenced.epoch", action="Stop this job.", step=step
        )
    return incomplete(step)


def skipped(step: int, found: SnapshotRoom) -> StorageError:
    """The save of `step` was skipped, because ranks had no room, or the restored checkpoint is not committed yet."""
    return StorageError(
        f"step {step} was skipped: {found.why_full}.",
        code="storage.slow",
        action="Save less often, pass Memory(generations=3), or when_full='wait'.",
        step=step,
        retryable=True,
        details=last_try(found.held_up),
    )


def skipped_in_memory(step: int, found: SnapshotRoom) -> StorageError:
    """The save of `step` to memory alone was skipped, for the same reasons as in `skipped`. It never waits."""
    if found.awaits_commit:
        return skipped(step, found)
    return StorageError(
        f"step {step} was skipped: no slot of {found.full_ranks} is free. The snapshots there are being written to "
        "storage, or copied to other nodes.",
        code="storage.slow",
        action="No action needed if this is rare: the next save tries again. Else pass Memory(generations=3), or save "
        "less often.",
        step=step,
        retryable=True,
        details=last_try(found.held_up),
    )


def stopped(step: int, why: str, age: str, last: str) -> StorageError:
    """The policy of the job ends training at `step`, for the reason `why`. `age` says how old the newest durable
    checkpoint is, `last` why the last save failed."""
    return StorageError(
        f"training stops at step {step}, as on_failed_save says: {why}; {age}.",
        code="storage.stopped",
        action="Repair the store, and start the job again: it resumes from the newest checkpoint in memory or storage.",
        step=step,
        details=_lines(f"The last failure: {last}") if last else (),
    )


def without_memory(step: int) -> StorageError:
    """A save of `step` to memory alone was skipped, because saves go to storage."""
    return StorageError(
        f"step {step} was skipped: the memory of a node cannot be used, and this save would go to memory alone.",
        code="storage.memory",
        action="See the log for the trouble with memory. Other saves go to storage meanwhile.",
        step=step,
        retryable=True,
    )


def held_in_memory(step: int) -> ConfigurationError:
    """A save of `step` was to memory alone, so it is not durable."""
    return ConfigurationError(
        f"step {step} was saved to memory alone: it is not durable.",
        code="config.memory_only",
        action="Wait for `staged`, or save without memory_only=True.",
        step=step,
    )


def no_policy(verb: str, run: str) -> ConfigurationError:
    """The error of a loop whose `Checkpointer` has no policy."""
    return ConfigurationError(
        f"{verb}() was called on a Checkpointer without a policy, so it does not know when to save.",
        code="config.no_policy",
        action="Give the Checkpointer a policy, such as save=holdfast.EverySteps(1000), or call save().",
        path=run,
    )


def closed(verb: str, run: Location) -> ConfigurationError:
    """The error of a call on a closed `Checkpointer`."""
    return ConfigurationError(
        f"{verb} was called on a closed Checkpointer of '{run}'.",
        code="config.closed",
        action="Make a new Checkpointer, or close this one only after training.",
        path=run.url,
    )


def no_memory(path: str) -> ConfigurationError:
    """A save to memory alone was asked of a `Checkpointer` without memory."""
    return ConfigurationError(
        f"a save to memory alone was asked for, but the Checkpointer of '{path}' has memory=None.",
        code="config.no_memory",
        action="Give it a holdfast.Memory(), or save without memory_only=True.",
        path=path,
    )


def not_staged(step: int, error: BaseException) -> StorageError:
    """An unexpected exception ended the background save of `step`."""
    return StorageError(
        f"step {step} could not be staged: {error!r}.",
        code="storage.memory",
        action="Read the traceback in the log. The next save tries again.",
        step=step,
    )


def too_slow(found: SnapshotRoom, timeout_s: float) -> DeadlineError:
    """A save found no slot in time."""
    return DeadlineError(
        f"No slot of {found.full_ranks} became free within {timeout_s:.0f} s: their snapshots are not durable yet.",
        code="timeout.slot",
        action=unless_known(
            found.held_up, "Save less often, keep more generations, or read the log of the keeper for the cause."
        ),
        rank=found.full[0],
        details=last_try(found.held_up),
    )


def no_time(found: SnapshotRoom) -> DeadlineError:
    """A save found no slot before the machine of some rank is taken away."""
    return DeadlineError(
        "The machine is taken away before a snapshot finds room: the ones before it are not durable yet.",
        code="timeout.preempted",
        action=unless_known(found.held_up, "Read the log of the keeper for the cause, or save less often."),
        rank=found.full[0],
        details=last_try(found.held_up),
    )


def not_committed(place: Place, held_up: str, path: str) -> DeadlineError:
    """A save could not follow the checkpoint at `place`, which was restored from memory and is not committed yet."""
    return DeadlineError(
        f"The checkpoint {place}, restored from memory, is not committed yet, so no save can follow it.",
        code="timeout.commit",
        action=unless_known(
            held_up, "Remove what holds its keeper up (see the keeper's log); memory keeps the checkpoint until then."
        ),
        path=path,
        details=last_try(held_up),
    )


def never_committed(place: Place, why: str, path: str) -> FencedError:
    """The checkpoint at `place`, which was restored from memory, will never be committed. `why` is the keeper's
    reason."""
    return FencedError(
        f"the checkpoint {place}, restored from memory, will never be committed: {why}",
        code="fenced.epoch",
        action="Call restore() again, or stop this job.",
        path=path,
    )


def interrupted(step: int) -> StorageError:
    """An exception ended the call of `save` for `step` before the state was copied or cloned."""
    return StorageError(
        f"step {step} is not saved: an exception ended the call of `save` before the state was copied.",
        code="storage.interrupted",
        action="Save again: the next save is not affected.",
        step=step,
    )


def by_hand(run: str) -> str:
    """The next action of a user whose saves find no space in the run at the URL `run`."""
    return (
        f"Free space, raise the quota, or keep fewer checkpoints: holdfast prune '{run}' deletes them by a policy. "
        f"holdfast doctor '{run}' lists saves that killed jobs have left."
    )


def unless_known(trouble: str, action: str) -> str:
    """The `action` of an error about a snapshot that is not durable; another one if `trouble` is that storage is full,
    or that the set-up is wrong."""
    if FULL in trouble:
        return "Free space, or delete checkpoints of the run (holdfast prune): the keeper then makes snapshots durable."
    if _SET_UP in trouble:
        return "Do what the error of the last attempt says; memory keeps the snapshots until then."
    return action


def _lines(text: str) -> tuple[str, ...]:
    """The lines of `text` as details of an error, which prints each on a line of its own."""
    return tuple(line.strip() for line in text.splitlines())


def last_try(trouble: str, *, aim: str = "make a snapshot durable") -> tuple[str, ...]:
    """The details of an error about a snapshot that is not that far yet; `trouble` says why the last try failed."""
    return (f"The last attempt to {aim} failed: {trouble}",) if trouble else ()
