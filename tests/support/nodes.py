"""Nodes of a cluster, emulated on this machine, and the faults that befall them.

A node has namespaces of its own: a network with one interface to a switch, a host name, process ids, and mounts. Its
memory is a tmpfs at ``/dev/shm``, which no other node sees, of a size that the test chooses; its disk is a folder; its
boot id is its own. All nodes share the file system of the machine otherwise, as they would share a cluster's.

    with Network(folder) as network:
        nodes = network.start(4)
        process = nodes[0].start(train, run, err=folder / "err")         # a function, forked from a warm process
        torchrun = nodes[1].popen([sys.executable, "-m", "torch.distributed.run", ...])
        nodes[1].lose()

Nothing of this has a name outside of it: there is nothing in ``ip netns``, no interface and no mount of this machine.
The first process of a node ends when the process that started it has ended, however that happened; then the kernel
kills all other processes of the node, keepers too, and frees its memory. So a killed test leaves nothing behind.

This cannot emulate:

- RDMA, NVSwitch, and what a real network card does; delays and losses of packets, where the kernel lacks netem;
- the loss of power, and a kernel that hangs: that of a stopped node still acknowledges what arrives;
- cores and a page cache for each node: all share those of this machine;
- storage that is cut off with a node: the folders of this machine stay. Have a node serve it, where that matters.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeVarTuple

from tests.support.namespaces import INTERFACE, children_inside, entering

if TYPE_CHECKING:
    from tests.support.nursery import Process

Ts = TypeVarTuple("Ts")

#: The memory of a node, as its processes name it.
MEMORY: Final = Path("/dev/shm")

#: Holdfast leaves 256 MiB of it free.
_MEMORY_MIB: Final = 1024
_SUBNET: Final = "10.77.0"
_NEAR: Final = "near"
_FAR: Final = "far"
_STOP_TIMEOUT_S: Final = 30.0
#: A token bucket must hold what comes between two ticks of a slow clock, and is emptied in bursts.
_TICKS_PER_S: Final = 100
_MIN_BURST: Final = 16 * 2**10
_QUEUE_S: Final = 0.2

#: The first process of a node. Dead orphans vanish at once, since it ignores SIGCHLD. It ends when its input does: the
#: process that started the node holds the other end. (A shell that reads would end when an orphan dies: dash catches
#: SIGCHLD, whatever its traps say.)
_INIT: Final = """
set -e
echo "$1" > /proc/sys/kernel/hostname
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
mount -t tmpfs -o "size=$2m,mode=1777" memory /dev/shm
mount --bind "$3" /proc/sys/kernel/random/boot_id
mount --bind "$4" /etc/hosts
echo ready
exec env --ignore-signal=CHLD cat > /dev/null
"""
_SWITCH: Final = """
set -e
ip link add near type bridge
ip link add far type bridge
ip link set near up
ip link set far up
echo ready
read -r _
"""
_PROBE: Final = """
set -e
ip link add bridge type bridge
ip link add one type veth peer name other
tc qdisc add dev one root tbf rate 1mbit burst 16kb limit 64kb
mount -t tmpfs memory /dev/shm
"""
_NEW_NAMESPACES: Final = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc")


@functools.cache
def missing() -> str | None:
    """The reason why no nodes can be emulated here; None where they can."""
    tools = [tool for tool in ("unshare", "nsenter", "ip", "tc", "mount") if shutil.which(tool) is None]
    if tools:
        return f"no {tools[0]} is installed, with which nodes are emulated (util-linux, iproute2)"
    if os.geteuid() != 0:
        return "only root may make the namespaces of emulated nodes"
    tried = subprocess.run(
        ["unshare", *_NEW_NAMESPACES, "sh", "-c", _PROBE], check=False, capture_output=True, text=True
    )
    return f"no nodes can be emulated here: {tried.stderr.strip()}" if tried.returncode else None


class Node:
    """One node of a `Network`, which makes it. A lost node cannot be used again, see `Network.replace`."""

    def __init__(self, network: Network, number: int, *, memory_mib: int) -> None:
        self.number = number
        self.name = f"node{number}"
        self.address = f"{_SUBNET}.{number + 1}"
        self._network = network
        self._memory_mib = memory_mib
        self._mbit: float | None = None
        self.disk = network.folder / self.name
        self.disk.mkdir()
        self._started: list[Process | subprocess.Popen[bytes]] = []
        self._boot()

    @property
    def init(self) -> int:
        """The first process of the node, as this process names it."""
        (child,) = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        return int(child)

    @property
    def memory(self) -> Path:
        """The memory of the node, as this process names it until the node is lost or boots."""
        return Path(f"/proc/{self.init}/root{MEMORY}")

    @property
    def card(self) -> str:
        """The hardware address of the node's interface."""
        return f"02:00:00:00:{self.number >> 8:02x}:{self.number & 0xFF:02x}"

    @property
    def port(self) -> str:
        """The interface of the switch that leads to this node."""
        return f"port{self.number}"

    def start(self, function: Callable[[*Ts], object], *args: *Ts, err: Path) -> Process:
        """Start a process on the node that calls a top-level function, as `nursery.start` does."""
        from tests.support import nursery  # a test that only starts commands needs no torch

        process = nursery.start(function, *args, err=err, inside=self.init)
        self._started.append(process)
        return process

    def popen(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on the node, in the working directory of this process; `log` gets what it prints. The result
        is the process of the command, and a signal for it reaches the command."""
        with log.open("ab") as file, children_inside(self.init):
            process = subprocess.Popen(
                [*entering(self.init), *command],
                env=os.environ | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self._started.append(process)
        return process

    def processes(self) -> list[int]:
        """All processes of the node but its first, whoever started them."""
        mine = os.readlink(f"/proc/{self.init}/ns/pid")
        return [pid for pid in _all_processes() if pid != self.init and _pid_namespace(pid) == mine]

    def stop(self) -> None:
        """Stop all processes of the node, as SIGSTOP does, and return when none runs."""
        end = time.monotonic() + _STOP_TIMEOUT_S
        while running := [pid for pid in self.processes() if not _stands_still(pid)]:
            assert time.monotonic() < end, f"processes {running} of {self.name} do not stop"
            _send(running, signal.SIGSTOP)
            time.sleep(0.002)

    def go_on(self) -> None:
        """Let the stopped processes go on."""
        _send(self.processes(), signal.SIGCONT)

    def slow(self, mbit: float | None) -> None:
        """Limit what the node sends, and what it receives, to so many Mbit/s each; None lifts the limit."""
        self._mbit = mbit
        discipline = "replace dev {} root noqueue"
        if mbit is not None:
            burst = max(_MIN_BURST, round(mbit * 1e6 / 8 / _TICKS_PER_S))
            limit = burst + round(mbit * 1e6 / 8 * _QUEUE_S)
            discipline = f"replace dev {{}} root tbf rate {round(mbit * 1e6)}bit burst {burst} limit {limit}"
        _batch("tc", self.init, [f"qdisc {discipline.format(INTERFACE)}"])
        _batch("tc", self._network.switch, [f"qdisc {discipline.format(self.port)}"])

    def lose(self) -> None:
        """Lose the node at once, with its processes, its memory and its disk. The others hear no farewell of it."""
        self._go_down()
        shutil.rmtree(self.disk)

    def reboot(self) -> None:
        """Kill all processes of the node at once, which say no farewell, and boot it again: its memory is lost; its
        disk, its name and its address stay."""
        self._go_down()
        self._boot()

    def _go_down(self) -> None:
        if self._holder.poll() is not None:  # it has ended by itself, and its link with it
            self._network.forget(self)
            return
        self._network.disconnect(self)  # else the kernel would close the connections of dead processes
        os.kill(self.init, signal.SIGKILL)
        # The first process ends when nobody has to look after any process of the node.
        while self._started:
            self._started.pop().wait()
        _let_go(self._holder)

    def _boot(self) -> None:
        boot_id = self._network.folder / f"{self.name}.boot"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        arguments = (self.name, str(self._memory_mib), str(boot_id), str(self._network.hosts))
        self._holder = _hold(_NEW_NAMESPACES, _INIT, arguments, err=self._network.folder / f"{self.name}.err")
        self._network.connect(self)
        if self._mbit is not None:
            self.slow(self._mbit)


class Network:
    """Nodes and the switch between them. The end of the ``with`` block ends all of them. `folder` gets their disks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self._nodes: list[Node] = []
        self._num_started = 0
        self._switch = _hold(("--net",), _SWITCH, (), err=folder / "switch.err")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def switch(self) -> int:
        """The process that holds the namespace of the switch."""
        return self._switch.pid

    @property
    def nodes(self) -> list[Node]:
        """The nodes that are up."""
        return list(self._nodes)

    def start(self, count: int, *, memory_mib: int = _MEMORY_MIB, mbit: float | None = None) -> list[Node]:
        """Start so many further nodes, whose links carry `mbit` Mbit/s each way (None: what this machine can)."""
        fresh = []
        for _ in range(count):
            fresh.append(Node(self, self._num_started, memory_mib=memory_mib))
            self._num_started += 1
            if mbit is not None:
                fresh[-1].slow(mbit)
        return fresh

    def replace(self, node: Node) -> Node:
        """Lose `node`, if it is not lost yet, and start one that knows nothing, with another name and address."""
        if node in self._nodes:
            node.lose()
        return self.start(1)[0]

    def partition(self, *nodes: Node) -> None:
        """Cut these nodes off from all others, without a word to either side. They still reach each other."""
        self._plug({node: _FAR if node in nodes else _NEAR for node in self._nodes})

    def heal(self) -> None:
        """Connect all nodes again."""
        self._plug(dict.fromkeys(self._nodes, _NEAR))

    def close(self) -> None:
        """Lose all nodes."""
        for node in self.nodes:
            node.lose()
        _let_go(self._switch)

    def connect(self, node: Node) -> None:
        """Connect a node that has just booted."""
        known = self.hosts.read_text()
        if f" {node.name}\n" not in known:
            # In place: the file is mounted.
            self.hosts.write_text(f"{known}{node.address} {node.name}\n")
        _batch(
            "ip",
            self.switch,
            [
                # A machine keeps the address of its card when it boots, so that others need not ask for it anew.
                f"link add {node.port} type veth peer name {INTERFACE} address {node.card} netns {node.init}",
                f"link set {node.port} master {_NEAR} up",
            ],
        )
        links = ("link set lo up", f"addr add {node.address}/24 dev {INTERFACE}", f"link set {INTERFACE} up")
        _batch("ip", node.init, links)
        self._nodes.append(node)

    def forget(self, node: Node) -> None:
        """Note that a node is down."""
        self._nodes.remove(node)

    def disconnect(self, node: Node) -> None:
        """Take the link of a node away."""
        self._nodes.remove(node)
        _batch("ip", self.switch, [f"link del {node.port}"])

    def _plug(self, bridges: Mapping[Node, str]) -> None:
        _batch("ip", self.switch, [f"link set {node.port} master {bridge}" for node, bridge in bridges.items()])


def _hold(namespaces: Sequence[str], script: str, arguments: Sequence[str], *, err: Path) -> subprocess.Popen[bytes]:
    """Start the process that holds new namespaces, and return when its script says that they are ready."""
    with err.open("ab") as file:
        holder = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", script, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            start_new_session=True,  # Ctrl-C is for the tests, which end it
        )
    assert holder.stdout is not None
    ready = holder.stdout.readline()
    assert ready == b"ready\n", f"the namespaces of a node are not ready: {err.read_text()}"
    holder.stdout.close()
    return holder


def _let_go(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdin is not None
    holder.stdin.close()
    holder.wait()


def _batch(tool: str, pid: int, lines: Sequence[str]) -> None:
    """Have ``ip`` or ``tc`` do this in the network namespace of a process."""
    command = ["nsenter", f"--target={pid}", "--net", "--", tool, "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines), check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{tool} failed: {done.stderr}"


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _pid_namespace(pid: int) -> str | None:
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is none of ours
        if _states(pid) != {"Z"}:
            return os.readlink(f"/proc/{pid}/ns/pid")
    return None


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _stands_still(pid: int) -> bool:
    """Whether no thread of a process runs: a thread inside a system call of a disk stops only when that is done."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return _states(pid) <= set("TXZ")
    return True


def _states(pid: int) -> set[str]:
    """The letters of the states of a process's threads, in /proc."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return {thread.read_text().rpartition(")")[2].split()[0] for thread in threads}
