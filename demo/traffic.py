"""The traffic between emulated nodes, as their switch sees it: who sent how many bytes to whom, and when.

The demo asks nobody for these figures: a socket at the switch gets the header of each packet.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Collection
from threading import Thread
from typing import Final, NamedTuple, Self

from tests.support.namespaces import in_network_of

#: Numbers of Linux that Python has no names for (linux/if_packet.h, linux/if_ether.h, asm-generic/socket.h).
_SOL_PACKET, _STATISTICS, _IGNORE_OUTGOING, _ALL_PROTOCOLS = 263, 6, 23, 3
_RECEIVE_BUFFER_FORCE, _TIMESTAMP = 33, 35
_BUFFER_NBYTES: Final = 256 << 20
#: Ethernet, IP and TCP with all their options.
_HEADERS_NBYTES: Final = 14 + 60 + 60
_LOOK_S: Final = 0.2
_IP, _TCP = 0x0800, 6


class Packet(NamedTuple):
    """A packet with `nbytes` of data, sent `at` unix seconds. Addresses are a host and a port."""

    at: float
    source: tuple[str, int]
    target: tuple[str, int]
    nbytes: int


class Traffic:
    """The traffic through the switch that the process `switch` holds, from the beginning of the ``with`` block on."""

    def __init__(self, switch: int) -> None:
        with in_network_of(switch):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
        self._socket.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)  # else each packet would come twice
        self._socket.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCE, _BUFFER_NBYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, _TIMESTAMP, 1)
        self._socket.settimeout(_LOOK_S)
        self._packets: list[Packet] = []
        #: The number of packets that came too fast to be counted; known at the end.
        self.num_missed = 0
        self._is_over = False
        self._thread = Thread(target=self._listen, name="traffic", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        self.num_missed = struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 8))[1]
        self._socket.close()

    def sent(
        self,
        begin: float,
        end: float,
        *,
        of: Collection[tuple[str, int]] | None = None,
        but: Collection[tuple[str, int]] = (),
    ) -> Counter[tuple[str, str]]:
        """The bytes that each host sent to each other one from `begin` to `end`: only on connections with one end `of`
        these, and no end in `but`."""
        found: Counter[tuple[str, str]] = Counter()
        for packet in self._packets:
            ends = {packet.source, packet.target}
            is_wanted = (of is None or not ends.isdisjoint(of)) and ends.isdisjoint(but)
            if begin <= packet.at <= end and is_wanted:
                found[packet.source[0], packet.target[0]] += packet.nbytes
        return found

    def _listen(self) -> None:
        while not self._is_over:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_HEADERS_NBYTES, 64)
            except TimeoutError:
                continue
            seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
            if (packet := parsed(data, at=seconds + nanoseconds / 1e9)) is not None and packet.nbytes:
                self._packets.append(packet)


def parsed(data: bytes, *, at: float) -> Packet | None:
    """The packet that begins with `data`; None if it is not one of TCP."""
    if len(data) < 54 or int.from_bytes(data[12:14]) != _IP or data[23] != _TCP:
        return None
    ip_nbytes = (data[14] & 15) * 4
    ports = 14 + ip_nbytes
    source_port, target_port = struct.unpack_from("!HH", data, ports)
    nbytes = int.from_bytes(data[16:18]) - ip_nbytes - (data[ports + 12] >> 4) * 4
    source, target = (socket.inet_ntoa(data[begin : begin + 4]) for begin in (26, 30))
    return Packet(at, (source, source_port), (target, target_port), nbytes)
