"""An SSH server on this machine: OpenSSH's own, of the layer ``stores``, without root rights."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
from pathlib import Path

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

    def __init__(self, folder: Path) -> None:
        """Start the server, with all its files in `folder`, and return when it answers."""
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
            for above in (folder, *folder.parents[:3]):
                above.chmod(above.stat().st_mode | 0o011)
            command = ["setpriv", "--reuid", self.user, "--regid", "nogroup", "--clear-groups", "--", *command]
        libraries = {"LD_LIBRARY_PATH": f"{LAYER}/ssh/usr/lib/x86_64-linux-gnu:{LAYER}/ssh/usr/lib/aarch64-linux-gnu"}
        command = [*command, "-f", str(folder / "configuration")]
        self._process = ServerProcess(command, log=folder / "sshd.log", extra=libraries)
        self._process.until(lambda: answers(self.port))
        self._key = folder / "user"

    @property
    def url(self) -> str:
        """The URL of `root`."""
        return f"sftp://{self.user}@127.0.0.1:{self.port}{self.root}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which fsspec logs in."""
        return {"FSSPEC_SFTP_KEY_FILENAME": str(self._key)}

    def kill(self) -> None:
        """Kill the server, and return when it is dead; its open connections end with it."""
        self._process.kill()
