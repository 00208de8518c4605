"""The scenarios of ``bench load``: saved layouts, and the layouts that they are loaded onto."""

from __future__ import annotations

from importlib.util import find_spec

import msgspec

from bench.errors import SetupError
from bench.placing import Layout
from bench.state import NUM_LAYERS, LlamaLike

#: Contenders that are packages of their own.
PACKAGES = ("torch_checkpointing", "torchsnapshot", "safetensors")


class Side(msgspec.Struct, frozen=True):
    """The ranks that save or load, and how the state lies over them."""

    layout: Layout
    world: int


class Scenario(msgspec.Struct, frozen=True):
    """A checkpoint that is `saved` by some ranks and `loaded` by others.

    With fewer layers, tensors are larger.
    """

    name: str
    title: str
    saved: Side
    loaded: Side
    num_layers: int = NUM_LAYERS

    def recipe(self, side: Side, min_nbytes: int) -> LlamaLike:
        """How the ranks of `side` make the state."""
        return LlamaLike(min_nbytes, side.layout, self.num_layers)


SCENARIOS = (
    Scenario("same", "2 ranks, same rows", Side("rows", 2), Side("rows", 2)),
    Scenario("columns", "rows -> columns, 2 ranks", Side("rows", 2), Side("columns", 2)),
    Scenario("grow", "rows, 1 -> 4 ranks", Side("rows", 1), Side("rows", 4)),
    Scenario("shrink", "rows, 4 -> 3 ranks", Side("rows", 4), Side("rows", 3)),
    Scenario("fsdp-tp", "FSDP(4) -> TP 2 x FSDP 2", Side("rows", 4), Side("fsdp-tp", 4)),
    # Of 2 GiB in two layers, each weight has more than 8 MiB.
    Scenario("replicas", "4 replicas", Side("replicas", 4), Side("replicas", 4), num_layers=2),
)


def chosen(names: list[str] | None) -> tuple[Scenario, ...]:
    """The scenarios of these names, or all; SetupError for a name that is not known."""
    known = {scenario.name: scenario for scenario in SCENARIOS}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise SetupError(f"There is no scenario {', '.join(unknown)}. Choose from {', '.join(known)}.")
    return tuple(scenario for name, scenario in known.items() if names is None or name in names)


def why_not(contender: str, scenario: Scenario) -> str | None:
    """Why `contender` cannot take part in `scenario`; None if it can."""
    if contender in PACKAGES and find_spec(contender) is None:
        return "it is not installed; `make bench` installs it"
    if contender == "torch.save" and scenario.saved != scenario.loaded:
        return "a file holds what one rank held, so only as many ranks of the same layout can load"
    return None
