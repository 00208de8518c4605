"""The checks of the options of a `Checkpointer`, before it does anything."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from inspect import getattr_static
from pathlib import Path
from types import FunctionType

from holdfast.checkpointer.memory_option import Memory
from holdfast.control.torch_store import global_rank
from holdfast.options import check_flag, check_timeout, checked_number
from holdfast.policy.chance import kept_by_chance
from holdfast.policy.keep import KeepPolicy, check_keep, join_hint
from holdfast.policy.stop import StopAfter
from holdfast.policy.when import SavePolicy
from holdfast.store.base import SCHEME
from holdfast.store.urls import absolute

_log = logging.getLogger(__name__)


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
    on_failed_save: object,
    timeout_s: object,
) -> None:
    """Raise `TypeError` or `ValueError` for an option of a wrong type or value. The error says what it takes. Warn of a
    `keep` that keeps by chance only what `save` saves."""
    if when_full not in ("wait", "skip"):
        raise ValueError(f"when_full must be 'wait' or 'skip', not {when_full!r}")
    if on_failed_save != "warn" and not isinstance(on_failed_save, StopAfter):
        raise TypeError(
            f"on_failed_save must be 'warn', or a limit such as holdfast.StopAfter(missed=3), not {on_failed_save!r}"
        )
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
    if takeover != "always":
        check_flag("takeover", takeover)
    elif max_resumes is not None:
        raise ValueError("max_resumes counts no jobs of takeover='always': they resume one checkpoint at the same time")
    check_timeout(timeout_s)
    if save is not None and isinstance(keep, KeepPolicy) and global_rank() == 0:
        for warning in kept_by_chance(save, keep):
            _log.warning("%s", warning)


def checked_disk(local: object, *, memory: object, takeover: object) -> Path | None:
    """The option `local` of a `Checkpointer`, as an absolute path. Raises `TypeError` or `ValueError` where it is none,
    or does not fit the other options."""
    if local is None:
        return None
    if not isinstance(local, str | os.PathLike) or SCHEME.match(os.fspath(local)):
        raise TypeError(f"local is the path of a folder on a disk of each node, not {local!r}")
    if memory is None:
        raise ValueError("local= needs memory, from where the keeper writes to that disk; leave memory=None out")
    if takeover == "always":
        raise ValueError("local= is not for jobs with takeover='always': each of their saves ends the turn of another")
    return Path(absolute(os.fspath(local)))


def check_listeners(listeners: object) -> None:
    """Raise `TypeError` unless `listeners` is a list of objects that hear events. A class of such objects is none."""
    if not isinstance(listeners, Sequence):
        hint = f"; write listeners=[{_called(listeners)}]" if _has_hear(listeners) else ""
        raise TypeError(f"listeners is a list of objects that hear events, not {listeners!r}{hint}")
    for listener in listeners:
        if not _has_hear(listener):
            raise TypeError(f"a listener has a method hear(event, source), which {listener!r} lacks")
        # A class whose `hear` is a static method or one of the class is a listener itself.
        if isinstance(listener, type) and isinstance(getattr_static(listener, "hear"), FunctionType):
            name = listener.__name__
            raise TypeError(f"listeners has the class {name}, which hears no events; write {_called(listener)}")


def _has_hear(listener: object) -> bool:
    return callable(getattr(listener, "hear", None))


def _called(listener: object) -> str:
    return f"{listener.__name__}(...)" if isinstance(listener, type) else repr(listener)
