"""The errors of a save whose place in the history of its run is not clear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.format.records import Commit, Place
from holdfast.run.history import Run

if TYPE_CHECKING:
    from holdfast.run.loads import Load


def unloaded(run: Run, head: Commit, *, unused: Load | None, moved_from: str | None) -> ConfigurationError:
    """The error for a save into a run with a history that this job does not go on from. `unused` is what it has loaded
    from the run, if no save came after that; `moved_from` another path by which it knows the run."""
    what, resume = "this job has loaded nothing from it", "If this job goes on with that training, load the run first"
    if moved_from is not None:
        what = f"this job knows it by another path, '{moved_from}', from where it was moved or copied"
    if unused is not None:
        what = f"this job has loaded {unused.place} from it, but not into the objects that it saves"
        resume = "If this job goes on from that checkpoint, load it with continues=True"
    return ConfigurationError(
        f"run '{run.storage.location}' has a history (its head is step {head.step} at {head.place}), but {what}.",
        code="config.unloaded_history",
        action=f"{resume}. If the run only keeps results of a training that resumes from elsewhere, such as its best "
        "checkpoints, pass takeover=True: the save goes on from the head, and loads nothing. For another training, "
        "name another folder.",
        path=run.storage.location.url,
    )


def torn(run: Run) -> ConfigurationError:
    """The error for a save of a state that a load has filled half."""
    return ConfigurationError(
        "a load or a transfer failed half way, after it had filled a part of the state that this job saves into run "
        f"'{run.storage.location}'. The state may hold parts of two states.",
        code="config.partly_filled",
        action="Before the next save, load a whole checkpoint into the state, repeat the transfer, or build its "
        "objects anew.",
        path=run.storage.location.url,
    )


def unclear(run: Run, last: Place | None, loads: Sequence[Load]) -> ConfigurationError:
    """The error for a save whose state comes only in part from `loads`. `last` is the last place of this job."""
    places = " and ".join(dict.fromkeys(str(load.place) for load in loads))
    keeps = "save into another folder" if last is None else f"go on after {last}"
    return ConfigurationError(
        f"this job loaded checkpoint {places} of run '{run.storage.location}' into the state that it saves, but only "
        f"in part or with changes (mapping, cast). So holdfast cannot tell whether the run continues from {places}.",
        code="config.unclear_history",
        action=f"Load again with continues=True to continue from there, or with continues=False to {keeps}.",
        path=run.storage.location.url,
    )
