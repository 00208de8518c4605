"""The arguments that DCP's calls share: the ranks that take part, planners, and those that holdfast cannot honour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel, global_rank, group_ranks
from holdfast.errors import ConfigurationError
from holdfast.state.flatten import check_root
from holdfast.wording import kind_of

#: DCP's calls have no time limit of their own; this is the one of `holdfast.save` and `holdfast.load`.
TIMEOUT_S: Final = 600.0


class Participants(NamedTuple):
    """The channel between the ranks of a call, and their global ranks in the order of the group."""

    channel: Channel
    ranks: Sequence[int]


def participants(label: str, process_group: ProcessGroup | None, deadline: Deadline, *, no_dist: bool) -> Participants:
    """The ranks that make the call `label`: those of `process_group` (default: all), or with `no_dist` this one
    alone."""
    if no_dist:
        return Participants(Channel(None, rank=0, world_size=1, label=label), (global_rank(),))
    return Participants(default_channel(label, process_group, deadline=deadline), group_ranks(process_group))


def plain_states(state_dict: Mapping[str, object]) -> dict[str, object]:
    """A shallow copy of `state_dict`, in which each ``Stateful`` is replaced by its state. As in DCP, it is asked on
    all ranks in the order of the keys. Raises `StateError`, code ``state.root``, for anything but a dict."""
    check_root(state_dict)
    return {key: item.state_dict() if isinstance(item, Stateful) else item for key, item in sorted(state_dict.items())}


def check_save_planner(planner: object) -> None:
    """Refuse a planner that would change what a save stores, or who stores it. Where the names come from
    (``flatten_state_dict``), and whether plans are cached, makes no difference here."""
    if planner is None:
        return
    if type(planner) is not DefaultSavePlanner:
        raise _own_planner(planner)
    if planner.dedup_save_to_lowest_rank:
        raise cannot_honour(
            "planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True)",
            "the ranks that hold copies share the work of writing them",
            "Leave it out. For files of each node on a disk of its own, save with the process_group of that node.",
        )


def is_partial(planner: object) -> bool:
    """Whether the planner of a load allows names that the checkpoint does not have."""
    if planner is None:
        return False
    if type(planner) is not DefaultLoadPlanner:
        raise _own_planner(planner)
    return bool(planner.allow_partial_load)


def cannot_honour(option: str, why: str, action: str) -> ConfigurationError:
    """The error for an argument of DCP without a counterpart."""
    return ConfigurationError(f"holdfast.dcp cannot honour {option}: {why}.", code="config.dcp_option", action=action)


def _own_planner(planner: object) -> ConfigurationError:
    return cannot_honour(
        f"planner={type(planner).__qualname__}(...)",
        f"holdfast plans by itself, and {kind_of(planner)} would not be asked",
        "Leave it out. To choose, rename or cast what is loaded, call holdfast.load with select=, mapping= or cast=. "
        "To save less, pass a smaller state_dict.",
    )
