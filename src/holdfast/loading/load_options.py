"""The options of a load, checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.cooperative.reading import MEMORY_NBYTES, MIN_MEMORY_NBYTES
from holdfast.format.patterns import Globs
from holdfast.loading.older import OlderAdvice, load_older
from holdfast.mapping import Pad, Rule
from holdfast.mapping.rules import checked_rules
from holdfast.options import check_flag, checked_number
from holdfast.plan.exchange import Bandwidths
from holdfast.run.resumes import ResumeLimit


class LoadOptions:
    """The checked options of a load. Globs remember their matches, so `select` and `cast` make new ones for each
    checkpoint."""

    def __init__(
        self,
        select: str | Sequence[str] | None = None,
        mapping: Sequence[Rule] | None = None,
        cast: bool | str | Sequence[str] | None = None,
        strict: bool = True,
        fallback: bool = False,
        verify: bool = True,
        *,
        allow_empty: bool = False,
        ignores_unexpected: bool = False,
        continues: bool | None = None,
        device: str | torch.device | None = None,
        memory: int = MEMORY_NBYTES,
        bandwidths: Bandwidths | None = None,
        resumes: ResumeLimit | None = None,
        older: OlderAdvice = load_older,
    ) -> None:
        self._select = select
        if isinstance(cast, torch.dtype):
            raise TypeError(f"cast must be True, or globs of the tensors to cast, not {cast}")
        given = {"strict": strict, "fallback": fallback, "verify": verify, "allow_empty": allow_empty}
        for name, value in given.items():
            check_flag(name, value)
        if not isinstance(continues, bool | None):
            raise TypeError(f"continues must be True, False or None, not {continues!r}")
        self._cast = False if cast is None else cast
        self.mapping = checked_rules(() if mapping is None else mapping)
        self.strict = strict
        self.allow_empty = allow_empty
        #: Whether a checkpoint may have more than the live state, also in a strict load.
        self.ignores_unexpected = ignores_unexpected
        self.fallback = fallback
        self.verify = verify
        self.continues = continues
        #: The record of this resume, and its limit; None for a load that resumes no run.
        self.resumes = resumes
        self.older = older
        self.device = None if device is None else torch.device(device)
        least = f"at least {MIN_MEMORY_NBYTES} bytes are needed"
        self.memory_budget = checked_number("memory_budget", memory, least=MIN_MEMORY_NBYTES, reason=least)
        if not isinstance(bandwidths, Bandwidths | None):
            raise TypeError(f"bandwidths are a holdfast.Bandwidths, not {bandwidths!r}")
        self.bandwidths = bandwidths
        if self.device is not None and self.device.type == "meta":
            raise ValueError("device must be a device with memory, not 'meta'")
        self.select()
        self.cast()

    @property
    def may_keep(self) -> bool:
        """Whether tensors that one checkpoint fills may keep contents, all or a part, in a load of another one."""
        return not self.strict or any(isinstance(rule, Pad) and rule.fill == "keep" for rule in self.mapping)

    def select(self) -> Globs | None:
        """New globs of the names to load; None for everything."""
        return None if self._select is None else Globs(self._select)

    def cast(self) -> Globs | bool:
        """New globs of the tensors that may be cast, or whether all may."""
        return self._cast if isinstance(self._cast, bool) else Globs(self._cast)
