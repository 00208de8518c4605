"""An SSH server on this machine: OpenSSH's own, of the layer ``stores``, without root rights."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.servers.processes import LAYER, ServerProcess, answers, free_port

_CONFIGURATION = """
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
PidFile none
# As PAM reads the file of passwords for it, it needs no root rights.
UsePAM yes
PasswordAuthentication no
KbdInteractiveAuthentication no
Subsystem sftp internal-sftp
"""


class SshServer:
    """A server of SFTP for one user: the one who runs the tests, or where that is root, nobody. That user owns the
    folder `root`."""

    def __init__(self) -> None:
        """Start the server, and return when it answers."""
        # Not below a folder of pytest's, which it hides from other users again and again.
        self._folder = TemporaryDirectory(prefix="holdfast-sshd-")
        folder = Path(self._folder.name)
        folder.chmod(0o755)
        self.user = "nobody" if os.geteuid() == 0 else getpass.getuser()
        self.port = free_port()
        self.root = folder / "files"
        self.root.mkdir()
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "configuration").write_text(_CONFIGURATION.format(folder=folder))
        command = [str(LAYER / "ssh/usr/sbin/sshd"), "-D", "-e", "-p", str(self.port)]
        if os.geteuid() == 0:
            for path in (self.root, folder / "host"):
                shutil.chown(path, self.user)
        libraries = {"LD_LIBRARY_PATH": f"{LAYER}/ssh/usr/lib/x86_64-linux-gnu:{LAYER}/ssh/usr/lib/aarch64-linux-gnu"}
        command = [*command, "-f", str(folder / "configuration")]
        user = self.user if os.geteuid() == 0 else None
        self._process = ServerProcess(command, log=folder / "sshd.log", extra=libraries, user=user)
        self._process.until(lambda: answers(self.port))
        self._key = folder / "user"

    @property
    def url(self) -> str:
        """The URL of `root`."""
        return f"sftp://{self.user}@127.0.0.1:{self.port}{self.root}"

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """The options by which fsspec logs in."""
        return (("key_filename", str(self._key)),)

    def end_sessions(self) -> None:
        """Break all connections; the server goes on."""
        for pid in _descendants(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the server with all its connections, and return when it is dead."""
        self.end_sessions()
        self._process.kill()
        self._folder.cleanup()


def _descendants(pid: int) -> list[int]:
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [found for child in children for found in (*_descendants(child), child)]
