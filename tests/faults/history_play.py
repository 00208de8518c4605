"""Plays a history of `tests.faults.node_histories` on emulated nodes, and compares each restore with the model."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import holdfast
from holdfast.errors import CorruptError, NotFoundError
from holdfast.format import manifest as fmt
from holdfast.format.records import Place
from holdfast.node_memory.generations import Generation, given_up_ids, read_generation
from holdfast.node_memory.keeper_lock import is_kept
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.parity_records import ParityRecord, record_of
from holdfast.node_memory.peering import noted_table
from holdfast.node_memory.slots import WHOLE, Slot, SlotState, copy_names, parity_names, slot_names
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.faults.history_cluster import PATIENCE_S, Cluster, RunningJob
from tests.faults.history_job import (
    Found,
    HistoryState,
    RankPlan,
    SaveStatus,
    keep,
    work,
)
from tests.faults.node_histories import (
    Disturbance,
    History,
    Holding,
    InMemory,
    ParityRow,
    PlannedJob,
    PlannedSave,
    Promise,
    Reports,
    SavedState,
    draw_history,
    least_nodes,
    newest_whole,
)
from tests.support.nodes import Node
from tests.support.nursery import Process, until

#: Time for a save to be protected or durable, on a machine that others use too.
_STAGE_S: Final = 45.0
#: Time for which a disturbance lasts.
_DISTURBED_S: Final = 0.3
#: The speed of a slow link, Mbit/s: slots of these states take seconds.
_SLOW_MBIT: Final = 16.0


class Play:
    """One history, on nodes of a `cluster`. Files lie in `folder`, which has a short path."""

    def __init__(self, history: History, cluster: Cluster, folder: Path) -> None:
        self._history = history
        self._cluster = cluster
        self._folder = folder
        folder.mkdir()
        self._run = str(folder / "run")
        self._network, self._nodes = cluster.prepare(history.num_nodes)
        self._lives: dict[Node, int] = {}
        self._num_lives = 0
        self._reports = Reports()
        self._num_jobs = 0
        #: The job and the step that each job went on from.
        self._parents: dict[int, tuple[int, int] | None] = {}
        self._keepers: list[Process] = []
        #: The events so far, for the message of a failure.
        self.told: list[str] = []
        self._begun_s = time.monotonic()
        self.counts: Counter[str] = Counter()

    def play(self) -> None:
        """Play the whole history. Raises `AssertionError` where it is not as the model says."""
        try:
            for plan in self._history.jobs:
                self._play_job(plan)
            self._go_on_at_last()
            self._check_lineage()
        except BaseException as error:
            logs = "\n".join(self._keeper_logs())
            error.add_note(
                f"HOLDFAST_HISTORY_SEED={self._history.seed}\n{self._history}\n" + "\n".join(self.told) + f"\n{logs}"
            )
            raise
        finally:
            self._clear()

    # --- jobs

    def _play_job(self, plan: PlannedJob) -> None:
        for event, number in plan.before:
            self._befall(event, number)
        stopped = None
        if plan.stops is not None and len(self._nodes) > 1:
            stopped = self._nodes[plan.stops % len(self._nodes)]
            self._tell(f"{stopped.name} stands still")
            stopped.stop()
        up = [node for node in self._nodes if node is not stopped]
        start = plan.first % len(up)
        up = up[start:] + up[:start]
        if plan.side == "both" and len(up) > 1:
            self._play_both_sides(up)
        elif plan.side == "near" and len(up) > 1:
            near = up[: max(1, min(plan.num_nodes, len(up) - 1))]
            with self._parted([node for node in self._nodes if node not in near]):
                self._play_alone(plan, near)
        else:
            self._play_alone(plan, up[: plan.num_nodes])
        if stopped is not None:
            self._tell(f"{stopped.name} goes on")
            stopped.go_on()

    def _play_alone(self, plan: PlannedJob, nodes: Sequence[Node]) -> None:
        with self._job(nodes, num_more=plan.num_more) as job:
            found = self._restored(job)
            steps = []
            for step, planned in enumerate(plan.saves, found.step + 1):
                steps.append(step)
                self._save(job, step, planned)
            if plan.delay_s:
                time.sleep(plan.delay_s)
                for step in steps[-2:]:
                    job.tell("status", step)
                    self._note(job, step, job.answers(SaveStatus))
            self._end(job, plan)

    def _end(self, job: RunningJob, plan: PlannedJob) -> None:
        self._tell(f"job {job.number}: {plan.end}")
        if plan.end == "close":
            job.tell("close")
            job.answers(bool)
        elif plan.end == "kill one rank":
            job.ranks[plan.first % len(job.ranks)].kill()
            time.sleep(0.1)
        elif plan.end == "lose nodes":
            members = job.members
            for number in range(min(plan.num_lost, len(members))):
                self._lose(members[(plan.first + number) % len(members)])

    def _play_both_sides(self, up: Sequence[Node]) -> None:
        """Two jobs go on at the same time, on the sides of a partition, and save into the run that both can reach."""
        near, far = up[: len(up) // 2], up[len(up) // 2 :]
        far_nodes = [node for node in self._nodes if node not in near]
        with (
            self._parted(far_nodes, at_once=True),
            self._job(near) as one,
            self._job(far, launcher=1) as other,
        ):
            jobs = (one, other)
            found = [self._restored(job) for job in jobs]
            planned = PlannedSave(memory_only=False, awaits="durable", disturbance=None, node=0, note_nbytes=10)
            for job, each in zip(jobs, found, strict=True):
                self._begin(job, each.step + 1, planned)
            has_saved = [all(isinstance(each, SaveStatus) for each in job.any_answers()) for job in jobs]
            for job, each, has in zip(jobs, found, has_saved, strict=True):
                if has:
                    job.tell("wait", each.step + 1, "durable", _STAGE_S)
            committed = []
            for job, each, has in zip(jobs, found, has_saved, strict=True):
                statuses = [each for each in job.any_answers() if isinstance(each, SaveStatus)] if has else []
                self._note(job, each.step + 1, statuses)
                if any(status.durable for status in statuses):
                    committed.append(job.number)
            self._tell(f"jobs {one.number} and {other.number} went on at once; committed: {committed}")
            assert len(committed) <= 1, f"two sides of a partition have committed: {committed}"
            self.counts["both sides"] += 1
        self._reports.forget_memory()

    def _go_on_at_last(self) -> None:
        """The last job, on all nodes: it restores, saves into storage, and ends."""
        nodes = self._nodes or self._network.start(1)
        planned = PlannedSave(memory_only=False, awaits="durable", disturbance=None, node=0, note_nbytes=10)
        with self._job(nodes) as job:
            found = self._restored(job)
            self._save(job, found.step + 1, planned)
            job.tell("close")
            job.answers(bool)
        self._last = (job.number, found.step + 1)

    @contextmanager
    def _job(self, nodes: Sequence[Node], *, num_more: int = 0, launcher: int = 0) -> Iterator[RunningJob]:
        """A job with one rank on each of these nodes, and a second one on some. Its ranks end with the block."""
        number, self._num_jobs = self._num_jobs, self._num_jobs + 1
        for node in nodes:
            self._keep(node)
        placed = sorted([*nodes, *nodes[:num_more]], key=nodes.index)
        store = self._cluster.launchers[launcher].name
        path = str(self._folder / f"s{number}")
        self._tell(f"job {number}: ranks on {[node.name for node in placed]}")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(len(placed))
            server.settimeout(PATIENCE_S)
            ranks = [
                node.start(
                    work,
                    RankPlan(
                        self._run,
                        self._history.policy,
                        self._history.sizes,
                        number,
                        rank,
                        len(placed),
                        store,
                        f"{self._folder.name}-{number}",
                        path,
                    ),
                    err=self._folder / f"job{number}-rank{rank}.err",
                )
                for rank, node in enumerate(placed)
            ]
            connections: dict[int, Connection] = {}
            for _ in ranks:
                connection = Connection(server.accept()[0].detach())
                _, rank = connection.recv()
                connections[rank] = connection
        job = RunningJob(number, placed, ranks, [connections[rank] for rank in range(len(ranks))])
        try:
            yield job
        finally:
            job.end()
            for node in job.members:
                if node in self._network.nodes:
                    node.slow(None)

    def _keep(self, node: Node) -> None:
        """Start a keeper on a node that has none. Ranks find it; else they start one by a command, which takes long."""
        with self._memory_of(node) as folder:
            if not is_kept(folder):
                keeper = node.start(keep, self._run, err=self._folder / f"keeper-{node.name}.err")
                self._keepers.append(keeper)
                until(lambda: is_kept(folder) or not keeper.is_running, timeout_s=PATIENCE_S)

    # --- restores

    def _restored(self, job: RunningJob) -> Found:
        """Restore, and compare what all ranks find with the model."""
        members = job.members
        epoch, head = self._in_storage()
        lying = self._in_memory(members)
        whole = newest_whole(lying, epoch=epoch, head=head)
        promised = self._reports.must_find([self._life(node) for node in members])
        in_memory = None if whole is None else whole.place
        there = max((place for place in (head, in_memory) if place is not None), default=None)
        self._tell(f"  head {head}, epoch {epoch}, in memory {in_memory}, promised {promised}")
        if promised is not None:
            left = f"{promised} was promised, but nodes and storage have only {there}: {lying}"
            assert there is not None, left
            assert promised <= there, left
        job.tell("restore")
        first, *others = job.answers(Found)
        self._tell(f"  found {first}")
        assert all((each.place, each.job, each.tier) == (first.place, first.job, first.tier) for each in others), others
        for found in (first, *others):
            assert not found.wrong, f"{found.wrong} of what was restored are of other steps"
        place = None if first.place is None else Place.parse(first.place)
        assert there is None or (place is not None and there <= place), f"{there} was there, and {place} was restored"
        self._parents[job.number] = None
        if place is not None:
            saved = self._reports.saved.get((first.job, first.step))
            assert saved is not None, "nobody has saved what was restored"
            assert saved.place in (None, place), f"it was saved at {saved.place}, and restored as {place}"
            saved.place = place
            self._parents[job.number] = (first.job, first.step)
        if in_memory is not None and place == in_memory:
            tiers = {first.tier, *(tier for each in (first, *others) for tier in each.tiers)}
            assert "storage" not in tiers, f"memory has all of {place}, but {tiers} were read"
        self.counts[f"from {first.tier}"] += 1
        return first

    def _in_storage(self) -> tuple[int, Place | None]:
        """The newest epoch in storage, and the head."""
        try:
            run = Run.open(open_store(Location(self._run)))
        except NotFoundError:
            return 0, None
        return run.newest_epoch() or 0, run.head_place()

    def _in_memory(self, nodes: Collection[Node]) -> list[InMemory]:
        """The content of the memory of these nodes, by checkpoint."""
        holdings: dict[str, dict[str, Holding]] = {}
        generations: dict[str, Generation] = {}
        given_up: set[str] = set()
        for node in nodes:
            with self._memory_of(node) as folder:
                status = folder.path.stat()
                boot = (self._network.folder / f"{node.name}.boot").read_text().strip()
                given_up |= given_up_ids(folder)
                for id_, holding in _held_by(folder, generations).items():
                    holdings.setdefault(id_, {})[f"{boot}-{status.st_dev}-{status.st_ino}"] = holding
        found = []
        for id_, generation in generations.items():
            names = fmt.decode(generation.manifest, path=generation.folder).file_names
            found.append(InMemory(generation.place, generation.step, len(names), holdings.get(id_, {})))
        return [each for each, id_ in zip(found, generations, strict=True) if id_ not in given_up]

    @contextmanager
    def _memory_of(self, node: Node) -> Iterator[NodeFolder]:
        with NodeFolder(open_store(Location(self._run)).location.url, node_dir=node.memory) as folder:
            yield folder

    # --- saves

    def _begin(self, job: RunningJob, step: int, planned: PlannedSave) -> None:
        owners = frozenset(self._life(node) for node in job.nodes)
        self._reports.begin(SavedState(job.number, step, owners))
        job.tell("save", step, planned.memory_only, planned.note_nbytes)

    def _save(self, job: RunningJob, step: int, planned: PlannedSave) -> None:
        self._tell(f"job {job.number} saves {step}: {planned}")
        self._begin(job, step, planned)
        if planned.disturbance is not None:
            if planned.disturbance != "slow the link":  # a slow link delays protection, and is no trouble
                self._reports.disturb(job.number)
            self._disturb(job, planned.disturbance, planned.node)
        statuses = job.answers(SaveStatus)
        if statuses[0].is_skipped:
            assert planned.memory_only, f"step {step} waited for memory in vain: {statuses}"
            self.counts["skipped"] += 1
            return
        parent = self._parents[job.number]
        if parent is not None:
            place = self._reports.saved[parent].place
            assert place is not None
            self._reports.go_on_from(place)
        self.counts["saves"] += 1
        if planned.awaits != "nothing":
            job.tell("wait", step, planned.awaits, _STAGE_S)
            statuses = job.answers(SaveStatus)
        self._note(job, step, statuses)
        is_protected = all(status.protected for status in statuses)
        can_be = len(job.members) >= least_nodes(self._history.policy)
        if planned.awaits == "protected":
            assert is_protected or not can_be, f"step {step} is not protected: {statuses}"
            self.counts["protected"] += is_protected
        if planned.awaits == "durable" and not planned.memory_only:
            assert all(status.durable for status in statuses), f"step {step} is not durable: {statuses}"

    def _note(self, job: RunningJob, step: int, statuses: Sequence[SaveStatus]) -> None:
        """Note in the model what the ranks were told of a save."""
        saved = self._reports.saved[job.number, step]
        places = {Place.parse(status.place) for status in statuses if status.place is not None}
        assert len(places | {saved.place} - {None}) <= 1, (places, saved.place)
        saved.place = next(iter(places), saved.place)
        saved.is_staged |= bool(statuses) and all(status.staged for status in statuses)
        saved.is_durable |= any(status.durable for status in statuses)
        if any(status.protected for status in statuses) and saved.promise is None:
            saved.promise = self._promise(job)

    def _promise(self, job: RunningJob) -> Promise:
        """The nodes with the files of a protected checkpoint, by the table that the keepers of the job have."""
        lives = [self._life(node) for node in job.members]
        with self._memory_of(job.members[0]) as folder:
            table = noted_table(folder)
        assert table is not None
        assert len(table.nodes) == len(lives)
        if table.parity is not None:
            groups = tuple(tuple(lives[number] for number in group) for group in table.parity.groups)
            return Promise(groups=groups, losses=table.parity.losses)
        assert all(number not in targets for number, targets in enumerate(table.targets)), table
        return Promise({lives[own]: tuple(lives[each] for each in table.targets[own]) for own in range(len(lives))})

    # --- what befalls nodes

    def _disturb(self, job: RunningJob, disturbance: Disturbance, number: int) -> None:
        node = job.members[number % len(job.members)]
        self._tell(f"  {disturbance}: {node.name}")
        self.counts[disturbance] += 1
        if disturbance == "kill the keeper":
            ranks = {process.pid for process in job.ranks}
            _kill(pid for pid in node.processes() if pid not in ranks)
        elif disturbance == "stop the node":
            node.stop()
            time.sleep(_DISTURBED_S)
            node.go_on()
        elif disturbance == "slow the link":
            node.slow(_SLOW_MBIT)
        else:
            with self._parted([node]):
                time.sleep(_DISTURBED_S)

    def _befall(self, event: str, number: int) -> None:
        node = self._nodes[number % len(self._nodes)]
        self._tell(f"{event}: {node.name}")
        self.counts[event] += 1
        if event == "lose a node":
            self._lose(node)
        elif event == "reboot a node":
            self._lives.pop(node, None)
            node.reboot()
        elif event == "kill the keepers":
            for each in self._nodes:
                _kill(each.processes())
        else:
            at = self._nodes.index(node)
            self._lose(node)
            self._nodes.insert(at, self._network.start(1)[0])

    def _lose(self, node: Node) -> None:
        self._tell(f"  {node.name} is lost")
        self._nodes.remove(node)
        node.lose()
        if not self._nodes:
            self._nodes += self._network.start(1)

    @contextmanager
    def _parted(self, far: Sequence[Node], *, at_once: bool = False) -> Iterator[None]:
        """Within the block, these nodes are cut off from the others; with `at_once`, they have a launcher there."""
        self._network.partition(*far, *(self._cluster.launchers[1:] if at_once else ()))
        try:
            yield
        finally:
            self._network.heal()

    def _life(self, node: Node) -> int:
        """The number of a node in the model, which it loses with its memory."""
        if node not in self._lives:
            self._lives[node] = self._num_lives
            self._num_lives += 1
        return self._lives[node]

    # --- the end

    def _check_lineage(self) -> None:
        """The checkpoints in storage are one history: each goes on from the one before it."""
        run = Run.open(open_store(Location(self._run)))
        line = []
        for place in reversed(list(run.lineage_places())):
            view = holdfast.open(f"{self._run}@{place}")
            job, step = view.value("progress/job"), view.value("progress/step")
            assert isinstance(job, int)
            assert isinstance(step, int)
            line.append((job, step))
        assert line[-1] == self._last, line
        for before, after in pairwise(line):
            goes_on = before[0] == after[0] and before[1] < after[1]
            assert goes_on or self._parents[after[0]] == before, f"{after} does not go on from {before}: {line}"
        state = HistoryState(self._history.sizes)
        report = holdfast.load(self._run, into=state.state)
        assert (state.progress["job"], report.step) == self._last
        assert not state.wrong()

    def _tell(self, text: str) -> None:
        self.told.append(f"{time.monotonic() - self._begun_s:6.2f} s: {text}")

    def _keeper_logs(self) -> Iterator[str]:
        for node in self._nodes:
            with suppress(OSError, holdfast.HoldfastError), self._memory_of(node) as folder:
                for path in sorted(folder.path.glob("keeper.log*")):
                    yield f"{node.name}: {path.read_text(errors='replace')[-3000:]}"

    def _clear(self) -> None:
        """End all processes of this run, and free the memory of the nodes that are left."""
        for node in self._network.nodes:
            if node in self._cluster.launchers:
                continue
            _kill(node.processes())
            for path in node.memory.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for keeper in self._keepers:
            keeper.wait()


def _held_by(folder: NodeFolder, generations: dict[str, Generation]) -> Mapping[str, Holding]:
    """The content of the memory of one node, by checkpoint. Adds to the known `generations`."""
    own: dict[str, set[int]] = {}
    copies: dict[str, set[int]] = {}
    rows: dict[str, list[ParityRow]] = {}
    for name in (*slot_names(folder), *copy_names(folder), *parity_names(folder)):
        with suppress(FileNotFoundError, CorruptError), Slot(folder, name) as slot:
            contents = slot.record.contents
            states = WHOLE if slot.is_copy else (*WHOLE, SlotState.STAGED)
            if contents is None or slot.record.state not in states:
                continue
            id_ = contents.checkpoint_id
            if name in parity_names(folder):
                rows.setdefault(id_, []).append(_row_of(record_of(slot)))
            else:
                (copies if slot.is_copy else own).setdefault(id_, set()).update(each.file for each in contents.files)
            with suppress(FileNotFoundError, CorruptError):
                generations.setdefault(id_, read_generation(folder, id_))
    return {
        id_: Holding(frozenset(own.get(id_, ())), frozenset(copies.get(id_, ())), tuple(rows.get(id_, ())))
        for id_ in {*own, *copies, *rows}
    }


def _row_of(record: ParityRecord) -> ParityRow:
    group = tuple((node.identity, frozenset(node.files)) for node in record.group.nodes)
    return ParityRow(group, record.group.losses, record.row)


def _kill(pids: Iterator[int] | Collection[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def campaign(folder: Path, seeds: Sequence[int], *, sockets: Path) -> Counter[str]:
    """Play the histories of these seeds. Returns the counts of what happened."""
    cluster = Cluster(folder / "cluster")
    counts: Counter[str] = Counter()
    try:
        for seed in seeds:
            play = Play(draw_history(seed), cluster, sockets / f"{seed}")
            try:
                play.play()
            finally:
                counts.update(play.counts)
            counts["histories"] += 1
            shutil.rmtree(sockets / f"{seed}")
    finally:
        cluster.close()
    return counts
