"""Saves that find no space: what the policy does not keep is deleted at once, and the save tries again."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import ProcessGroup

from holdfast.checkpointer.pruning import Pruning
from holdfast.checkpointer.save_errors import FULL, by_hand
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel
from holdfast.errors import HoldfastError, StorageError


def once_it_fits(
    save: Callable[[], None],
    pruning: Pruning,
    *,
    step: int,
    group: ProcessGroup | None,
    timeout_s: float,
) -> None:
    """Call `save`, the save of `step`, which raises the same error on all ranks; and again while it finds no space
    (``storage.full``) and deletions make some. Collective over `group`.

    Raises what `save` raises; an error about space says why nothing was deleted, and what to do.
    """
    while True:
        since = pruning.num_freed
        try:
            save()
        except StorageError as error:
            if error.code != FULL:
                raise
            why = _made_room(pruning, since, error, step=step, group=group, timeout_s=timeout_s)
            if why:
                error.details, error.action = (*error.details, why), by_hand(pruning.run_url)
                raise
        else:
            return


def _made_room(
    pruning: Pruning, since: int, trouble: StorageError, *, step: int, group: ProcessGroup | None, timeout_s: float
) -> str:
    """Have the first rank make room. Returns "" on all ranks if it did, else why not."""
    deadline = Deadline(timeout_s)
    try:
        channel = default_channel(f"room for step {step}", group, deadline=deadline, step=step)
        why = channel.exchange(
            "room",
            b"",
            lambda _: pruning.make_room(since, 0.9 * deadline.remaining_s()),
            deadline,
            takes=bytes,
            gives=str,
        )
        channel.await_readers(deadline)
    except HoldfastError as error:
        raise trouble from error
    return why
