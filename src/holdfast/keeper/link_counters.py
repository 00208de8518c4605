"""The interface that leads to a peer, and the bytes that this node has sent through it, as the kernel counts them.

They come from ``/proc/net``, which is always that of the own network namespace. ``/sys/class/net`` may be another's.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.errors import StorageError

LOOPBACK: Final = "lo"

_ROUTES: Final = Path("/proc/net/route")
_COUNTERS: Final = Path("/proc/net/dev")
#: The number of the field that counts sent bytes, after the name of the interface.
_SENT: Final = 8
#: The flags of a route: it is up, and it leads nowhere.
_IS_UP: Final = 0x1
_REJECTS: Final = 0x200


class _LinkRoute(NamedTuple):
    interface: str
    destination: int
    mask: int
    metric: int


def interface_to(host: str) -> str | None:
    """The name of the interface through which this node reaches the IPv4 address `host`; None where nobody knows."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: only makes the system choose a route
            (source, _), (peer, _) = probe.getsockname(), probe.getpeername()
        if source == peer or peer.startswith("127."):
            return LOOPBACK
        return chosen_route(_ROUTES.read_text(), peer)
    except OSError:
        return None


def chosen_route(table: str, address: str) -> str | None:
    """The interface that the text of ``/proc/net/route`` names for an IPv4 address; None for none."""
    (number,) = struct.unpack("=I", socket.inet_aton(address))  # the table has addresses as the machine's numbers
    fitting = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        flags = int(fields[3], 16)
        route = _LinkRoute(fields[0], int(fields[1], 16), int(fields[7], 16), int(fields[6]))
        if flags & _IS_UP and not flags & _REJECTS and number & route.mask == route.destination:
            fitting.append(route)
    best = max(fitting, key=lambda route: (route.mask.bit_count(), -route.metric), default=None)
    return None if best is None else best.interface


def sent_nbytes(interface: str) -> int:
    """The bytes that this node has sent through `interface`.

    Raises:
        StorageError: there is no such interface any more, code ``storage.peer``.
    """
    prefix = f"{interface}:".encode()
    for line in _COUNTERS.read_bytes().splitlines():
        name, colon, fields = line.lstrip().partition(b":")
        if name + colon == prefix:
            return int(fields.split()[_SENT])
    raise StorageError(
        f"this node has no network interface {interface} any more.",
        code="storage.peer",
        action="No action needed: holdfast looks for the way to the other node again.",
        retryable=True,
    )
