"""The policies of protection that a user chooses from."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import ConfigurationError
from holdfast.options import checked_number

_ACTION = "Run on more nodes, choose a policy that needs fewer, or leave out protect=."


@dataclass(frozen=True)
class Copies:
    """Each node sends whole copies of its snapshots to `n` other nodes.

    Any `n` nodes may be lost at once. Each node needs memory for the snapshots of `n` other nodes beside its own.
    """

    n: int = 1

    def __post_init__(self) -> None:
        n = checked_number("the number of Copies", self.n, least=1, reason="a policy makes at least one copy")
        object.__setattr__(self, "n", n)

    def check_nodes(self, num_nodes: int) -> None:
        """Raise `ConfigurationError` unless so many nodes are enough."""
        _check(f"Copies({self.n})", least=self.n + 1, num_nodes=num_nodes)


@dataclass(frozen=True)
class Parity:
    """Nodes form groups, and each group keeps parity of its snapshots, spread over its nodes.

    Any `losses` nodes of a group, one or two, may be lost at once. `group` is the least number of nodes of a group
    (None: four for one loss, six for two, or all nodes of a smaller job). Each node needs memory for ``losses / (group
    - losses)`` of a snapshot beside its own.
    """

    losses: int = 1
    group: int | None = None

    def __post_init__(self) -> None:
        losses = checked_number("losses", self.losses, least=1, reason="parity is made for at least one loss")
        if losses > 2:
            raise ValueError(f"losses is {losses}, but parity exists for one or two losses")
        object.__setattr__(self, "losses", losses)
        if self.group is not None:
            least = "a group needs a node more than it may lose"
            object.__setattr__(self, "group", checked_number("group", self.group, least=losses + 1, reason=least))

    def check_nodes(self, num_nodes: int) -> None:
        """Raise `ConfigurationError` unless so many nodes are enough."""
        text = f"Parity({self.losses})" if self.group is None else f"Parity({self.losses}, group={self.group})"
        _check(text, least=self.losses + 1 if self.group is None else self.group, num_nodes=num_nodes)

    def group_size(self, num_nodes: int) -> int:
        """The least number of nodes of a group in a job on `num_nodes` nodes."""
        return min(num_nodes, 2 * self.losses + 2) if self.group is None else self.group


def _check(policy: str, *, least: int, num_nodes: int) -> None:
    if num_nodes < least:
        raise ConfigurationError(
            f"{policy} needs at least {least} nodes, but the job has {num_nodes}.",
            code="config.protection",
            action=_ACTION,
        )
