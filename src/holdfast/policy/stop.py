"""The policy for saves that fail: whether training goes on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.options import check_positive, checked_number
from holdfast.wording import count, duration


@dataclass(frozen=True, kw_only=True)
class StopAfter:
    """Stop training when checkpoints fail to become durable: after `missed` saves in a row that made none, or when none
    has become durable for ``without_durable_s``, counted from the first save that should have made one. With both, the
    first that happens.
    """

    missed: int | None = None
    without_durable_s: float | None = None

    def __post_init__(self) -> None:
        if self.missed is None and self.without_durable_s is None:
            raise ValueError("StopAfter needs a limit: StopAfter(missed=3) or StopAfter(without_durable_s=3600)")
        if self.missed is not None:
            least = "training would stop before a save fails"
            object.__setattr__(self, "missed", checked_number("missed", self.missed, least=1, reason=least))
        if self.without_durable_s is not None:
            check_positive("without_durable_s", self.without_durable_s, "seconds")

    def why(self, *, num_missed: int, waited_s: float) -> str:
        """The reason to stop after `num_missed` saves in a row that made no checkpoint, when saves have waited for a
        durable one for ``waited_s``; "" if training goes on."""
        if self.missed is not None and num_missed >= self.missed:
            return f"{count(num_missed, 'save')} in a row made no checkpoint"
        if self.without_durable_s is not None and waited_s >= self.without_durable_s:
            return f"no checkpoint has become durable for {duration(waited_s)}"
        return ""
