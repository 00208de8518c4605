"""The harness that emulates nodes (`tests.support.nodes`): what its faults do, and that nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import nursery
from tests.support.nodes import MEMORY, Network, Node
from tests.support.nursery import until

PORT = 2900
MIB = 2**20


@pytest.fixture
def err(tmp_path: Path) -> Path:
    return tmp_path / "err"


def describe(result: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (MEMORY / "mine").touch()
    found = [socket.gethostname(), socket.gethostbyname(socket.gethostname()), boot, *os.listdir(MEMORY)]
    result.write_text("\n".join(found))


def test_each_node_has_its_own_name_address_boot_and_memory(network: Network, tmp_path: Path, err: Path) -> None:
    begun_s = time.monotonic()
    nodes = network.start(4)
    assert time.monotonic() - begun_s < 10
    found = [tmp_path / f"found-{node.number}" for node in nodes]
    described = [node.start(describe, result, err=err) for node, result in zip(nodes, found, strict=True)]
    assert [each.wait() for each in described] == [0] * 4, err.read_text()
    names, addresses, boots, *memories = zip(*(result.read_text().splitlines() for result in found), strict=True)
    assert names == tuple(node.name for node in nodes)
    assert addresses == tuple(node.address for node in nodes)
    assert len({Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *boots}) == 5
    assert memories == [("mine",) * 4]


def test_the_memory_of_a_node_has_a_limit(network: Network) -> None:
    (node,) = network.start(1, memory_mib=8)
    (node.memory / "fits").write_bytes(bytes(7 * MIB))
    with pytest.raises(OSError, match="No space left"):
        (node.memory / "no more").write_bytes(bytes(2 * MIB))


def sleep_beside_a_child() -> None:
    os.fork()
    time.sleep(600)


def start_keeper(node: Node, run: str, log: Path) -> None:
    """Start a keeper, which is nobody's child then."""
    keeper = [sys.executable, "-m", "holdfast.keeper", run, f"--node-dir={MEMORY}", "--detach"]
    assert node.popen(keeper, log=log).wait() == 0, log.read_text()


def test_a_lost_node_loses_its_processes_and_keepers_its_memory_and_its_disk(
    network: Network, run: str, err: Path
) -> None:
    lost, other = network.start(2)
    for node in (lost, other):
        start_keeper(node, run, err)
        (node.memory / "kept").touch()
        (node.disk / "kept").touch()
    trainer = lost.start(sleep_beside_a_child, err=err)
    until(lambda: len(lost.processes()) == 3)
    pids, folder = lost.processes(), lost.memory
    lost.lose()
    assert trainer.wait() == -signal.SIGKILL
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not folder.exists()
    assert not lost.disk.exists()
    assert network.nodes == [other]
    assert len(other.processes()) == 1
    assert (other.memory / "kept").exists()


def test_a_node_that_boots_loses_its_memory_and_keeps_its_disk_and_address(
    network: Network, tmp_path: Path, err: Path
) -> None:
    node, other = network.start(2)
    before, after = tmp_path / "before", tmp_path / "after"
    assert node.start(describe, before, err=err).wait() == 0, err.read_text()
    (node.memory / "gone").touch()
    (node.disk / "kept").touch()
    node.reboot()
    assert node.start(describe, after, err=err).wait() == 0, err.read_text()
    name, address, boot, *memory = before.read_text().splitlines()
    assert after.read_text().splitlines()[:2] == [name, address]
    assert after.read_text().splitlines()[2] != boot
    assert after.read_text().splitlines()[3:] == memory == ["mine"]
    assert (node.disk / "kept").exists()
    assert fetch(other, node, 1000, err=err) < 10


def test_a_replacement_has_another_address_and_nothing_of_the_lost_node(network: Network, err: Path) -> None:
    node, other = network.start(2)
    (node.memory / "gone").touch()
    fresh = network.replace(node)
    assert (fresh.address, fresh.name) not in {(each.address, each.name) for each in (node, other)}
    assert list(fresh.memory.iterdir()) == list(fresh.disk.iterdir()) == []
    assert fetch(fresh, other, 1000, err=err) < 10
    assert fetch(other, fresh, 1000, err=err) < 10


def leave_orphans(count: int) -> None:
    for _ in range(count):
        if not os.fork():
            if not os.fork():
                time.sleep(0.01)
            os._exit(0)
        os.wait()


def test_a_node_stays_up_when_an_orphan_of_it_ends(network: Network, err: Path) -> None:
    (node,) = network.start(1)
    for _ in range(3):
        assert node.start(leave_orphans, 3, err=err).wait() == 0
        until(lambda: not node.processes())
    assert node.start(leave_orphans, 0, err=err).wait() == 0


def count(to: Path) -> None:
    for number in range(10**9):
        to.write_text(str(number))
        time.sleep(0.001)


def test_a_stopped_node_stands_still_and_goes_on_where_it_was(network: Network, tmp_path: Path, err: Path) -> None:
    node, other = network.start(2)
    counted = {each: tmp_path / each.name for each in (node, other)}
    counting = [each.start(count, to, err=err) for each, to in counted.items()]
    until(lambda: all(to.exists() and to.read_text() > "0" for to in counted.values()))
    node.stop()
    stopped = {each: to.read_text() for each, to in counted.items()}
    until(lambda: counted[other].read_text() != stopped[other])
    time.sleep(0.05)
    assert counted[node].read_text() == stopped[node]
    node.go_on()
    until(lambda: counted[node].read_text() not in ("", stopped[node]))
    assert all(process.is_running for process in counting)


# --- links


def serve(nbytes: int) -> None:
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(nbytes))


def receive(name: str, result: Path) -> None:
    received = 0
    with socket.create_connection((name, PORT), timeout=20) as connection:
        begun_s = time.monotonic()
        while chunk := connection.recv(MIB):
            received += len(chunk)
    result.write_text(f"{received} {time.monotonic() - begun_s}")


def is_listening(node: Node) -> bool:
    return f":{PORT:04X} 00000000:0000 0A" in Path(f"/proc/{node.init}/net/tcp").read_text()


def fetch(client: Node, server: Node, nbytes: int, *, err: Path) -> float:
    """The seconds in which `client` gets so many bytes from `server`."""
    result = err.with_name("received")
    serving = server.start(serve, nbytes, err=err)
    until(lambda: is_listening(server))
    assert client.start(receive, server.name, result, err=err).wait() == 0, err.read_text()
    assert serving.wait() == 0, err.read_text()
    received, seconds = result.read_text().split()
    assert int(received) == nbytes
    return float(seconds)


@pytest.mark.parametrize("slow", ["the sender", "the receiver"])
def test_a_slow_link_carries_what_it_is_said_to(network: Network, err: Path, slow: str) -> None:
    sender, receiver = network.start(2)
    (sender if slow == "the sender" else receiver).slow(16)
    limited_s = fetch(receiver, sender, MIB, err=err)
    assert 0.8 < 16e6 / 8 * limited_s / MIB < 1.6, f"{limited_s} s"


@pytest.mark.slow
@pytest.mark.parametrize("mbit", [1, 100, 1000])
def test_a_link_of_any_speed_carries_what_it_is_said_to(network: Network, err: Path, mbit: int) -> None:
    sender, receiver = network.start(2, mbit=mbit)
    nbytes = mbit * 10**6 // 4
    assert 0.8 < mbit * 1e6 / 8 * fetch(receiver, sender, nbytes, err=err) / nbytes < 1.6
    for node in (sender, receiver):
        node.slow(None)
    assert mbit * 1e6 / 8 * fetch(receiver, sender, nbytes, err=err) / nbytes < 0.7


def reaches(client: Node, server: Node, *, within_s: float, err: Path) -> bool:
    """Whether a connection gets through in time."""
    listening = server.start(serve, 1, err=err)
    until(lambda: is_listening(server))
    reached = client.start(connect, server.name, within_s, err=err).wait() == 0
    listening.kill()
    return reached


def connect(name: str, timeout_s: float) -> None:
    socket.create_connection((name, PORT), timeout=timeout_s).close()


def chat() -> None:
    """Say a number to whoever comes, again and again."""
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
        for number in range(10**9):
            connection.sendall(b"%d\n" % number)
            time.sleep(0.005)


def listen(name: str, heard: Path) -> None:
    with socket.create_connection((name, PORT)) as connection, connection.makefile() as lines:
        for line in lines:
            heard.write_text(line)


def test_a_partition_cuts_two_sides_from_each_other_until_it_heals(network: Network, err: Path) -> None:
    nodes = network.start(4)
    network.partition(*nodes[:2])
    assert reaches(nodes[0], nodes[1], within_s=20, err=err)
    assert reaches(nodes[3], nodes[2], within_s=20, err=err)
    assert not reaches(nodes[0], nodes[2], within_s=0.3, err=err)
    assert not reaches(nodes[3], nodes[1], within_s=0.3, err=err)
    network.heal()
    assert reaches(nodes[0], nodes[2], within_s=20, err=err)
    assert reaches(nodes[3], nodes[1], within_s=20, err=err)


def test_a_connection_outlives_a_short_partition(network: Network, tmp_path: Path, err: Path) -> None:
    speaker, listener = network.start(2)
    heard = tmp_path / "heard"
    speaking = speaker.start(chat, err=err)
    until(lambda: is_listening(speaker))
    listening = listener.start(listen, speaker.name, heard, err=err)
    until(lambda: number_in(heard) > 3)
    network.partition(speaker)
    cut = -1
    while cut != (cut := number_in(heard)):  # the listener first hears what was on its way
        time.sleep(0.3)
    network.heal()
    until(lambda: number_in(heard) > cut)
    assert speaking.is_running
    assert listening.is_running


def number_in(path: Path) -> int:
    return int(path.read_text() or -1) if path.exists() else -1


# --- jobs

SUM = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
open(f"{sys.argv[1]}-{dist.get_rank()}", "w").write(str(total.item()))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_ranks_of_torchrun_meet_across_nodes(network: Network, tmp_path: Path) -> None:
    nodes = network.start(2)
    script, result = tmp_path / "sum.py", tmp_path / "sum"
    script.write_text(SUM)
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={nodes[1].name}:29400", "--rdzv-id=sum"]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node=2", str(script), str(result)]
    logs = [tmp_path / f"{node.name}.log" for node in nodes]
    jobs = [node.popen(command, log=log) for node, log in zip(nodes, logs, strict=True)]
    assert [job.wait(100) for job in jobs] == [0, 0], [log.read_text() for log in logs]
    assert [Path(f"{result}-{rank}").read_text() for rank in range(4)] == ["10"] * 4


# --- leftovers


def emulate(folder: Path) -> None:
    """Start nodes and processes, and leave them as a test does that is killed in the middle."""
    network = Network(folder / "network")
    nodes = network.start(2)
    for node in nodes:
        start_keeper(node, str(folder / "run"), folder / "log")
        node.popen(["sleep", "600"], log=folder / "log")
    pids = [network.switch, *(node.init for node in nodes), *(pid for node in nodes for pid in node.processes())]
    (folder / "new").write_text(" ".join(map(str, pids)))
    (folder / "new").rename(folder / "pids")
    nodes[0].stop()
    time.sleep(600)


def surroundings(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The interfaces, the mounts and the named namespaces of this machine, without the mounts of tests that run beside
    this one, whose folder is `folder`."""
    named, tests = Path("/run/netns"), folder.parents[1]
    mounts = [Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    kept = [str(at) for at in mounts if at.is_relative_to(folder) or not at.is_relative_to(tests)]
    return os.listdir("/sys/class/net"), kept, os.listdir(named) if named.exists() else []


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.usefixtures("network")  # nodes can be emulated here
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(nursery.Process.kill, id="KILL"),
        pytest.param(lambda process: process.send(signal.SIGTERM), id="TERM", marks=pytest.mark.slow),
    ],
)
def test_a_killed_test_leaves_no_process_interface_or_mount_behind(
    tmp_path: Path, err: Path, end: Callable[[nursery.Process], object]
) -> None:
    before = surroundings(tmp_path)
    process = nursery.start(emulate, tmp_path, err=err)
    until(lambda: (tmp_path / "pids").exists() or not process.is_running)
    assert process.is_running, process.err
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 7
    end(process)
    until(lambda: all(map(is_gone, pids)))
    assert surroundings(tmp_path) == before
