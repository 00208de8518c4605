"""The instructions for one attempt of a script, which its processes find in their environment."""

from __future__ import annotations

import os
from typing import Final

import msgspec

from holdfast.decoding import decode_json

_VARIABLE: Final = "HOLDFAST_REHEARSAL"


class Rehearsal(msgspec.Struct, frozen=True):
    """The instructions for one attempt: every `Checkpointer` of the script saves into a run in `folder` instead of its
    own, after each step whose number is a multiple of `every`, through memory in `node_dir`.

    With `dies_after`, one rank is killed after that step: at the share `delay` of the step that follows. (If that step
    had ended in an earlier attempt, after the first step of this one.)
    """

    folder: str
    node_dir: str
    every: int
    dies_after: int | None = None
    delay: float = 0.0

    def in_environment(self) -> dict[str, str]:
        """The environment of the attempt's processes."""
        return {**os.environ, _VARIABLE: msgspec.json.encode(self).decode()}

    def is_in(self, environment: bytes) -> bool:
        """Whether a process with this environment, as ``/proc`` shows it, belongs to the attempt or to another one with
        the same folder."""
        return msgspec.json.encode(self.folder) in environment and _VARIABLE.encode() in environment

    @staticmethod
    def of_environment() -> Rehearsal:
        """The instructions of this process."""
        return decode_json(os.environ[_VARIABLE].encode(), Rehearsal)
