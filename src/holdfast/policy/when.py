"""The policies that say when a training loop saves."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NoReturn

from holdfast.goodput.failures import PRESETS
from holdfast.options import check_flag, check_positive, checked_number
from holdfast.policy.keep import KeepPolicy, no_and, parts_of, untrue
from holdfast.store.urls import absolute
from holdfast.wording import kind_of

#: Signals that no process can handle, that report an error of the process itself, or that every end of a child sends.
_NOT_FOR_HANDLERS: Final = frozenset(
    getattr(signal, name)
    for name in (
        "SIGKILL",
        "SIGSTOP",
        "SIGSEGV",
        "SIGBUS",
        "SIGFPE",
        "SIGILL",
        "SIGABRT",
        "SIGTRAP",
        "SIGSYS",
        "SIGCHLD",
    )
    if hasattr(signal, name)
)


class SavePolicy:
    """A rule for when a training loop saves. ``a | b`` is the policy that saves whenever `a` or `b` does."""

    def __or__(self, other: object) -> SavePolicy:
        if isinstance(other, KeepPolicy):
            raise _two_arguments(self, other)
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return AnyOf((*self.parts(), *other.parts()))

    def __ror__(self, other: object) -> SavePolicy:
        if isinstance(other, KeepPolicy):
            raise _two_arguments(self, other)
        return NotImplemented

    def __and__(self, other: object) -> NoReturn:
        raise no_and(self, other)

    def __bool__(self) -> NoReturn:
        raise untrue(self)

    def __init_subclass__(cls) -> None:
        if not cls.__module__.startswith("holdfast."):
            raise TypeError(
                f"{cls.__name__} cannot be a SavePolicy: no loop asks policies of other packages; call save()"
            )

    def parts(self) -> Iterator[SavePolicy]:
        """The policies that this one is made of; itself if it is a single one."""
        yield self

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects that this policy alone may decide, as errors name them; none for most."""
        return ()

    @property
    def needs_memory(self) -> bool:
        """Whether it asks for saves to memory alone."""
        return False


@dataclass(frozen=True)
class AnyOf(SavePolicy):
    """The policy that saves whenever one of `policies` does; `a | b` makes it.

    Raises `ValueError` for policies that contradict each other: two intervals of time, or two rules for one metric or
    one signal.
    """

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        rules = Counter(subject for each in self.policies for subject in each.subjects)
        for subject, number in rules.items():
            if number > 1:
                raise ValueError(f"the policy has {number} rules for {subject}; keep one of them")

    def parts(self) -> Iterator[SavePolicy]:
        """As `SavePolicy.parts`."""
        yield from self.policies


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Save after each step whose number is a multiple of `num_steps`, except after step 0. With `memory_only`, save to
    the memory of the nodes alone, as `Checkpointer.save` does."""

    num_steps: int
    memory_only: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        least = "an interval has at least one step"
        object.__setattr__(self, "num_steps", checked_number("num_steps", self.num_steps, least=1, reason=least))
        check_flag("memory_only", self.memory_only)

    @property
    def needs_memory(self) -> bool:
        """As `SavePolicy.needs_memory`."""
        return self.memory_only

    def is_due(self, step: int) -> bool:
        """Whether a save follows `step`."""
        return step > 0 and step % self.num_steps == 0


@dataclass(frozen=True)
class EveryTime(SavePolicy):
    """Save when `seconds` have passed since the last save, whatever asked for it, or since the start. The clock of the
    first rank counts. With `memory_only`, save to the memory of the nodes alone, as `Checkpointer.save` does; without
    it, such saves do not count."""

    seconds: float
    memory_only: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_positive("the interval", self.seconds, "seconds")
        check_flag("memory_only", self.memory_only)

    @property
    def needs_memory(self) -> bool:
        """As `SavePolicy.needs_memory`."""
        return self.memory_only

    @property
    def subjects(self) -> tuple[str, ...]:
        """As `SavePolicy.subjects`."""
        return ("the time between saves to memory alone" if self.memory_only else "the time between saves",)


@dataclass(frozen=True, kw_only=True)
class Auto(SavePolicy):
    """Save as often as loses the least time, to saves and to failures together. All saves cost at most the share
    `max_overhead` of the time.

    It measures what saves cost: the time that training waits, the time that steps take longer while a save is on its
    way, and the time until the checkpoint is durable. The first save follows after 16 steps. From each complete save
    on it chooses the interval anew, and keeps to the present one unless that wastes 5 % more than needed; the log says
    why. Where the `Checkpointer` has memory, it measures saves to memory alone too, and if they pay, makes them at an
    interval of their own, except while another save is on its way.

    The job is expected to fail as often as its nodes did in `failures`, which names a fleet that others described:
    "llama3", "rsc1", "rsc2" or "infinitehbd". The number of jobs that have ended on the run corrects that. `mttf_s`, a
    mean time to a failure of this job in seconds, takes the place of both.
    """

    max_overhead: float = 0.035
    failures: str = "llama3"
    mttf_s: float | None = None

    def __post_init__(self) -> None:
        share: object = self.max_overhead
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise ValueError(f"max_overhead is a share of the time, such as 0.01 for 1 %, not {share!r}")
        failures: object = self.failures
        if not isinstance(failures, str) or failures not in PRESETS:
            raise ValueError(f"failures is one of {', '.join(map(repr, PRESETS))}, not {failures!r}")
        if self.mttf_s is not None:
            check_positive("mttf_s", self.mttf_s, "seconds")

    @property
    def subjects(self) -> tuple[str, ...]:
        """As `SavePolicy.subjects`."""
        return ("the time between saves",)


@dataclass(frozen=True)
class OnMetric(SavePolicy):
    """Save when the metric `name`, which the loop gives to `Checkpointer.step`, is better than ever before in this
    process, by more than `min_delta`. With `mode` "min" a smaller value is better, with "max" a greater one. The value
    of the first rank counts.

    On several ranks, the save follows a step or a few steps later, when all ranks have agreed on it. To save exactly
    the state that was measured, call `Checkpointer.save` on all ranks.
    """

    name: str
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a metric is a string, not {name!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {self.mode!r}")
        delta: object = self.min_delta
        if not isinstance(delta, int | float) or not 0 <= delta < math.inf:
            raise ValueError(f"min_delta is a difference of the metric, 0 or more, not {delta!r}")

    @property
    def subjects(self) -> tuple[str, ...]:
        """As `SavePolicy.subjects`."""
        return (f"the metric {self.name!r}",)


@dataclass(frozen=True, kw_only=True)
class OnRequest(SavePolicy):
    """Save when somebody asks for it: with ``holdfast.request_save(run)`` or ``holdfast request-save RUN`` from any
    process; with the signal `signum` to any rank (SIGUSR1, say); or by creating the `file`, which the first rank then
    removes. The first rank looks for requests and for the file every `poll_s` seconds.
    """

    signum: int | None = None
    file: Path | None = None
    poll_s: float = 1.0

    def __post_init__(self) -> None:
        if self.signum is not None:
            _check_signal(self.signum)
        if self.file is not None:
            file: object = self.file
            if not isinstance(file, str | os.PathLike):
                raise TypeError(f"file is the path of a file, not {kind_of(file)}: {file!r}")
            path = Path(absolute(os.fspath(file)))
            if path.is_dir():
                raise ValueError(f"file is the path of a file that asks for a save, but '{path}' is a folder")
            object.__setattr__(self, "file", path)
        check_positive("poll_s", self.poll_s, "seconds")

    @property
    def subjects(self) -> tuple[str, ...]:
        """As `SavePolicy.subjects`."""
        return ("requests",) if self.signum is None else ("requests", _name_of(self.signum))


@dataclass(frozen=True)
class OnPreemption(SavePolicy):
    """Save and end the loop when one of the signals `signums` comes to any rank, as it does before a machine is taken
    away, or when `notice` returns a text on any rank. All ranks save after the same step; then `Checkpointer.steps`
    ends, and `Checkpointer.preempted` is True.

    The signal itself no longer ends the process. It is noticed at the end of a step, and the save follows that step or,
    on several ranks, mostly the next one. `notice` is a function that asks whoever announces preemptions, such as the
    metadata server of a cloud; each rank calls it every `poll_s` seconds in a thread of its own, and it returns None
    while nothing is announced.

    If `deadline_s` is given, the machine is gone so many seconds after the notice: saves then wait for nothing longer,
    and the end of the `Checkpointer` leaves a snapshot that is not durable yet to the memory of the node, with a
    warning.
    """

    signums: tuple[int, ...] = (signal.SIGTERM,)
    notice: Callable[[], str | None] | None = field(default=None, kw_only=True)
    poll_s: float = field(default=1.0, kw_only=True)
    deadline_s: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        signums: object = self.signums
        if not isinstance(signums, tuple) or not (signums or self.notice):
            raise TypeError(f"signums is a tuple of signals, such as (signal.SIGTERM,), not {signums!r}")
        for signum in self.signums:
            _check_signal(signum)
        if self.notice is not None and not callable(self.notice):
            raise TypeError(f"notice is a function that returns a text or None, not {self.notice!r}")
        check_positive("poll_s", self.poll_s, "seconds")
        if self.deadline_s is not None:
            check_positive("deadline_s", self.deadline_s, "seconds")

    @property
    def subjects(self) -> tuple[str, ...]:
        """As `SavePolicy.subjects`."""
        return ("preemption", *map(_name_of, self.signums))


def signal_name(signum: int) -> str:
    """The name of a signal; a real-time signal may have only its number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _name_of(signum: int) -> str:
    return f"the signal {signal_name(signum)}"


def _check_signal(signum: object) -> None:
    """Raise `TypeError` or `ValueError` unless a policy can wait for the signal `signum`."""
    if isinstance(signum, bool) or not isinstance(signum, int):
        raise TypeError(f"signum is a signal, such as signal.SIGUSR1, not {signum!r}")
    if signum not in signal.valid_signals() or signum in _NOT_FOR_HANDLERS:
        raise ValueError(f"no policy can wait for signal {signum}; use signal.SIGUSR1, for example")


def _two_arguments(save: SavePolicy, keep: KeepPolicy) -> TypeError:
    """The error for a policy of each kind in one union."""
    when, what = (" | ".join(map(repr, parts)) for parts in (save.parts(), parts_of(keep)))
    return TypeError(
        f"{when} says when to save, and {what} what to keep, so | does not join them; give each to its own argument of "
        f"the Checkpointer: save={when}, keep={what}"
    )
