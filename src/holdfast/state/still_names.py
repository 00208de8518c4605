"""The names of the tensors of a state that training leaves alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class StillNames:
    """The still parts that a walk has found: the names of `frozen` parameters, and the `paths` of parts that the user
    has declared still."""

    frozen: set[str] = field(default_factory=set)
    paths: list[str] = field(default_factory=list)

    def among(self, names: Collection[str], frozen: set[str]) -> frozenset[str]:
        """Those of the `names` that are `frozen`, or lie at or below one of the paths."""
        declared = tuple(f"{path}/" for path in self.paths)
        if not declared:
            return frozenset(frozen.intersection(names))
        return frozenset(name for name in names if name in frozen or f"{name}/".startswith(declared))
