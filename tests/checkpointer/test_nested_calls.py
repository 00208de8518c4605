"""A handler of a signal, `__del__` or a callback runs in the middle of a call of its own thread. A call that it makes
then is refused by name at once, and the outer call goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch

import holdfast
from holdfast import Checkpointer, ConfigurationError, HoldfastError, Memory
from holdfast.decoding import _json, _msgpack
from holdfast.snapshot.guard import changing
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job

LIBRARY = str(Path(holdfast.__file__).parent)
Event = Callable[[CodeType], None]


@contextmanager
def at_every_call(event: Event) -> Iterator[None]:
    """Call `event` whenever this thread enters a function of the library, as the handler of a signal might run there.
    The calls of `event` itself do not count."""

    def enter(frame: FrameType, what: str, _: object) -> None:
        code = frame.f_code
        if what == "call" and code.co_filename.startswith(LIBRARY) and code.co_name != "__getattr__":
            sys.setprofile(None)
            try:
                event(code)
            finally:
                sys.setprofile(enter)

    sys.setprofile(enter)
    try:
        yield
    finally:
        sys.setprofile(None)


class Attempts:
    """Makes `calls` when it is called, and collects what they did other than to be refused."""

    def __init__(self, calls: dict[str, Callable[[], object]]) -> None:
        self.calls = calls
        self.num_refused = 0
        self.others: set[str] = set()

    def __call__(self, code: CodeType) -> None:
        for name, call in self.calls.items():
            try:
                call()
            except HoldfastError as error:
                if error.code == "config.nested":
                    self.num_refused += 1
                    continue
                self.others.add(f"{name} in {code.co_qualname}: {error.code}")
            else:
                self.others.add(f"{name} in {code.co_qualname}: done")


class Job:
    """Two `Checkpointer`s of one run, which share its memory, and a state."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.w = torch.zeros(1000)
        self.state: dict[str, object] = {"w": self.w, "step": {"number": 0}}
        self.first, self.second = (
            Checkpointer(self.run, self.state, memory=Memory(node_dir=folder), timeout_s=30) for _ in range(2)
        )
        self.handle = self.first.save(0)
        self.other = folder / "other"

    def guarded(self) -> None:
        with self.first.guard():
            pass

    def changed(self) -> None:
        assert self.first._tier is not None
        with changing([self.first._tier.stager.guard]):
            pass

    @property
    def calls(self) -> dict[str, Callable[[], object]]:
        return {
            "save": lambda: self.first.save(99),
            "save of another Checkpointer": lambda: self.second.save(99),
            "restore": self.first.restore,
            "wait": self.first.wait,
            "close": self.first.close,
            "holdfast.save": lambda: holdfast.save(self.other, self.state, 99),
            "holdfast.transfer": lambda: holdfast.transfer({"w": torch.zeros(1)}, {"w": torch.zeros(1)}),
        }

    def save(self, step: int) -> None:
        self.w.fill_(step)
        self.state["step"] = {"number": step}
        self.first.save(step)

    def expect(self, step: int) -> None:
        self.first.wait()
        view = holdfast.open(self.run)
        assert (view.step, view.value("step/number"), set(view["w"][...].tolist())) == (step, step, {float(step)})


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    start_new_job()
    made = Job(tmp_path)
    made.first.wait()
    yield made
    made.first.close()
    made.second.close()
    end_keepers(tmp_path)


def test_every_call_within_a_save_is_refused_at_every_point_and_the_save_is_not_affected(job: Job) -> None:
    inner = job.calls | {
        "guard": job.guarded,
        "holdfast.load": lambda: holdfast.load(job.run, {"w": torch.zeros(1000)}, select="w"),
    }
    attempts = Attempts(inner)
    for step in (1, 2, 3):
        with at_every_call(attempts):
            job.save(step)
    assert not attempts.others
    assert attempts.num_refused > 1000
    job.expect(3)
    assert not job.other.exists()


def test_every_call_within_a_restore_is_refused_at_every_point_but_a_load_of_another_state(job: Job) -> None:
    attempts = Attempts(job.calls)
    job.w.fill_(7)
    with at_every_call(attempts):
        report = job.first.restore()
    assert not attempts.others
    assert (report.step, set(job.w.tolist())) == (0, {0.0})
    job.save(1)
    job.expect(1)


def test_every_call_within_close_is_refused_at_every_point(job: Job) -> None:
    job.save(1)
    calls = job.calls
    calls["save"] = calls.pop("save of another Checkpointer")
    calls["close"] = job.second.close
    attempts = Attempts(calls)
    with at_every_call(attempts):
        job.first.close()
    assert not attempts.others
    job.second.save(2).durable.wait(30)


def test_a_save_by_a_checkpointer_within_a_plain_save_or_load_is_refused(job: Job) -> None:
    plain = Attempts({name: job.calls[name] for name in ("save", "restore", "close")})
    with at_every_call(plain):
        holdfast.save(job.other, {"w": torch.ones(3)}, 1)
        holdfast.load(job.other, {"w": torch.zeros(3)})
    assert not plain.others
    assert plain.num_refused > 100
    assert holdfast.open(job.other).step == 1


def test_a_change_within_a_save_by_the_thread_that_saves_is_refused_and_does_not_void_the_save(job: Job) -> None:
    found: list[str] = []

    def change(code: CodeType) -> None:
        if code.co_qualname == "MemoryTier.room":
            try:
                job.changed()
            except ConfigurationError as error:
                found.append(error.code)

    with at_every_call(change):
        job.save(1)
    assert found == ["config.nested"]
    job.expect(1)


def test_a_save_in_the_handler_of_a_signal_during_a_save_is_refused_with_the_way_that_works(job: Job) -> None:
    told: list[HoldfastError] = []

    def on_signal(*_: object) -> None:
        try:
            job.first.save(99)
        except ConfigurationError as error:
            told.append(error)

    class Signalling:
        def state_dict(self) -> dict[str, int]:
            os.kill(os.getpid(), signal.SIGUSR1)
            return {"n": 1}

        def load_state_dict(self, state: object) -> None: ...

    job.state["object"] = Signalling()
    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        job.save(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [error.code for error in told] == ["config.nested"]
    assert "set a flag" in told[0].action
    assert "Checkpointer.save was called inside Checkpointer.save" in told[0].message
    job.expect(1)


def test_a_refusal_that_the_handler_does_not_catch_ends_the_outer_save_and_not_the_next_one(job: Job) -> None:
    class Saving:
        num_calls = 0

        def state_dict(self) -> dict[str, int]:
            self.num_calls += 1
            if self.num_calls == 1:
                job.first.save(99)
            return {}

        def load_state_dict(self, state: object) -> None: ...

    job.state["object"] = Saving()
    with pytest.raises(HoldfastError, match=r"Checkpointer\.save was called inside"):
        job.save(1)
    job.save(2)
    job.expect(2)


def test_a_wait_for_a_handle_within_a_save_is_refused_unless_it_is_over(job: Job) -> None:
    job.handle.durable.wait()
    refused: list[str] = []

    class Waiting:
        def state_dict(self) -> dict[str, int]:
            job.handle.durable.wait()
            try:
                holdfast.Handle(5).durable.wait()
            except ConfigurationError as error:
                refused.append(error.code)
            return {}

        def load_state_dict(self, state: object) -> None: ...

    job.state["object"] = Waiting()
    job.save(1)
    assert set(refused) == {"config.nested"}
    job.expect(1)


def test_a_checkpointer_that_is_left_by_an_exception_within_a_call_of_another_one_closes_nothing_that_this_one_uses(
    job: Job,
) -> None:
    def leave(code: CodeType) -> None:
        if code.co_qualname == "MemoryTier.room":
            with pytest.raises(KeyError), job.second:
                raise KeyError

    job.second.save(1)
    with at_every_call(leave):
        job.save(2)
    job.expect(2)


def test_an_object_may_load_from_another_run_while_it_is_loaded(job: Job) -> None:
    holdfast.save(job.other, {"base": torch.ones(3)}, 1)

    class Layered:
        base = torch.zeros(3)

        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: object) -> None:
            holdfast.load(job.other, {"base": self.base}, continues=False)

    job.state["object"] = Layered()
    job.save(1)
    job.first.wait()
    job.first.restore()
    assert Layered.base.tolist() == [1, 1, 1]


@pytest.mark.timeout(60)
def test_a_plain_save_within_a_plain_save_hangs_nowhere(tmp_path: Path) -> None:
    start_new_job()
    done: list[str] = []

    def save(code: CodeType) -> None:
        if code.co_filename.endswith(("session.py", "decoding.py", "saving/__init__.py")):
            step = len(done) + 1
            try:
                holdfast.save(tmp_path / "inner", {"v": step}, step)
            except ConfigurationError as error:
                done.append(error.code)
            else:
                done.append("saved")

    _json.clear()
    _msgpack.clear()
    with at_every_call(save):
        holdfast.save(tmp_path / "outer", {"w": torch.ones(3)}, 1)
        holdfast.load(tmp_path / "outer", {"w": torch.zeros(3)})
    assert set(done) == {"saved", "config.nested"}
    assert holdfast.open(tmp_path / "outer").step == 1
    assert holdfast.open(tmp_path / "inner").step == max(n for n, how in enumerate(done, 1) if how == "saved")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("verify", "where"), [(True, "_values"), (False, "_map")])
def test_a_view_that_is_read_while_its_thread_reads_it_hangs_nowhere(tmp_path: Path, verify: bool, where: str) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.ones(3), "v": {"n": 5}}, 1)
    view = holdfast.open(tmp_path / "run", verify=verify)
    found: list[object] = []

    def read(code: CodeType) -> None:
        if code.co_name == where and len(found) < 3:
            found.append(None)
            found[-1] = (view.value("v/n"), view["w"].numpy().tolist())

    with at_every_call(read):
        assert view.value("v/n") == 5
        assert view["w"].numpy().tolist() == [1, 1, 1]
    assert found
    assert all(each == (5, [1.0, 1.0, 1.0]) for each in found)
