"""`load` with the arguments of DCP."""

from __future__ import annotations

import logging
import os
from typing import Final

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.stateful import Stateful

from holdfast.calls import CHECKPOINTER_RESTORE, LOAD, PLAIN, outer, refuse_nested
from holdfast.control.deadline import Deadline
from holdfast.dcp.dcp_arguments import TIMEOUT_S, is_partial, participants, plain_states
from holdfast.dcp.dcp_storage import source
from holdfast.errors import IncompatibleError, NotFoundError
from holdfast.loading import load_over
from holdfast.loading.load_options import LoadOptions
from holdfast.phases import attempt, done
from holdfast.state.differences import listing

_log = logging.getLogger(__name__)

#: Errors of a load name the arguments of `holdfast.load`, which DCP does not have.
_ADVICE: Final = "(select=, mapping=, cast= and strict= are arguments of holdfast.load, which reads the same folder.)"
_NAMES_ADVICE: Final = (
    "Pass planner=DefaultLoadPlanner(allow_partial_load=True) to leave alone what the checkpoint does not have, or "
    "call holdfast.load, which reads the same folder, and takes mapping= and strict=False."
)
_EMPTY_ADVICE: Final = (
    "Its only save may have been killed: load the folder of an earlier save. holdfast.ls(folder) is empty for a folder "
    "like this one."
)


@outer(LOAD)
def load(
    state_dict: dict[str, object],
    storage_reader: object = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: object = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Fill `state_dict` in place from the folder `checkpoint_id`, of holdfast or of DCP, on any layout.

    Blocking and collective over `process_group` (default: all ranks of the job); with `no_dist`, this rank loads alone.
    The arguments are those of ``torch.distributed.checkpoint.load``. Tensors are filled in place, other values are
    replaced. The state of an object with ``state_dict`` and ``load_state_dict`` is filled, and given back to it by
    ``load_state_dict``.

    The checkpoint must have every name of `state_dict`, and may have more. With
    ``planner=DefaultLoadPlanner(allow_partial_load=True)``, what it does not have keeps its contents, and the log says
    what that is. Unlike DCP, a load compares dtypes: `holdfast.load` casts. Digests are verified.

    Raises:
        ConfigurationError: code ``config.dcp_option``: an argument has no counterpart; the error says what to do.
            ``config.dcp_mixed``: holdfast and DCP each wrote a checkpoint into the folder.
        NotFoundError, IncompatibleError, StateError, CorruptError, StorageError, DeadlineError: as `holdfast.load`.
    """
    refuse_nested("holdfast.dcp.load", allowed={*PLAIN, CHECKPOINTER_RESTORE})
    target, partial = source(checkpoint_id, storage_reader), is_partial(planner)
    options = LoadOptions(strict=not partial, allow_empty=True, ignores_unexpected=True, continues=False)
    deadline = Deadline(TIMEOUT_S)
    channel, ranks = participants("dcp.load", process_group, deadline, no_dist=no_dist)
    states = attempt(lambda: plain_states(state_dict))
    channel.confirm("begin", states, deadline)
    into = done(states)
    try:
        report = load_over(channel, deadline, target, into, options, ranks=ranks)
    except NotFoundError as error:
        if error.code == "not_found.head":
            error.action = _EMPTY_ADVICE
        raise
    except IncompatibleError as error:
        error.action = _NAMES_ADVICE if error.code == "incompatible.names" else f"{error.action} {_ADVICE}"
        raise
    if report.missing and channel.rank == 0:
        keeps = "keeps its" if len(report.missing) == 1 else "keep their"
        _log.warning("'%s' does not have %s, which %s contents", target, listing(list(report.missing)), keeps)
    for key, filled in into.items():
        item = state_dict[key]
        if isinstance(item, Stateful):
            item.load_state_dict(filled)  # type: ignore[arg-type]  # as its own state_dict returned it
        else:
            state_dict[key] = filled
