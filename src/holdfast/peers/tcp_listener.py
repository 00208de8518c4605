"""The listening end of TCP between keepers: accepts connections, has them prove the secret, and serves their requests.

One thread accepts, and each connection has a thread of its own. Anybody who reaches the port can connect, so all that
a stranger can hold is bounded: the number of connections that have proved nothing yet, their time, and the bytes read
from them (a hello). When too many strangers are connected, the oldest is cut, so that a proof, which takes
milliseconds, gets through beside any number of idle connections. A peer that has proved itself may still die or hang at
any byte, so each wait for it has a deadline.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Condition, Thread, current_thread
from typing import Final, TypeVar

from holdfast.errors import ConfigurationError, CorruptError, HoldfastError, StorageError
from holdfast.peers import handshake
from holdfast.peers.peer_messages import (
    Get,
    GetRange,
    GetSum,
    Noted,
    PeerReply,
    Put,
    PutGeneration,
    PutRange,
    RequestRefused,
    Sent,
    decode_request,
    encode_message,
)
from holdfast.peers.transport import PeerService, Region
from holdfast.peers.wire import Wire, each_within, within
from holdfast.wording import kind_of

T = TypeVar("T")

_BACKLOG: Final = 256
#: Pause after the system could not accept a connection, as when the process has no descriptor left.
_ACCEPT_PAUSE_S: Final = 0.1
#: Time that `close` gives the threads to end. Their sockets are cut by then.
_CLOSE_S: Final = 5.0
#: Interval of looks whether a stranger that was cut has gone.
_CUT_S: Final = 0.01
#: Least interval of warnings about connections that were refused.
_WARNING_S: Final = 60.0
_REASON_NCHARS: Final = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """The limits that a listener grants.

    `num_connections` that have proved the secret, and `num_strangers` that have not yet. A stranger that is younger
    than `grace_s` is not cut for others, and none is older than `handshake_s`. A peer may be silent for `idle_s`
    between two requests; it sends or takes a message within `message_s`, and each MiB of bytes within `block_s`.
    """

    num_connections: int = 256
    num_strangers: int = 64
    grace_s: float = 0.5
    handshake_s: float = 5.0
    idle_s: float = 60.0
    message_s: float = 10.0
    block_s: float = 60.0


DEFAULT_LIMITS: Final = PeerLimits()


class TcpListener:
    """A `PeerListener`: serves peers until it is closed."""

    def __init__(self, service: PeerService, *, secret: bytes, host: str, port: int, limits: PeerLimits) -> None:
        self._service, self._secret, self._limits = service, secret, limits
        self._socket = _listening(host, port)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        #: Guards what follows.
        self._changed = Condition()
        self._is_closed = False
        self._strangers: dict[Wire, float] = {}
        self._peers: set[Wire] = set()
        self._threads: set[Thread] = set()
        self._next_warning_s = 0.0
        self._accepting = Thread(target=self._accept, name="holdfast-peers", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """End all connections and threads. Never raises."""
        with self._changed:
            self._is_closed = True
            for wire in (*self._strangers, *self._peers):
                wire.cut()
            self._changed.notify_all()
            threads = [self._accepting, *self._threads]
        with suppress(OSError):  # an earlier `close` has done it
            self._socket.shutdown(socket.SHUT_RDWR)
        end_s = time.monotonic() + _CLOSE_S
        for thread in threads:
            if thread is not current_thread():
                thread.join(max(end_s - time.monotonic(), 0.0))
        self._socket.close()

    def _accept(self) -> None:
        while self._make_room():
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if not self._is_closed:
                    _log.warning("could not accept a connection of another node: %s", error)
                    time.sleep(_ACCEPT_PAUSE_S)
                continue
            try:
                self._start(connection, f"{address[0]}:{address[1]}")
            except (OSError, RuntimeError) as error:  # the client has gone; or the system has no thread left
                _log.warning("could not serve a connection of another node: %s", error)
                connection.close()

    def _make_room(self) -> bool:
        """Wait until one more stranger may connect; cut the oldest when it has had its grace. False after `close`."""
        with self._changed:
            while not self._is_closed and len(self._strangers) >= self._limits.num_strangers:
                oldest = min(self._strangers, key=self._strangers.__getitem__)
                left_s = self._strangers[oldest] + self._limits.grace_s - time.monotonic()
                if left_s <= 0:
                    oldest.cut()
                self._changed.wait(max(left_s, _CUT_S))
            return not self._is_closed

    def _start(self, connection: socket.socket, address: str) -> None:
        wire = Wire(connection)
        thread = Thread(target=self._run, args=(wire, address), name="holdfast-peer", daemon=True)
        with self._changed:
            if self._is_closed:
                wire.close()
                return
            self._strangers[wire] = time.monotonic()
            self._threads.add(thread)
            try:
                thread.start()
            except BaseException:
                del self._strangers[wire]
                self._threads.remove(thread)
                raise

    def _run(self, wire: Wire, address: str) -> None:
        """Serve one connection until it ends. Whatever happens on it, the listener goes on."""
        try:
            if self._is_admitted(wire, address):
                self._serve(wire, address)
        except Exception:  # noqa: BLE001 - such as one of the keeper: other connections go on
            _log.exception("the connection of %s ends after an unexpected error", address)
        finally:
            wire.close()
            with self._changed:
                self._strangers.pop(wire, None)
                self._peers.discard(wire)
                self._threads.discard(current_thread())
                self._changed.notify_all()

    def _is_admitted(self, wire: Wire, address: str) -> bool:
        deadline = within(self._limits.handshake_s)
        try:
            why = handshake.admit(
                wire, secret=self._secret, deadline=deadline, has_room=lambda: self._becomes_peer(wire)
            )
        except TimeoutError:
            why = "it proved nothing in time"
        except OSError as error:
            why = str(error)
        if why:
            # Anybody can make a node refuse connections, so it does not fill its log with them.
            is_due = time.monotonic() >= self._next_warning_s
            if is_due:
                self._next_warning_s = time.monotonic() + _WARNING_S
            _log.log(logging.WARNING if is_due else logging.DEBUG, "refused a connection of %s: %s", address, why)
        return not why

    def _becomes_peer(self, wire: Wire) -> bool:
        with self._changed:
            if self._is_closed or len(self._peers) >= self._limits.num_connections:
                return False
            del self._strangers[wire]
            self._peers.add(wire)
            self._changed.notify_all()
            return True

    def _serve(self, wire: Wire, address: str) -> None:
        while not self._is_closed:
            try:
                wire.wait(within(self._limits.idle_s))
                message = wire.receive_message(within(self._limits.message_s))
            except OSError:  # the peer has closed the connection, or does not use it
                return
            except StorageError as error:
                _log.warning("the connection of %s ends: %s", address, error)
                return
            try:
                self._carry_out(wire, message, address)
            except (OSError, CorruptError) as error:
                _log.warning("the connection of %s ends in the middle of a request: %s", address, error)
                return

    def _carry_out(self, wire: Wire, message: bytes, address: str) -> None:
        try:
            request = decode_request(message)
        except StorageError as error:
            self._reply(wire, _refused(error))
            return
        match request:
            case PutRange() | PutGeneration():
                self._reply(wire, self._take(wire, request))
            case GetRange() | GetSum():
                self._give(wire, request, address)
            case _:
                self._reply(wire, _attempt(lambda: self._service.answer(request)))

    def _take(self, wire: Wire, put: Put) -> PeerReply:
        sink = _attempt(lambda: self._service.sink(put))
        if isinstance(sink, RequestRefused):
            return sink
        try:
            memory = sink.memory
            assert memory.nbytes == put.nbytes
            self._reply(wire, Noted())
            wire.receive_bytes(memory, each_within(self._limits.block_s), sink.received)
        except BaseException:
            sink.abort()
            raise
        return _attempt(sink.finish)

    def _give(self, wire: Wire, get: Get, address: str) -> None:
        with ExitStack() as stack:
            data = _attempt(lambda: stack.enter_context(self._service.source(get)))
            if isinstance(data, RequestRefused):
                self._reply(wire, data)
                return
            assert data.nbytes == get.nbytes
            pace, deadline = self._service.pace(get, address), each_within(self._limits.block_s)
            self._reply(wire, Sent(data.nbytes))
            if isinstance(data, Region):
                wire.send_region(data, deadline, pace)
            else:
                wire.send_bytes(data, deadline, pace)

    def _reply(self, wire: Wire, reply: PeerReply) -> None:
        wire.send_message(encode_message(reply), within(self._limits.message_s))


def _attempt(call: Callable[[], T]) -> T | RequestRefused:
    """The result of `call`, which is the keeper's; the refusal that its peer gets where it failed."""
    try:
        return call()
    except HoldfastError as error:
        return _refused(error)
    except Exception as error:  # noqa: BLE001 - the peer must get an answer
        _log.exception("a request of another node failed")
        return RequestRefused(f"it failed with {kind_of(error)}; the log of the keeper there says more")


def _refused(error: HoldfastError) -> RequestRefused:
    return RequestRefused(str(error)[:_REASON_NCHARS])


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"this node cannot listen at {host}, port {port}: {error}.",
            code="config.peer",
            action="Name an address of this node and a free port.",
            path=f"{host}:{port}",
        ) from error
