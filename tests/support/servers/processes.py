"""Servers as processes of their own. The kernel kills each with the process that started it, however that ends."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

#: The environment with the servers that `make test-stores` installs.
LAYER = Path(os.environ.get("STORES_LAYER", Path(__file__).parents[3] / ".venv-stores"))

_START_TIMEOUT_S = 60.0


class ServerProcess:
    """A process that runs `command`, with its output in the file `log`. `extra` are further environment variables; with
    `user` it runs with the rights of that user, where this process has those of root."""

    def __init__(
        self, command: Sequence[str], *, log: Path, extra: Mapping[str, str] | None = None, user: str | None = None
    ) -> None:
        self._log = log
        rights = () if user is None else ("--reuid", user, "--regid", "nogroup", "--clear-groups")
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *rights, "--", *command],
                env=os.environ | dict(extra or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """The text that the server has written so far."""
        return self._log.read_text(errors="replace")

    def until(self, is_ready: Callable[[], bool]) -> Self:
        """Return when the server is ready. Kills it, and raises, where it ends before, or takes too long."""
        end_s = time.monotonic() + _START_TIMEOUT_S
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > end_s:
                self.kill()
                raise RuntimeError(f"the server {self._process.args!r} did not start:\n{self.log}")
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """Kill the server, and return when it is dead."""
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def answers(port: int) -> bool:
    """Whether a server accepts connections at a port of the loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
