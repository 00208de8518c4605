"""Many jobs on one run, in every order: saves, crashes, sleepers, survivors, rollbacks, takeovers, doctors, removals.

Every activity runs in a thread that stops before each of its operations on storage, and goes on when the machine says
so. So it can die there, or sleep while the run changes under it and wake up later. After every rule the run on storage
is compared with a small model of it.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Semaphore, Thread
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.errors import ConfigurationError, CorruptError, FencedError, NotFoundError
from holdfast.format import records
from holdfast.format.records import Commit, Place
from holdfast.run import holds
from holdfast.run.complete import check_files, check_present, complete, read_manifest, seal_and_commit
from holdfast.run.diagnosis import examine, finish, remove
from holdfast.run.history import Run
from holdfast.run.loads import Load
from holdfast.run.removal import remove_checkpoint
from holdfast.run.rollback import rollback
from holdfast.run.session import Session
from holdfast.store.base import Location, Store
from holdfast.store.urls import open_store
from holdfast.testing.memory_store import MemoryStore
from tests.support.checkpoints import check, names, publish_manifest, write_data
from tests.support.faulty_storage import FaultyStore

#: The number of operations that an activity makes before it is left alone; None: it goes to its end.
OPS = st.one_of(st.none(), st.none(), st.integers(0, 30))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opens an epoch does not wait for a removal that sleeps here for as long as a test likes. So this
    is the worst case, where the head may become an older checkpoint. `test_removal_races` has the wait."""
    monkeypatch.setattr(holds, "PATIENCE_S", 0.0)


class Died(BaseException):
    """The end of a process; nothing that holdfast does may catch it."""


class Gate:
    """Stops a process before each of its operations until the test lets it continue. It does not stop reads of open
    files: the process makes those in threads of its own."""

    STOPS = frozenset({"read", "nbytes", "list", "create", "delete"})

    def __init__(self) -> None:
        self.killed = False
        self.arrived = Semaphore(0)
        self.go_on = Semaphore(0)

    def __call__(self, number: int, when: str, name: str, path: str) -> None:
        assert name != "writer", "data files of these tests are created whole"
        if when == "before" and name in self.STOPS:
            self.arrived.release()
            self.go_on.acquire()
            if self.killed:
                raise Died


class Activity:
    """Something that a process does to the run, step by step. `done` says that it ended, `error` how it failed, `death`
    that it was killed."""

    def __init__(self, storage: Store, work: Callable[[Store], object]) -> None:
        self.done = False
        self.error: Exception | None = None
        self.death: Died | None = None
        self._gate = Gate()
        self._thread = Thread(target=self._run, args=(work, FaultyStore(storage, self._gate)), daemon=True)
        self._thread.start()
        self._gate.arrived.acquire()

    def _run(self, work: Callable[[Store], object], storage: Store) -> None:
        try:
            work(storage)
        except Died as death:
            self.death = death
        except Exception as error:  # noqa: BLE001 - judged by the machine
            self.error = error
        self.done = True
        self._gate.arrived.release()

    def advance(self, num_ops: int | None) -> None:
        """Let it do so many operations more, or (None) all."""
        while not self.done and num_ops != 0:
            self._gate.go_on.release()
            self._gate.arrived.acquire()
            num_ops = None if num_ops is None else num_ops - 1

    def kill(self) -> None:
        """End it before its next operation, if there is one."""
        was_done = self.done
        self._gate.killed = True
        self.advance(None)
        self._thread.join()
        assert was_done or self.death is not None, "it lived on"


class Job:
    """A training job: what it remembers of the run, the places that its state has passed through, and the newest epoch
    that it may know of."""

    def __init__(self) -> None:
        self.session = Session()
        self.past: tuple[Place, ...] = ()
        self.known: int | None = None
        self.activity: Activity | None = None

    @property
    def is_idle(self) -> bool:
        return self.activity is None or self.activity.done


class HistoryMachine(RuleBasedStateMachine):
    """The run on `storage`, and what is known of it without asking the code under test."""

    #: The number of checkpoints that all machines together have loaded and compared with what was saved.
    num_compared: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.storage = self.new_storage()
        #: The same place as processes reach it.
        self.reached = self.reached_storage()
        self.run = Run.create(self.storage)
        self.jobs: list[Job] = []
        self.activities: list[Activity] = []
        self.step = 0
        #: The saves that were begun: the past of each place's state, and its folder.
        self.past: dict[Place, tuple[Place, ...]] = {}
        self.folders: dict[Place, str] = {}
        #: The facts that somebody was told or has seen once: they may never change again.
        self.told: dict[Place, int] = {}
        self.origins: dict[int, Place | None] = {}
        self.commits: dict[Place, bytes] = {}
        self.removing: set[Place] = set()
        self.checked: set[Place] = set()

    def new_storage(self) -> Store:
        return MemoryStore()

    def reached_storage(self) -> Store:
        return self.storage

    # ---- what happens

    @initialize(num_saves=st.integers(0, 3))
    def first_job(self, num_saves: int) -> None:
        self.jobs.append(Job())
        self._train(self.jobs[-1], num_saves)

    @rule(load=st.sampled_from([True, True, True, False]), num_saves=st.integers(0, 3))
    def start_job(self, load: bool, num_saves: int) -> None:
        job = Job()
        self.jobs.append(job)
        if load:
            self._start(self._load(job), None, job)
        self._train(job, num_saves)

    @precondition(lambda self: any(job.is_idle for job in self.jobs))
    @rule(data=st.data(), takeover=st.sampled_from([False, False, False, True]), ops=OPS)
    def save(self, data: st.DataObject, takeover: bool, ops: int | None) -> None:
        job = data.draw(st.sampled_from([job for job in self.jobs if job.is_idle]))
        self.step += 1
        self._start(self._save(job, self.step, takeover=takeover), ops, job)

    @precondition(lambda self: any(job.is_idle for job in self.jobs))
    @rule(data=st.data(), ops=OPS)
    def load(self, data: st.DataObject, ops: int | None) -> None:
        job = data.draw(st.sampled_from([job for job in self.jobs if job.is_idle]))
        at = data.draw(st.sampled_from([None, None, *self.run.places()]))
        self._start(self._load(job, at), ops, job)

    @precondition(lambda self: self.activities)
    @rule(data=st.data(), ops=OPS)
    def wake_up(self, data: st.DataObject, ops: int | None) -> None:
        self._advance(data.draw(st.sampled_from(self.activities)), ops)

    @precondition(lambda self: len(self.activities) > 1)
    @rule(turns=st.lists(st.integers(1, 4), min_size=4, max_size=20))
    def all_wake_up(self, turns: list[int]) -> None:
        for number, ops in enumerate(turns):
            if self.activities:
                self._advance(self.activities[number % len(self.activities)], ops)

    @precondition(lambda self: self.activities)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        activity = data.draw(st.sampled_from(self.activities))
        activity.kill()
        self.activities.remove(activity)
        self.jobs = [job for job in self.jobs if job.activity is not activity]

    @precondition(lambda self: self.folders)
    @rule(data=st.data(), ops=OPS)
    def survive(self, data: st.DataObject, ops: int | None) -> None:
        folder = self.folders[data.draw(st.sampled_from(sorted(self.folders)))]
        self._start(lambda storage: self._told(complete(Run.open(storage), folder, deep=False)), ops)

    @precondition(lambda self: self.run.places())
    @rule(data=st.data(), ops=OPS)
    def roll_back(self, data: st.DataObject, ops: int | None) -> None:
        to = data.draw(st.sampled_from(self.run.places()))
        activity = self._start(lambda storage: rollback(Run.open(storage), to), ops)
        if ops is None and activity.error is None:
            assert self.model_head() == to

    @precondition(lambda self: len(self.run.places()) > 1)
    @rule(data=st.data(), ops=OPS)
    def remove_checkpoint(self, data: st.DataObject, ops: int | None) -> None:
        place, head = data.draw(st.sampled_from(self.run.places()[::-1])), self.model_head()
        commit = self.run.commit(place)
        self.removing.add(place)
        activity = self._start(lambda storage: remove_checkpoint(Run.open(storage), commit), ops)
        if ops is None:
            assert self.model_head() == head
            assert isinstance(activity.error, ConfigurationError) or place not in self.run.places()

    @rule(data=st.data(), ops=OPS, deep=st.booleans())
    def heal(self, data: st.DataObject, ops: int | None, deep: bool) -> None:
        findings = [finding for finding in examine(self.run, deep=deep) if finding.folder is not None]
        assert not [finding for finding in findings if finding.code == "commit.damaged"]
        if not findings:
            return
        finding = data.draw(st.sampled_from(findings))
        if finding.remedy == "finish":
            self._start(lambda storage: self._told(finish(Run.open(storage), finding)), ops)
        elif finding.remedy == "remove" or finding.code == "folder.in_progress":
            self._start(lambda storage: remove(Run.open(storage), finding, force=True), ops)

    @rule(ops=st.integers(0, 40))
    def copy(self, ops: int) -> None:
        """Copied by name, file after file, while others go on."""
        copy = MemoryStore("copy")
        activity = Activity(self.reached, lambda storage: copy_by_name(storage, copy))
        activity.advance(ops)
        if self.activities:
            self._advance(self.activities[0], ops)
        activity.advance(None)
        assert activity.error is None
        check_copy(copy, self.run)

    # ---- what must hold

    @invariant()
    def history_only_grows(self) -> None:
        """No commit that was once seen or reported vanishes, unless somebody asked to remove it."""
        origins = {number: self.run.epoch(number).opened_from for number in reversed(self.run.epochs())}
        assert list(origins) == list(range(1, len(origins) + 1))
        assert {number: origins[number] for number in self.origins} == self.origins
        visible = {place: self.storage.read(records.commit_key(place)) for place in self.run.places()}
        for place, data in self.commits.items():
            assert visible.get(place, data) == data
        gone = (self.commits.keys() | self.told.keys()) - visible.keys()
        assert gone <= self.removing
        assert not gone or all(self.run.is_removed(place) for place in gone)
        self.origins, self.commits = origins, self.commits | visible

    @invariant()
    def the_head_is_that_of_the_model_and_loads(self) -> None:
        head = self.run.head()
        assert (head and head.place) == self.model_head()
        if head is not None:
            self.check(head)

    @invariant()
    def every_visible_checkpoint_loads(self) -> None:
        for place in self.run.places():
            commit = self.run.commit(place)
            assert commit.checkpoint == self.folders[place]
            self.check(commit)

    @invariant()
    def a_lineage_is_the_past_of_one_state(self) -> None:
        for place in self.run.places():
            lineage = list(self.run.lineage_places(place))
            assert lineage[0] == place
            assert set(lineage[1:]) <= set(self.past[place])

    def check(self, commit: Commit) -> None:
        """It is all there, and (looked at once, since nothing is ever changed) holds what was saved."""
        check_present(Checkpoint(self.run.locate(commit)))
        if commit.place not in self.checked:
            check(self.run, commit)
            HistoryMachine.num_compared += 1
        self.checked.add(commit.place)

    def model_head(self) -> Place | None:
        """The rule of the architecture, over the bare names on storage."""
        names = self.storage.list("history")
        hidden = {name.replace(".removed.json", ".json") for name in names if name.endswith(".removed.json")}
        committed = {records.parse_commit_name(name) for name in names if name not in hidden} - {None}
        origins = {number: self.run.epoch(number).opened_from for number in self.run.epochs()}
        below, epoch = None, max(origins, default=None)
        while epoch is not None:
            here = [p for p in committed if p is not None and p.epoch == epoch and (below is None or p < below)]
            if here:
                return max(here)
            below = origins[epoch]
            if below in committed:
                return below
            epoch = None if below is None else below.epoch
        return None

    def teardown(self) -> None:
        for activity in self.activities:
            activity.kill()

    # ---- how

    def _train(self, job: Job, num_saves: int) -> None:
        for _ in range(num_saves):
            self.step += 1
            self._start(self._save(job, self.step, takeover=False), None, job)

    def _start(self, work: Callable[[Store], object], ops: int | None, job: Job | None = None) -> Activity:
        activity = Activity(self.reached, work)
        if job is not None:
            job.activity = activity
        self.activities.append(activity)
        self._advance(activity, ops)
        return activity

    def _advance(self, activity: Activity, ops: int | None) -> None:
        activity.advance(ops)
        if activity.done:
            self.activities.remove(activity)
            if activity.error is not None:
                self._judge(activity.error)

    def _judge(self, error: Exception) -> None:
        """Everybody may be told to stop, or that something is not there (any more); nobody may find damage."""
        if isinstance(error, CorruptError) and self.removing:
            # Somebody read a checkpoint while it was being removed.
            return
        if not isinstance(error, FencedError | ConfigurationError | NotFoundError):
            raise error

    def _told(self, commit: Commit) -> None:
        self.told[commit.place] = commit.step

    def _load(self, job: Job, at: Place | None = None) -> Callable[[Store], None]:
        def work(storage: Store) -> None:
            run = Run.open(storage)
            seen = run.newest_epoch()
            commit = run.head() if at is None else run.find(place=at)
            if commit is not None:
                assert seen is not None
                run.locate(commit)
                job.session.note_loaded(Load(storage.resolved(), run.run_id, commit.place, seen))
                job.past = (*self.past[commit.place], commit.place)
                job.known = seen

        return work

    def _save(self, job: Job, step: int, *, takeover: bool) -> Callable[[Store], None]:
        def work(storage: Store) -> None:
            run = Run.create(storage)
            place = job.session.begin(run, takeover=takeover, world_size=2, sources=job.session.sources(list))
            if takeover and place.seq == 1:
                # The state is declared to be the successor of the head.
                origin = self.run.epoch(place.epoch).opened_from
                job.past = (*job.past, *self.past.get(origin, ()), origin) if origin is not None else job.past
            # It was not unaware of a rollback, or of another job.
            assert takeover or job.known in (None, place.epoch, place.epoch - 1)
            assert place not in self.past
            job.known = place.epoch
            self.past[place] = job.past
            job.past = (*job.past, place)
            self.folders[place] = folder = publish_manifest(run, place, step)
            write_data(run, folder)
            stored = read_manifest(run, folder)
            files = check_files(run, stored, deep=False)
            run.check_fence(place.epoch)
            self._told(seal_and_commit(run, stored, files))

        return work


class PosixHistoryMachine(HistoryMachine):
    """The same on a file system."""

    def new_storage(self) -> Store:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-history-"))
        return open_store(Location(str(self.folder / "run")))

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)


def copy_by_name(source: Store, target: Store) -> None:
    """Copy a run file by file, in the order of names; what vanishes meanwhile is left out."""
    folders = ["checkpoints/" + name for name in source.list("checkpoints")]
    for folder in (*folders, "epochs", "history"):
        for name in source.list(folder):
            with suppress(NotFoundError):
                target.create(f"{folder}/{name}", source.read(f"{folder}/{name}"))
    target.create(records.MARKER_KEY, source.read(records.MARKER_KEY))


def check_copy(copy: Store, original: Run) -> None:
    """A copy is a run; whatever is visible in it loads, or is said to be incomplete."""
    run = Run.open(copy)
    damaged = {finding.folder for finding in examine(run) if finding.code == "commit.damaged"}
    for place in run.places():
        commit = run.commit(place)
        assert original.is_removed(place) or commit == original.commit(place)
        if commit.checkpoint not in damaged:
            check(run, commit)
    assert all(finding.text for finding in examine(run))


class Pair(HistoryMachine):
    """A run with three commits, a save that got as far as its first data file, and jobs that loaded: the head, and the
    second commit."""

    def __init__(self) -> None:
        super().__init__()
        self.unfinished = Job()
        self._train(self.unfinished, 3)
        self.second = Place(1, 2)
        self.loaded, self.loaded_second = Job(), Job()
        self._start(self._load(self.loaded), None, self.loaded)
        self._start(self._load(self.loaded_second, self.second), None, self.loaded_second)
        self.step += 1
        self.asleep = self._start(self._save(self.unfinished, self.step, takeover=False), 0)
        while Place(1, 4) not in self.folders or len(names(self.run, self.folders[Place(1, 4)])) < 2:
            self.asleep.advance(1)
        self.folder = self.folders[Place(1, 4)]
        self.findings = examine(self.run)
        self.step += 1
        self.works: dict[str, Callable[[Store], object]] = {
            "survivor": lambda storage: self._told(complete(Run.open(storage), self.folder, deep=False)),
            "doctor": lambda storage: remove(Run.open(storage), self.findings[0], force=True),
            "rm": lambda storage: remove_checkpoint(Run.open(storage), self.run.commit(self.second)),
            "rollback": lambda storage: rollback(Run.open(storage), self.second),
            "resume": self._save(self.loaded, self.step, takeover=False),
            "branch": self._save(self.loaded_second, self.step, takeover=False),
            "takeover": self._save(Job(), self.step, takeover=True),
        }

    def start(self, name: str, ops: int | None) -> Activity:
        if name == "save":
            self._advance(self.asleep, ops)
            return self.asleep
        if name == "rm":
            self.removing.add(self.second)
        return self._start(self.works[name], ops)

    def finish(self, activity: Activity) -> None:
        if not activity.done:
            self._advance(activity, None)

    def check_all(self) -> None:
        self.history_only_grows()
        self.the_head_is_that_of_the_model_and_loads()
        self.every_visible_checkpoint_loads()
        self.a_lineage_is_the_past_of_one_state()


ACTIVITIES = ("save", "survivor", "doctor", "rm", "rollback", "resume", "branch", "takeover")


@pytest.mark.parametrize(
    "sleeper", [name if name == "save" else pytest.param(name, marks=pytest.mark.slow) for name in ACTIVITIES]
)
def test_one_sleeps_at_any_of_its_operations_while_another_one_runs(sleeper: str) -> None:
    for other in ACTIVITIES:
        if other != sleeper:
            assert sum(1 for _ in every_sleep(sleeper, other, None)) > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sleeper", ACTIVITIES)
def test_two_sleep_at_any_of_their_operations(sleeper: str) -> None:
    for other in ACTIVITIES:
        if other != sleeper:
            assert sum(1 for num_ops in range(30) for _ in every_sleep(sleeper, other, num_ops)) > 3


def every_sleep(sleeper: str, other: str, num_ops: int | None) -> Iterator[int]:
    """Let `sleeper` sleep after each number of its operations, while `other` does `num_ops` of its own; then both go on
    to their end, the sleeper first."""
    for slept_at in itertools.count():
        pair = Pair()
        first = pair.start(sleeper, slept_at)
        ended = first.done
        second = pair.start(other, num_ops)
        pair.check_all()
        pair.finish(first)
        pair.check_all()
        pair.finish(second)
        pair.check_all()
        pair.teardown()
        if ended:
            return
        yield slept_at


def explore(machine: type[HistoryMachine], *, num_examples: int, num_steps: int) -> int:
    """Run the machine as often; how many checkpoints were compared."""
    before = HistoryMachine.num_compared
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
    return HistoryMachine.num_compared - before


def test_the_history_is_that_of_the_model_whatever_happens_in_an_object_store() -> None:
    assert explore(HistoryMachine, num_examples=12, num_steps=25) >= 12


def test_the_history_is_that_of_the_model_whatever_happens_in_a_file_system() -> None:
    assert explore(PosixHistoryMachine, num_examples=8, num_steps=15) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [HistoryMachine, PosixHistoryMachine])
def test_the_history_is_that_of_the_model_in_long_runs(machine: type[HistoryMachine]) -> None:
    num_examples = 600 if machine is HistoryMachine else 200
    assert explore(machine, num_examples=num_examples, num_steps=60) >= num_examples
