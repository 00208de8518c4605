"""Calls to inference engines, which run beside the trainer's own work, and the errors of engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from holdfast.control.deadline import Deadline
from holdfast.errors import HoldfastError, StorageError
from holdfast.phases import attempt

#: Time that calls to other engines get after a failure. Their workers hear of it, and answer soon.
_AFTER_FAILURE_S: Final = 2.0

T = TypeVar("T")


class EngineCall:
    """One `call` to engine number `engine`; `what` names it in errors. Anything that it raises becomes a
    `HoldfastError`."""

    def __init__(self, engine: int, what: str, call: Callable[[], None]) -> None:
        self.engine = engine
        self.error: HoldfastError | None = None
        self._what = what
        self._call = call

    def run(self) -> None:
        """Make the call, and keep its error."""
        outcome = attempt(self._call)
        if isinstance(outcome, HoldfastError):
            self.error = outcome
        elif isinstance(outcome, Exception):
            self.error = self._failed(f"{type(outcome).__name__}: {outcome}")
            self.error.__cause__ = outcome

    def check(self) -> None:
        """Make the call, and raise its error."""
        self.run()
        if self.error is not None:
            raise self.error

    def late(self, timeout_s: float) -> HoldfastError:
        """The error where the call does not return."""
        return self._failed(f"it did not answer within {timeout_s:g} s")

    def _failed(self, why: str) -> StorageError:
        return StorageError(
            f"engine {self.engine} failed in {self._what}: {why}.",
            code="storage.engine",
            action="Read the log of the engine, and publish again.",
        )


def run_beside(
    calls: Sequence[EngineCall],
    work: Callable[[], T],
    deadline: Deadline,
    failed: Callable[[EngineCall, HoldfastError], None],
) -> tuple[T | Exception, list[HoldfastError]]:
    """Do `work` beside `calls`. Each call returns when its engine has done its part. Returns the result or the error of
    `work`, and the errors of the calls, the first one first.

    When a call fails, its thread calls `failed`, so that `work` need not wait for the workers of that call. When `work`
    fails, the function does not wait for calls that do not return soon.
    """
    errors: list[HoldfastError] = []

    def run(call: EngineCall) -> None:
        call.run()
        if call.error is not None:
            errors.append(call.error)
            failed(call, call.error)

    threads = [threading.Thread(target=run, args=(call,), name="holdfast-engine", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    result = attempt(work)
    wait_s = _AFTER_FAILURE_S if isinstance(result, Exception) else deadline.remaining_s(graces=1)
    end_s = time.monotonic() + wait_s
    for thread in threads:
        thread.join(max(end_s - time.monotonic(), 0.0))
    hanging = [call.late(deadline.timeout_s) for call, each in zip(calls, threads, strict=True) if each.is_alive()]
    return result, errors if isinstance(result, Exception) else [*errors, *hanging]
