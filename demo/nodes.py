"""``python -m demo.nodes``: one node of four is lost in the middle of a training, which goes on without it.

The nodes are emulated on this machine: each has a network, processes and memory of its own (`tests.support.nodes`). All
that is shown was seen in this run. A promise that was not kept ends it with status 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from demo.cluster import ClusterJob, Held, NodeMemory
from demo.page import Block, NodeBox, Phase, Picture, Story, page_of
from demo.processes import Training, head_of
from demo.promises import Promise, newest_from_peers, read_once, same_losses, same_state
from demo.runs import data_nbytes
from demo.show import say
from demo.telling import Told, tell_in
from demo.traffic import Traffic
from demo.witness import notes
from tests.support.nodes import Network, Node, missing

_OUT: Final = Path("demo-nodes-out")
_STEPS, _STORAGE_EVERY, _MEMORY_EVERY = 24, 8, 2
_NUM_NODES: Final = 4
_NUM_LEFT: Final = _NUM_NODES - 1
#: The node that is lost, and the step from which on: storage has step 8 then, and memory a newer one.
_LOST, _LOST_AFTER = 3, 12
#: The torchrun, the rank and the keeper of a node.
_NUM_PROGRAMS: Final = 3


class Loss(NamedTuple):
    """The loss of a node `at` unix seconds: the memory of all nodes just before it, the newest step that was protected,
    the step that storage had, and the bytes that it had of newer ones; and what became of the node's processes, of its
    torchrun by the exit status, and of its memory."""

    node: Node
    at: float
    memory: NodeMemory
    protected: int
    head: int
    newer_nbytes: int
    num_processes: int
    status: int
    is_memory_gone: bool


class Seen(NamedTuple):
    """The observations of the job: the notes of the ranks on four nodes and on those that were left, the loss, the
    memory at the end, and the traffic. `names` are those of the nodes, by address."""

    names: Mapping[str, str]
    before: Training
    after: Training
    loss: Loss
    memory: NodeMemory
    traffic: Traffic

    @property
    def restored(self) -> list[dict[str, Any]]:
        """Each rank's note of the restore."""
        return self.after.each("restored")

    @property
    def step(self) -> int:
        """The step that was restored."""
        return int(self.restored[0]["step"])

    @property
    def lost_rank(self) -> int:
        """The rank that was on the lost node."""
        return [note["node"] for note in self.before.each("joined")].index(self.loss.node.name)

    @property
    def next_protected(self) -> int:
        """The first step that is protected on the nodes that were left."""
        return min(int(note["step"]) for note in self.after.each("protected"))

    def named(self, held: Held) -> str:
        """The name of the node that has a snapshot."""
        return self.names[held.node]


@dataclass
class MovedTraining(Training):
    """A training by the same script that saves into storage alone."""

    def _script(self) -> list[str]:
        arguments = f"--witness={self.folder.parent} --steps={self.steps} --until={self.until or self.steps}".split()
        return ["demo.elastic", *arguments, f"--save-to={self.save_to}", f"--storage-every={_STORAGE_EVERY}"]


def tell(out: Path) -> tuple[list[Promise], Path]:
    """Tell the story, with all files in `out`. Returns the promises, and the page about them."""
    with tempfile.TemporaryDirectory(prefix="holdfast-nodes-") as disks:
        with Network(Path(disks)) as network:
            network.start(_NUM_NODES)
            seen = _lose_a_node(out, network)
            pids = [network.switch, *(node.init for node in network.nodes)]
            pids += [pid for node in network.nodes for pid in node.processes()]
        left = [pid for pid in pids if _is_alive(pid)]
    promises = [*_promises_of_the_job(seen), *_promises_of_its_end(seen, *_moved_on_purpose(out, step=seen.step))]
    told = f"{len(pids) - len(left)} of {len(pids)} processes of the nodes have ended"
    promises.append(Promise("Nothing of the nodes stays behind", not left, told))
    phases, pictures = _phases(seen), _pictures(seen)
    _show(phases, pictures)
    page = out / "nodes.html"
    page.write_text(page_of(_story(seen, pictures, phases, promises)))
    return promises, page


def _lose_a_node(out: Path, network: Network) -> Seen:
    """Run a job on all nodes, and lose one of them in the middle of a step."""
    names = {node.address: node.name for node in network.nodes}
    run = str(out / "run")
    job = ClusterJob(out / "job", network, _STEPS, run, _STORAGE_EVERY, _MEMORY_EVERY, min_nodes=_NUM_LEFT)
    title = f"The job: FSDP2 on {_NUM_NODES} nodes, Copies(1), one node is lost"
    with Traffic(network.switch) as traffic, job.running(title):
        loss = _loss(job)
        job.wait()
        memory = job.memory()
    return Seen(names, job.of(_NUM_NODES), job.of(_NUM_LEFT), loss, memory, traffic)


def _loss(job: ClusterJob) -> Loss:
    """Lose a node when a snapshot is protected that storage does not have."""
    node = job.network.nodes[_LOST]
    step = job.await_note(
        "protected", lambda step: step >= _LOST_AFTER and step % _STORAGE_EVERY != 0, world_size=_NUM_NODES
    )
    memory, num_processes, folder, at = job.memory(), len(node.processes()), node.memory, time.time()
    node.lose()
    status = job.torchruns[node].wait()
    head = head_of(job.save_to)
    newer_nbytes = sum(data_nbytes(job.save_to, newer) for newer in range(head + 1, _STEPS))
    say(f"  {node.name} is lost, with {num_processes} processes and its memory, just after step {step} was protected;")
    say(f"  storage has step {head}")
    return Loss(node, at, memory, step, head, newer_nbytes, num_processes, status, not folder.exists())


def _moved_on_purpose(out: Path, *, step: int) -> tuple[Training, Training]:
    """The same training without a loss: on four ranks it saves `step` into storage, and ends; then it goes on on
    three."""
    run, folder = str(out / "run-moved"), out / "moved"
    first = MovedTraining(folder / f"{_NUM_NODES}-ranks", _NUM_NODES, _STEPS, save_to=run, until=step + 1)
    first.finish(f"To compare with: {_NUM_NODES} ranks train, save step {step} into storage, and end in order")
    second = MovedTraining(folder / f"{_NUM_LEFT}-ranks", _NUM_LEFT, _STEPS, save_to=run)
    second.finish(f"{_NUM_LEFT} ranks go on from storage", done=step + 1)
    return first, second


def _promises_of_the_job(seen: Seen) -> list[Promise]:
    """The promises about the loss and the restore."""
    loss, step, restored = seen.loss, seen.step, seen.restored
    held = loss.memory.of_step(step)
    own_nbytes = {each.rank: each.nbytes for each in held if not each.is_copy}
    done = max(seen.before.losses())
    return [
        Promise(
            "A node is lost in the middle of a training: all its processes, and its memory",
            kept=loss.status == -signal.SIGKILL and loss.is_memory_gone and loss.num_processes >= _NUM_PROGRAMS,
            seen=f"{loss.node.name} had {loss.num_processes} processes; torchrun ended with status {loss.status}; "
            f"step {done} was done, and the next one under way",
        ),
        _copied_elsewhere(f"The snapshot of each rank had a copy on another node: step {step}", seen, held, _NUM_NODES),
        Promise(
            "Storage had nothing of that step",
            kept=loss.head < step and loss.newer_nbytes == 0,
            seen=f"storage had step {loss.head}, and {loss.newer_nbytes} bytes of newer ones",
        ),
        newest_from_peers(
            f"The job goes on on {_NUM_LEFT} nodes, from the newest protected snapshot, out of a peer's memory",
            restored,
            protected=loss.protected,
            head=loss.head,
        ),
        same_state(
            f"The state restored on {_NUM_LEFT} nodes is the one that {_NUM_NODES} nodes had",
            seen.before.each("saved", step=step),
            seen.after.each("loaded", step=step),
        ),
        read_once("Every byte is read once, out of memory", restored, sum(own_nbytes.values())),
        _came_from_the_holder("What the lost node had comes from the node that has its copy", seen, held),
    ]


def _promises_of_its_end(seen: Seen, first: Training, second: Training) -> list[Promise]:
    """The promises about the rest of the training, which is compared with one that was moved on purpose."""
    step = seen.step
    anew = max((each.step for each in seen.memory.held if each.is_copy), default=-1)
    return [
        same_losses(
            "Until the loss, copies do not touch the training", first.losses(), seen.before.losses(), range(step + 1)
        ),
        same_losses(
            f"After it, the training goes on as one that was moved to {_NUM_LEFT} ranks in order, through storage",
            second.losses(),
            seen.after.losses(),
            range(step + 1, _STEPS),
        ),
        same_state("Its last state is the same, bit for bit", second.each("final"), seen.after.each("final")),
        _copied_elsewhere(
            f"The {_NUM_LEFT} nodes protect each other anew: step {anew}", seen, seen.memory.of_step(anew), _NUM_LEFT
        ),
    ]


def _came_from_the_holder(text: str, seen: Seen, held: Sequence[Held]) -> Promise:
    """The reports of the restore name the rank on the node that has the copy of the lost node's snapshot, and storage
    for no byte."""
    nodes = [note["node"] for note in seen.after.each("joined")]
    holders = {seen.named(each) for each in held if each.is_copy and each.rank == seen.lost_rank}
    sources = [tuple(source) for note in seen.restored for source in note["sources"]]
    nbytes = sum(nbytes for tier, rank, nbytes in sources if tier == "peer memory" and nodes[rank] in holders)
    kept = nbytes > 0 and all(tier != "storage" for tier, _, _ in sources)
    told = f"{nbytes / 1e6:.1f} MB from peer memory on {' and '.join(sorted(holders))}, and nothing from storage"
    return Promise(text, kept, f"the reports of the restore: {told}")


def _copied_elsewhere(text: str, seen: Seen, held: Sequence[Held], num_ranks: int) -> Promise:
    """The snapshot of each rank lies on one node, and its copy on another one."""
    own, copies = ({each.rank: each for each in held if each.is_copy == wanted} for wanted in (False, True))
    kept = len(own) == len(copies) == num_ranks and all(own[rank].node != copies[rank].node for rank in own)
    told = (f"{seen.named(own[rank])} on {seen.named(copies[rank])}" for rank in sorted(own.keys() & copies.keys()))
    return Promise(text, kept, f"the copy of {', of '.join(told) or 'none'}")


def _phases(seen: Seen) -> list[Phase]:
    """The phases from the loss to the end of the next step."""
    failed = [note["at"] for note in _all(seen.before, "failed")]
    joined, first_loss = seen.after.each("joined"), seen.after.each("loss", step=seen.step + 1)
    moments = {
        "The other ranks notice it (gloo gives up)": min(failed),
        "torchrun meets again, without the lost node": min(note["begun"] for note in joined),
        "Python starts, and the ranks form a group": max(note["at"] for note in joined),
        "The script builds its model": max(note["at"] for note in seen.after.each("built")),
        "holdfast restores": max(note["at"] for note in seen.restored),
        "(The demo compares the state)": max(note["at"] for note in seen.after.each("compared")),
        f"Step {seen.step + 1} is done": max(note["at"] for note in first_loss),
    }
    begun = [seen.loss.at, *moments.values()]
    return [
        Phase(name, end - begin, is_own=name.startswith("holdfast"))
        for (name, end), begin in zip(moments.items(), begun, strict=False)
    ]


def _pictures(seen: Seen) -> list[Picture]:
    """Pictures of the parts that each node holds and the bytes that it sent to others: when four nodes protect a
    snapshot, at the restore, and when those that were left protect one."""
    loss, step, names = seen.loss, seen.step, seen.names
    keepers = loss.memory.keepers | seen.memory.keepers
    # Messages of the job's store are no part of the state.
    stores = {(address, note["store"]) for address in names for note in _all(seen.after, "joined")}
    begin = max(note["at"] for note in _all(seen.before, "protected") if note["step"] < step)
    end = max(note["at"] for note in _all(seen.before, "protected", step=step))
    sent = seen.traffic.sent(begin, max(end, loss.at), of=keepers)
    built, restored = (
        choose(note["at"] for note in seen.after.each(kind)) for choose, kind in ((min, "built"), (max, "restored"))
    )
    moved = seen.traffic.sent(built, restored, but=stores)
    anew = seen.next_protected
    protected = max(note["at"] for note in _all(seen.after, "protected", step=anew))
    sent_anew = seen.traffic.sent(restored, protected, of=keepers)
    before, after = loss.memory.of_step(step), seen.memory.of_step(max(each.step for each in seen.memory.held))
    lost = loss.node.address
    used = [each for each in before if each.node != lost and (not each.is_copy or each.rank == seen.lost_rank)]
    return [
        Picture(
            f"Step {step} is protected",
            "Each node has its own snapshot in memory (blue), and another node's copy (orange), which has arrived.",
            [_box(names, address, before) for address in names],
            sent,
        ),
        Picture(
            f"{loss.node.name} is lost, and step {step} is restored",
            "The ranks that are left read their own snapshots, and one of them the copy of the lost node's. (Pale "
            "snapshots are not read.) They send each other what each needs, for three ranks divide the state now.",
            [_box(names, address, before, used=used, lost=lost) for address in names],
            moved,
        ),
        Picture(
            f"Step {anew} is protected on {_NUM_LEFT} nodes",
            f"The nodes that are left protect each other. In their memory: the last step of the job, {after[0].step}.",
            [_box(names, address, after) for address in names if address != lost],
            sent_anew,
        ),
    ]


def _box(
    names: Mapping[str, str], address: str, held: Sequence[Held], *, used: Sequence[Held] | None = None, lost: str = ""
) -> NodeBox:
    here = sorted((each for each in held if each.node == address), key=lambda each: each.is_copy)
    blocks = [
        Block(
            f"{'copy of ' if each.is_copy else ''}rank {each.rank}: {each.nbytes / 1e6:.1f} MB",
            each.is_copy,
            is_used=used is None or each in used,
        )
        for each in here
    ]
    return NodeBox(names[address], address, blocks, is_lost=address == lost)


def _show(phases: Sequence[Phase], pictures: Sequence[Picture]) -> None:
    """Print the figures of the pictures."""
    say("\nFrom the loss to the next step:")
    for phase in phases:
        say(f"  {phase.seconds:7.2f} s  {phase.name}")
    say(f"  {sum(phase.seconds for phase in phases):7.2f} s  in all")
    for picture in pictures:
        names = {node.address: node.name for node in picture.nodes}
        say(f"{picture.title}:")
        for (source, target), nbytes in sorted(picture.sent.items()):
            say(f"  {nbytes / 1e6:7.2f} MB  {names.get(source, source)} -> {names.get(target, target)}")
    say("")


def _story(seen: Seen, pictures: list[Picture], phases: list[Phase], promises: list[Promise]) -> Story:
    missed = seen.traffic.num_missed
    note = "Counted at the switch between the nodes, with the data of all TCP connections but those of the job's store."
    if missed:
        note += f" {missed} packets came too fast to be counted, so these are lower limits."
    return Story(
        f"One node of {_NUM_NODES} is lost, and the training goes on",
        f"A small GPT trains on {_NUM_NODES} emulated nodes, and saves every {_MEMORY_EVERY} steps into their memory, "
        f"with Copies(1), and every {_STORAGE_EVERY} steps into storage. {seen.loss.node.name} is lost while storage "
        f"has step {seen.loss.head}. The job goes on from step {seen.step}, on the nodes that are left.",
        pictures,
        phases,
        promises,
        note,
    )


def _all(training: Training, kind: str, **seen: object) -> list[dict[str, Any]]:
    """The notes of all ranks."""
    return [note for rank in range(training.world_size) for note in notes(training.folder, kind, rank=rank, **seen)]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> None:
    """Run the demo in the current directory."""
    argparse.ArgumentParser(
        prog="python -m demo.nodes", description="Lose one of four emulated nodes, go on without it, compare."
    ).parse_args()
    if (reason := missing()) is not None:
        sys.exit(f"demo: {reason}")
    out = _OUT.resolve()

    def story() -> Told:
        promises, page = tell(out)
        return Told(promises, f"The pictures: {page.relative_to(Path.cwd())}")

    tell_in(out, story)


if __name__ == "__main__":
    main()
