"""The ranks of `bench.emulated_nodes`, one on each node. They protect snapshots, and restore them after a loss."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Condition, Thread
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from holdfast import Checkpointer, Copies, Memory, Parity
from holdfast.observing import Event, EventSource, SaveHeld, SaveProtected
from tests.support.namespaces import INTERFACE

PORT: Final = 29500
_COPY_PORT: Final = 29600
_PIECE_NBYTES: Final = 1 << 20
_NUM_TENSORS: Final = 16
_TIMEOUT_S: Final = 120.0
#: The step of the snapshot that is restored.
LAST_STEP: Final = 1000


@dataclass(frozen=True)
class NodeTask:
    """The task of one rank: the folder for results, the run, the rank's number and the number of ranks, the node that
    serves the store, the bytes of the rank's part, and the number of rounds."""

    results: Path
    run: Path
    rank: int
    world: int
    host: str
    nbytes: int
    rounds: int


def serve_store(host: str, ready: Path) -> None:
    """Serve the store of the process group until killed."""
    store = dist.TCPStore(host, PORT, is_master=True, wait_for_workers=False)
    ready.touch()
    time.sleep(3600)
    del store


def protect(task: NodeTask, policy: Copies | Parity, pace: Literal["auto", "none"]) -> None:
    """Save into memory again and again; each time, copy as many bytes plainly to the next rank. Then wait for the
    loss."""
    begin(task)
    heard = Heard()
    state = {f"w{number}": part(task, number) for number in range(_NUM_TENSORS)}
    ours, plain = [], []
    memory = Memory(protect=policy, protect_pace=pace)
    with Checkpointer(task.run, state, memory=memory, listeners=[heard]) as checkpointer:
        for number in range(task.rounds + 2):  # both slots of a rank, and both copies, take memory first
            dist.barrier()
            checkpointer.save(number, memory_only=True).protected.wait(_TIMEOUT_S)
            ours.append(heard.protecting_s())
            plain.append(ring_copy(task))
        checkpointer.save(LAST_STEP, memory_only=True).protected.wait(_TIMEOUT_S)
        tell(task, f"protect-{task.rank}", {"ours": ours[2:], "plain": plain[2:], "held": held_nbytes()})
        time.sleep(3600)


def restore(task: NodeTask, lost: int) -> None:
    """Copy the part of rank `lost` plainly to its new node, and restore; compare every bit."""
    begin(task)
    state = {f"w{number}": torch.zeros_like(part(task, number)) for number in range(_NUM_TENSORS)}
    plain_s = plain_copy(task, sender=(lost + 1) % task.world, receiver=lost)
    before = received_nbytes()
    dist.barrier()
    with Checkpointer(task.run, state, memory=Memory()) as checkpointer:
        start_s = time.perf_counter()
        report = checkpointer.restore()
        ours_s = time.perf_counter() - start_s
        dist.barrier()
        moved = received_nbytes() - before
        same = report.step == LAST_STEP and all(is_restored(task, state, number) for number in range(_NUM_TENSORS))
        found = {"plain": plain_s, "ours": ours_s, "moved": moved, "tier": report.tier, "same": same}
        tell(task, f"restore-{task.rank}", found)
        os._exit(0)  # the restored state is lost again, without a word to the keepers


def is_restored(task: NodeTask, state: dict[str, torch.Tensor], number: int) -> bool:
    found = state[f"w{number}"]
    assert isinstance(found, DTensor)
    return torch.equal(found.to_local(), part(task, number).to_local())


class Heard:
    """A listener that notes when a save was sealed and protected."""

    def __init__(self) -> None:
        self._at: dict[type[object], float] = {}
        self._changed = Condition()

    def hear(self, event: Event, source: EventSource) -> None:
        with self._changed:
            self._at[type(event)] = time.perf_counter()
            self._changed.notify_all()

    def protecting_s(self) -> float:
        """The seconds from the seal of the last save to its protection."""
        with self._changed:
            assert self._changed.wait_for(lambda: {SaveHeld, SaveProtected} <= self._at.keys(), _TIMEOUT_S)
            seconds = self._at[SaveProtected] - self._at[SaveHeld]
            self._at.clear()
            return seconds


def begin(task: NodeTask) -> None:
    """Join the job."""
    os.environ |= {"MASTER_ADDR": task.host, "GLOO_SOCKET_IFNAME": INTERFACE}
    torch.set_num_threads(1)
    store = dist.TCPStore(task.host, PORT, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=task.rank, world_size=task.world, timeout=timedelta(seconds=_TIMEOUT_S)
    )


def part(task: NodeTask, number: int) -> DTensor:
    """A tensor of the state, which differs from rank to rank."""
    mesh = init_device_mesh("cpu", (task.world,))
    numel = task.nbytes // 4 // _NUM_TENSORS
    generator = torch.Generator().manual_seed(number * task.world + task.rank)
    local = torch.randn(numel, generator=generator)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def ring_copy(task: NodeTask) -> float:
    """Seconds of a plain copy of as many bytes from each rank to the next one, all at once."""
    return timed_copy(task, receives=True, to=(task.rank + 1) % task.world)


def plain_copy(task: NodeTask, *, sender: int, receiver: int) -> float:
    """Seconds of a plain copy from one rank to another; 0 on all others."""
    return timed_copy(task, receives=task.rank == receiver, to=receiver if task.rank == sender else None)


def timed_copy(task: NodeTask, *, receives: bool, to: int | None) -> float:
    hosts = [""] * task.world
    dist.all_gather_object(hosts, socket.gethostname())
    data, target = memoryview(bytearray(task.nbytes)), memoryview(bytearray(task.nbytes))
    listener = socket.create_server(("", _COPY_PORT + task.rank)) if receives else None
    dist.barrier()
    start_s = time.perf_counter()
    threads = [Thread(target=receive, args=(listener, target))] if listener is not None else []
    for thread in threads:
        thread.start()
    if to is not None:
        with socket.create_connection((hosts[to], _COPY_PORT + to)) as connection:
            connection.sendall(data)
            connection.recv(1)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start_s if receives else 0.0
    dist.barrier()
    return seconds


def receive(listener: socket.socket, target: memoryview) -> None:
    with listener:
        connection, _ = listener.accept()
    with connection:
        at = 0
        while at < len(target):
            at += connection.recv_into(target[at : at + _PIECE_NBYTES])
        connection.sendall(b"x")


def received_nbytes() -> int:
    """The bytes that have come to this node."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counters,) = [line.partition(":")[2].split() for line in lines if line.partition(":")[0].strip() == INTERFACE]
    return int(counters[0])


def held_nbytes() -> int:
    """The bytes of memory that files of this node take."""
    status = os.statvfs("/dev/shm")
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def tell(task: NodeTask, name: str, found: object) -> None:
    """Write a result, as a whole."""
    path = task.results / f"{name}.json"
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").rename(path)
