"""Power failures: for every legal content of the disk, the head is there and whole, and no older than promised."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import HoldfastError, NotFoundError
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.posix import TEMPORARY_PREFIX
from holdfast.store.urls import open_store
from tests.faults.power_loss import Recorder, Remains, Tree, build, expected
from tests.faults.small_job import head, resumed, save, state
from tests.support.models import start_new_job

#: Shares of what is uncertain that happened: nothing and everything are the likeliest on real disks.
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)


def scenario(recorder: Recorder, root: Path) -> None:
    """Four saves of one process: the first of a run, the next, one of a new job, and one after a rollback."""
    run = str(root / "run")
    start_new_job()
    for step in (1, 2, 3, 4):
        origin = step - 1
        if step == 3:
            resumed(run)
        if step == 4:
            origin = 1
            holdfast.load(f"{run}@step=1", into=state(0), continues=True)
        with recorder.recording():
            recorder.mark("begin", step, frozenset({origin} - {0}))
            save(run, step)
            recorder.mark("returned", step)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorder, Path]:
    root = tmp_path_factory.mktemp("recorded")
    recorder = Recorder(root)
    scenario(recorder, root)
    return recorder, root


def violation(root: Path, heads: frozenset[int | None]) -> str | None:
    """The first thing that is wrong with the run below `root`, whose head may be of one of the steps in `heads`."""
    run = root / "run"
    try:
        found: int | None = head(run)
        for commit in Run.open(open_store(Location(str(run)))).lineage():
            head(f"{run}@{commit.place}")
    except NotFoundError as error:
        found = None
        if None not in heads:
            return f"the head is gone: {error}"
    except HoldfastError as error:
        return f"the head cannot be loaded: {error}"
    except AssertionError:
        return "the head is not what was saved"
    return None if found in heads else f"the head is of step {found}, and was to be one of {heads}"


class Search:
    """Looks for violations in states sampled from `recorder`'s log, as real files in `folder`."""

    def __init__(self, recorder: Recorder, folder: Path, seed: int) -> None:
        self._log = recorder.log
        self._folder = folder
        self._generator = random.Random(seed)
        self._remains: dict[int, Remains] = {}
        self._known: set[int] = set()
        self.num_sampled = 0

    @property
    def num_states(self) -> int:
        """Different states that were built and loaded."""
        return len(self._known)

    def run(self, *, num_sampled: int, go_on_every: int = 0) -> list[str]:
        """Violations found in so many samples, however long a busy machine takes for them; a few of them are enough."""
        found: list[str] = []
        for instant in self._instants():
            for share in SHARES:
                wrong = self._try(instant, share, go_on_every)
                if wrong is not None:
                    found.append(f"after event {instant} of {len(self._log)}, share {share}: {wrong}")
            if self.num_sampled >= num_sampled or len(found) > 5:
                break
        return found

    def _instants(self) -> Iterator[int]:
        """Numbers of events after which the power fails: the end, then all in random order, again and again."""
        yield len(self._log)
        while True:
            yield from self._generator.sample(range(len(self._log) + 1), len(self._log) + 1)

    def _try(self, instant: int, share: float, go_on_every: int) -> str | None:
        if instant not in self._remains:
            self._remains[instant] = Remains(self._log, instant)
        tree, heads = self._remains[instant].sample(self._generator, share), expected(self._log, instant)
        self.num_sampled += 1
        state_ = hash((heads, frozenset(tree.items())))
        if state_ in self._known:
            return None
        self._known.add(state_)
        root = self._folder / "remains"
        build(tree, root)
        try:
            wrong = violation(root, heads)
            if wrong is None and go_on_every and self.num_states % go_on_every == 0:
                wrong = self._go_on(root / "run")
            return wrong
        finally:
            shutil.rmtree(root)

    def _go_on(self, run: Path) -> str | None:
        """A new job resumes from what remains and saves."""
        start_new_job()
        try:
            resumed(run)
        except NotFoundError:
            start_new_job()
        try:
            save(str(run), 9)
        except HoldfastError as error:
            return f"no job can go on: {error}"
        return violation(run.parent, frozenset({9}))


def test_with_all_that_happened_the_remains_are_what_is_on_the_disk(
    recorded: tuple[Recorder, Path], tmp_path: Path
) -> None:
    recorder, root = recorded
    build(Remains(recorder.log, len(recorder.log)).sample(random.Random(0), 1.0), tmp_path / "remains")
    assert contents(tmp_path / "remains") == contents(root)


def contents(root: Path) -> Tree:
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}


def test_what_a_returned_save_promised_needs_nothing_uncertain(recorded: tuple[Recorder, Path], tmp_path: Path) -> None:
    recorder, root = recorded
    certain = Remains(recorder.log, len(recorder.log)).sample(random.Random(0), 0.0)
    assert {name: content for name, content in certain.items() if TEMPORARY_PREFIX not in name} == contents(root)


def search_sound(recorder: Recorder, folder: Path, *, num_sampled: int) -> Search:
    """Search with a random seed, which is printed; nothing may be found."""
    seed = random.SystemRandom().randrange(2**32)
    search = Search(recorder, folder, seed)
    found = search.run(num_sampled=num_sampled, go_on_every=20)
    what = f"{search.num_sampled} samples, {search.num_states} states, {len(recorder.log)} events"
    sys.stdout.write(f"power loss: seed {seed}, {what}\n")
    assert found == [], f"seed {seed}"
    return search


def test_a_power_failure_at_any_instant_leaves_a_whole_head(recorded: tuple[Recorder, Path], tmp_path: Path) -> None:
    search = search_sound(recorded[0], tmp_path, num_sampled=200)
    assert search.num_states > 40, "most samples were alike"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_power_failure_at_any_instant_leaves_a_whole_head_in_thousands_of_states(
    recorded: tuple[Recorder, Path], tmp_path: Path
) -> None:
    search = search_sound(recorded[0], tmp_path, num_sampled=8_000)
    assert search.num_sampled > len(SHARES) * len(recorded[0].log), "not every instant was tried"
    assert search.num_states > 1_000, "most samples were alike"


def in_folder(pattern: str, *, folder: bool) -> Callable[[str, bool], bool]:
    """Picks fsyncs of the folders that match, or of the files in them."""
    return lambda path, is_folder: (
        is_folder == folder and bool(re.fullmatch(pattern, path if is_folder else os.path.dirname(path)))
    )


@pytest.mark.parametrize(
    "skip",
    [
        pytest.param(in_folder(pattern, folder=folder), id=f"{'folder' if folder else 'files in'} {name}")
        for name, pattern in {
            "run": ".*/run",
            "epochs": ".*/epochs",
            "history": ".*/history",
            "checkpoint": ".*/checkpoints/[^/]*",
        }.items()
        for folder in (True, False)
    ]
    + [
        pytest.param(in_folder(".*/checkpoints", folder=True), id="folder checkpoints"),
        pytest.param(in_folder(".*/lossy[^/]*", folder=True), id="folder above the run"),
    ],
)
def test_each_fsync_that_is_left_out_is_missed(tmp_path: Path, skip: Callable[[str, bool], bool]) -> None:
    root, remains = tmp_path / "lossy", tmp_path / "search"
    root.mkdir()
    remains.mkdir()
    recorder = Recorder(root, skip=skip)
    scenario(recorder, root)
    found = Search(recorder, remains, seed=1).run(num_sampled=100)
    assert found


CALLS = {
    "openat": "create",
    "pwrite64": "write",
    "write": "write",
    "ftruncate": "truncate",
    "fallocate": "fallocate",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "mkdir": "mkdir",
    "mkdirat": "mkdir",
    "link": "link",
    "linkat": "link",
    "unlink": "unlink",
    "unlinkat": "unlink",
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "truncate": "truncate",
    "pwritev": "write",
    "pwritev2": "write",
    "rmdir": "rmdir",
}


def traced(folder: Path, root: Path) -> Counter[tuple[str, str]]:
    """The system calls below `root`, from one file per thread."""
    calls: Counter[tuple[str, str]] = Counter()
    for file in folder.glob("trace.*"):
        for line in file.read_text(errors="replace").splitlines():
            match = re.match(r"(\w+)\((.*)\) += (-?\d+)", line)
            if match is None or int(match[3]) < 0 or (match[1] == "openat" and "O_CREAT" not in match[2]):
                continue
            named = re.findall(rf'["<]({re.escape(str(root))}[^">]*)', match[2])
            if named:
                calls[CALLS[match[1]], named[-1]] += 1
    return calls


@pytest.mark.timeout(180)
def test_the_recording_is_what_the_kernel_was_asked_for(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace")
    root, folder = tmp_path / "root", tmp_path / "traces"
    root.mkdir()
    folder.mkdir()
    options = ["-ff", "-y", "-qq", "-s", "0", "--seccomp-bpf", "-e", f"trace={','.join(CALLS)}"]
    python = [sys.executable, "-m", "tests.faults.power_loss", str(root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [strace, *options, "-o", str(folder / "trace"), *python],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    recorded = Counter((call, path) for call, path in json.loads(done.stdout))
    assert recorded.total() > 100
    assert traced(folder, root) == recorded
