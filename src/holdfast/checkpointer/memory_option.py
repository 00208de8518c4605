"""The option of a `Checkpointer` that says how it uses the memory of a node."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from holdfast.checkpointer.peer_meeting import ProtectionRules, domain_parts
from holdfast.control.torch_store import global_rank
from holdfast.errors import HoldfastError
from holdfast.node_memory.node_folder import DEFAULT_NODE_DIR
from holdfast.node_memory.peering import MIN_PROTECT_BYTES_PER_S, PaceMode, PacingRules
from holdfast.node_memory.turns import dir_in_turn
from holdfast.options import check_flag, check_positive, checked_number
from holdfast.protection.policies import Copies, Parity
from holdfast.run.session import Takeover
from holdfast.store.base import Location
from holdfast.store.urls import absolute


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The use that a `Checkpointer` makes of a node's memory: it keeps `generations` snapshots per rank, at least 2,
    because one must be whole while the next is copied. `node_dir` is the path of a file system in memory, as a `Path`
    or as text.

    With ``protect=Copies(n)``, keepers send each snapshot to the memory of `n` other nodes, so that the newest one
    survives the loss of nodes. With ``protect=Parity(losses)``, groups of nodes keep parity instead, which takes less
    memory, and a restore rebuilds what was lost. Where that cannot be done, training goes on with a warning, or with
    `require_protection` the first save raises ``config.protection``. `domain` names the failure domains in which this
    node lies, the largest first, such as ``"block-2/rack-7"``; a `Path` is that of a file with that text, and None
    means the variable ``HOLDFAST_DOMAIN`` of the environment. Copies lie in other domains than their owner, and no
    domain has more nodes of a group than may be lost.

    Copies go through the network of the nodes in pieces of 2 ms, while training leaves it idle: with ``"auto"`` where
    keepers have seen that training uses it, with ``"idle"`` always, with ``"none"`` never. Training that leaves it no
    idle time for seconds leaves copies a twentieth of it. `protect_bytes_per_s` is the most that each node sends.
    """

    generations: int = 2
    node_dir: Path = DEFAULT_NODE_DIR
    protect: Copies | Parity | None = None
    require_protection: bool = False
    domain: str | Path | None = None
    protect_pace: Literal["auto", "idle", "none"] = "auto"
    protect_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        protect: object = self.protect
        if not isinstance(protect, Copies | Parity | None):
            raise TypeError(f"protect is holdfast.Copies(n), holdfast.Parity(losses) or None, not {protect!r}")
        check_flag("require_protection", self.require_protection)
        self._check_domain()
        self._check_pacing()
        if protect is None:
            self._check_unprotected()
        least = "one must be whole while the next is copied"
        object.__setattr__(self, "generations", checked_number("generations", self.generations, least=2, reason=least))
        node_dir: object = self.node_dir
        if not isinstance(node_dir, str | os.PathLike):
            raise TypeError(
                f"node_dir is the path of a file system in memory, not {node_dir!r}; give the Checkpointer memory=None "
                "for saves to storage alone"
            )
        object.__setattr__(self, "node_dir", Path(absolute(str(node_dir))))

    def _check_unprotected(self) -> None:
        """Refuse options that say how snapshots are protected, where nothing protects them."""
        given = {
            "require_protection=True": self.require_protection,
            "domain=": self.domain is not None,
            "protect_pace=": self.protect_pace != "auto",
            "protect_bytes_per_s=": self.protect_bytes_per_s is not None,
        }
        option = next((option for option, is_given in given.items() if is_given), "")
        if option:
            raise ValueError(f"{option} needs protect=, such as holdfast.Copies(1), without which nothing is protected")

    def _check_domain(self) -> None:
        domain: object = self.domain
        if not isinstance(domain, str | Path | None):
            raise TypeError(
                "domain is the name of a failure domain, such as 'block-2/rack-7', the Path of a file that has it, or "
                f"None, not {domain!r}"
            )
        if isinstance(domain, str) and not domain_parts(domain):
            raise ValueError(
                f"domain is {domain!r}, which names no failure domain; pass None, or such as 'block-2/rack-7'"
            )
        if isinstance(domain, str) and domain.lstrip().startswith("/"):
            raise ValueError(
                f"domain is {domain!r}, which looks like the path of a file, but text is the name of a domain itself; "
                f"pass Path({domain.strip()!r}) for a file that has the name, or a name such as 'block-2/rack-7'"
            )

    def _check_pacing(self) -> None:
        if self.protect_pace not in get_args(PaceMode):
            raise ValueError(f"protect_pace is 'auto', 'idle' or 'none', not {self.protect_pace!r}")
        if self.protect_bytes_per_s is None:
            return
        check_positive("protect_bytes_per_s", self.protect_bytes_per_s, "bytes")
        if math.isinf(self.protect_bytes_per_s):
            raise ValueError("protect_bytes_per_s is infinite; pass None, which sets no limit")
        if self.protect_bytes_per_s < MIN_PROTECT_BYTES_PER_S:
            raise ValueError(
                f"protect_bytes_per_s is {self.protect_bytes_per_s}, but must be at least {MIN_PROTECT_BYTES_PER_S:,}: "
                "peers give up copies that come more slowly"
            )
        object.__setattr__(self, "protect_bytes_per_s", float(self.protect_bytes_per_s))

    @property
    def protection(self) -> ProtectionRules | None:
        """The rules by which snapshots are protected; None if they are not."""
        if self.protect is None:
            return None
        pacing = PacingRules(self.protect_pace, self.protect_bytes_per_s)
        return ProtectionRules(self.protect, self.domain, self.require_protection, pacing)


class NodeDirs(NamedTuple):
    """The folders of a node that the saves and restores of a job use: one in memory, which other nodes protect by the
    policy `protect` ("": none), and one on a disk (None: none)."""

    memory: Path
    disk: Path | None = None
    protect: str = ""


def own_node_dir(memory: Memory, run: Location, takeover: Takeover) -> Path:
    """The folder in memory that a `Checkpointer` with these options uses. Jobs that save into `run` in turn live at the
    same time, so on one node each has its own."""
    if takeover == "always":
        with suppress(HoldfastError, OSError):  # the first use of the folder says why
            return dir_in_turn(memory.node_dir, run.url, rank=global_rank())
    return memory.node_dir
