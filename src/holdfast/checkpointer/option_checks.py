"""The checks of the options of a `Checkpointer`, before it does anything."""

from __future__ import annotations

from holdfast.checkpointer.memory_option import Memory
from holdfast.options import check_flag, check_timeout, checked_number
from holdfast.policy.keep import check_keep, join_hint
from holdfast.policy.when import SavePolicy


def check_options(
    *,
    memory: object,
    save: object,
    keep: object,
    initial: object,
    fork: object,
    max_resumes: object,
    takeover: object,
    when_full: object,
    timeout_s: object,
) -> None:
    """Raise `TypeError` or `ValueError` for an option of a wrong type or value. The error says what it takes."""
    if when_full not in ("wait", "skip"):
        raise ValueError(f"when_full must be 'wait' or 'skip', not {when_full!r}")
    if not isinstance(memory, Memory | None):
        raise TypeError(f"memory must be a holdfast.Memory, or None to save to storage only, not {memory!r}")
    if not isinstance(save, SavePolicy | None):
        hint = join_hint("save", save, SavePolicy)
        raise TypeError(
            "save must be a policy, such as holdfast.EverySteps(1000), or several of them joined by |, not "
            f"{save!r}{hint}"
        )
    check_keep(keep)
    check_flag("fork", fork)
    if fork and initial is None:
        raise ValueError("fork=True needs initial, the checkpoint of the run that is forked")
    if max_resumes is not None:
        checked_number("max_resumes", max_resumes, least=1, reason="no job could resume any checkpoint")
    check_flag("takeover", takeover)
    check_timeout(timeout_s)
