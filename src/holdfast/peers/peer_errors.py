"""The errors of a connection between keepers, as the end that connected raises them."""

from __future__ import annotations

from holdfast.errors import ConfigurationError, StorageError


def peer_failed(address: str, what: str) -> StorageError:
    """The keeper at `address` did not do its part; another attempt may succeed."""
    return StorageError(
        f"the keeper at {address} {what}.",
        code="storage.peer",
        action="Look whether that node is alive, and whether a firewall closes the port.",
        path=address,
        tier="peer memory",
        retryable=True,
    )


def not_taken(address: str, reason: str) -> StorageError:
    """The keeper at `address` does not take a copy, because the memory of its node cannot be used for it."""
    return StorageError(
        f"the keeper at {address} does not take the copy: {reason}",
        code="storage.memory",
        action="Free memory on its node.",
        path=address,
        tier="peer memory",
        retryable=True,
    )


def not_held(what: str) -> StorageError:
    """A peer asked for `what`, which this node does not have, or no longer."""
    return StorageError(
        f"this node does not have {what}.",
        code="storage.peer",
        action="No action needed: a snapshot that is not whole is not used.",
        tier="peer memory",
    )


def not_received() -> StorageError:
    """A peer sends a copy that this node does not receive, or no longer."""
    return StorageError(
        "this node does not receive that copy, or no longer: a later offer of the same rank took its place.",
        code="storage.peer",
        action="No action needed: holdfast offers it again.",
        tier="peer memory",
        retryable=True,
    )


def not_understood(what: str, *, address: str | None = None) -> StorageError:
    """A node, whose listener is at `address` if that is known, sent `what`, which no keeper of this version sends."""
    return StorageError(
        f"another node sent {what}." if address is None else f"the keeper at {address} sent {what}.",
        code="storage.peer",
        action="Run the same version of Holdfast on all nodes; if they do, check the network between them.",
        path=address,
        tier="peer memory",
    )


def not_our_peer(address: str, what: str, *, action: str, retryable: bool = False) -> ConfigurationError:
    """The error for an `address` at which no keeper of this job and version answers."""
    return ConfigurationError(
        f"what answers at {address} {what}.",
        code="config.peer",
        action=action,
        path=address,
        tier="peer memory",
        retryable=retryable,
    )
