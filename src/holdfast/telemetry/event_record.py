"""The form in which an event is recorded: one line of JSON."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from holdfast.format.records import Seconds

#: The longest duration that a record can hold, in seconds.
LONGEST_S: Final = 1e9
_Duration = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of one process.

    `event` is the name of its class. ``unix_s`` is when it happened; ``clock_s`` is the same by a clock of the process
    that never jumps. `run`, `rank`, `world_size`, `host` and `process` say where. `step` is the step that it is about,
    `place` and `tier` are those of the checkpoint. `seconds` and `numbers` are durations and counts, by name. `error`
    is the code of an error, `message` its text.
    """

    event: str
    unix_s: Seconds
    clock_s: _Duration
    run: str
    rank: _Number
    world_size: _Number
    host: str
    process: _Number
    step: _Number | None = None
    place: str = ""
    tier: str = ""
    seconds: dict[str, _Duration] = {}
    numbers: dict[str, _Number] = {}
    error: str = ""
    message: str = ""
