"""The interface that leads to a peer, and the bytes that this node has sent through it, as the kernel counts them.

They come from ``/proc/net``, which is always that of the own network namespace. ``/sys/class/net`` may be another's.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.errors import StorageError

LOOPBACK: Final = "lo"

_ROUTES: Final = Path("/proc/net/route")
_ROUTES_6: Final = Path("/proc/net/ipv6_route")
_COUNTERS: Final = Path("/proc/net/dev")
#: The number of the field that counts sent bytes, after the name of the interface.
_SENT: Final = 8
#: The flags of a route: it is up, and it leads nowhere.
_IS_UP: Final = 0x1
_REJECTS: Final = 0x200


class _InterfaceRoute(NamedTuple):
    """A route to the addresses that are `destination` in the bits of `mask`."""

    interface: str
    destination: int
    mask: int
    metric: int
    flags: int

    def leads_to(self, number: int) -> bool:
        is_open = self.flags & _IS_UP and not self.flags & _REJECTS
        return bool(is_open) and number & self.mask == self.destination


def interface_to(host: str) -> str | None:
    """The name of the interface through which this node reaches the address `host`; None where nobody knows."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: only makes the system choose a route
            source, peer = str(probe.getsockname()[0]), str(probe.getpeername()[0])
        if source == peer or ip_address(peer).is_loopback:
            return LOOPBACK
        table = _ROUTES_6 if family == socket.AF_INET6 else _ROUTES
        return chosen_route(table.read_text(), peer)
    except OSError:
        return None


def chosen_route(table: str, address: str) -> str | None:
    """The interface that the text of ``/proc/net/route`` names for an IPv4 address, or that of ``/proc/net/ipv6_route``
    for an IPv6 address; None for none."""
    if ":" in address:
        number = int.from_bytes(socket.inet_pton(socket.AF_INET6, address.partition("%")[0]))
        routes = [_route_6(line.split()) for line in table.splitlines()]
    else:
        (number,) = struct.unpack("=I", socket.inet_aton(address))  # the table has addresses as the machine's numbers
        routes = [_route(line.split()) for line in table.splitlines()[1:]]
    fitting = [route for route in routes if route.leads_to(number)]
    best = max(fitting, key=lambda route: (route.mask.bit_count(), -route.metric), default=None)
    return None if best is None else best.interface


def _route(fields: Sequence[str]) -> _InterfaceRoute:
    return _InterfaceRoute(fields[0], int(fields[1], 16), int(fields[7], 16), int(fields[6]), int(fields[3], 16))


def _route_6(fields: Sequence[str]) -> _InterfaceRoute:
    mask = (1 << 128) - (1 << (128 - int(fields[1], 16)))
    return _InterfaceRoute(fields[9], int(fields[0], 16), mask, int(fields[5], 16), int(fields[8], 16))


def sent_nbytes(interface: str) -> int:
    """The bytes that this node has sent through `interface`.

    Raises:
        StorageError: there is no such interface any more, or the counters cannot be read, code ``storage.peer``.
    """
    prefix = f"{interface}:".encode()
    try:
        counters = _COUNTERS.read_bytes()
    except OSError as error:  # whoever sends would take it for an error of the connection
        raise StorageError(
            f"this node cannot read '{_COUNTERS}': {error.strerror}.",
            code="storage.peer",
            action="Raise the limit of open files (ulimit -n) if it is too low. Holdfast tries again.",
            path=str(_COUNTERS),
            retryable=True,
        ) from error
    for line in counters.splitlines():
        name, colon, fields = line.lstrip().partition(b":")
        if name + colon == prefix:
            return int(fields.split()[_SENT])
    raise StorageError(
        f"this node has no network interface {interface} any more.",
        code="storage.peer",
        action="No action needed: holdfast looks for the way to the other node again.",
        retryable=True,
    )
