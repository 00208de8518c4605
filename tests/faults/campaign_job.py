"""A job that changes its state right after each `save`, in ways that may mix into it, and records the truth first.

The truth of a save is a digest of each tensor and each value, taken by this job in the instant before `save` is called.
Copies are cut into small calls with pauses between them, so that there is time to mix something.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest.mock import patch

import torch
import xxhash
from torch import nn

import holdfast
from holdfast import Checkpointer, HoldfastError, Memory
from holdfast.snapshot import capture as snapshot_module
from tests.support.bound import bits
from tests.support.interrupts import leaves_block

SOURCES: Final = str(Path(holdfast.__file__).parent)
#: The longest pause between two calls of a copy, and the bytes of each call.
LONGEST_PAUSE_S: Final = 0.002
CALL_NBYTES: Final = 1 << 10
#: The share of saves in which an exception comes, and the time within which it comes.
INTERRUPTED: Final = 0.25
SOON_S: Final = 0.02
#: Lines of the library that a save goes through, about.
NUM_LINES: Final = 3000

Truth = dict[str, Any]


class Trained(nn.Module):
    """A trunk that is trained, a teacher and a codebook that change in other ways, and parts that come later."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
        self.teacher = nn.Linear(24, 32).requires_grad_(False)
        self.codebook = nn.Parameter(torch.randn(64, 16), requires_grad=False)
        self.later = nn.ParameterDict()


class Loop:
    """The state of the job, and all that may happen to it."""

    def __init__(self, dice: random.Random, source: str) -> None:
        self._dice = dice
        self._source = source
        self.model = Trained()
        # As users do it: frozen parameters, too.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": {"number": -1, "seen": []},
        }
        self._deeds: list[Callable[[], None]] = [
            self.step,
            self.step,
            self.step,
            self.forward,
            self.teach,
            self.replace_teacher,
            self.update_codebook,
            self.replace_codebook,
            self.change_values,
            self.load,
            self.transfer,
        ]
        self._rare: list[Callable[[], None]] = [self.add_group, self.forget]

    def act(self) -> None:
        """Some of it, in some order."""
        for deed in self._dice.choices(self._deeds, k=self._dice.randint(1, 4)):
            deed()
        if self._dice.random() < 0.1:
            self._dice.choice(self._rare)()

    def forward(self) -> None:
        loss = self.model.trunk(torch.randn(4, 24)).square().sum()
        for parameter in self.model.later.values():
            loss = loss + parameter.square().sum()
        loss.backward()

    def step(self) -> None:
        self.forward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def teach(self) -> None:
        with torch.no_grad():
            for parameter in self.model.teacher.parameters():
                parameter.mul_(0.9).add_(0.1)

    def replace_teacher(self) -> None:
        for parameter in self.model.teacher.parameters():
            parameter.data = torch.randn(parameter.shape)

    def update_codebook(self) -> None:
        self.model.codebook.data.copy_(torch.randn(64, 16))

    def replace_codebook(self) -> None:
        self.model.codebook.data = torch.randn(64, 16)

    def change_values(self) -> None:
        self.state["progress"]["seen"].append(self._dice.random())
        del self.state["progress"]["seen"][:-5]
        for group in self.optimizer.param_groups:
            group["lr"] = self._dice.random()

    def load(self) -> None:
        """Our own verb fills parameters that are being copied."""
        holdfast.load(self._source, self.state, select="model/trunk.*")

    def transfer(self) -> None:
        """So does another one."""
        other = nn.ModuleDict({"trunk": Trained().trunk})
        holdfast.transfer({"model": other}, {"model": self.model}, select="model/trunk.*")

    def add_group(self) -> None:
        if len(self.model.later) < 4:
            name = f"part{len(self.model.later)}"
            self.model.later[name] = nn.Parameter(torch.randn(20))
            self.optimizer.add_param_group({"params": [self.model.later[name]], "lr": self._dice.random()})

    def forget(self) -> None:
        self.optimizer.state.clear()

    def truth(self) -> Truth:
        """The content of a save at this moment: digests of tensors, and values."""
        names: dict[torch.Tensor, str] = {
            parameter: f"model/{name}" for name, parameter in self.model.named_parameters()
        }
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for parameter, slots in self.optimizer.state.items():
            tensors |= {f"optimizer/state/{names[parameter]}/{slot}": tensor for slot, tensor in slots.items()}
        values: dict[str, Any] = {"progress/number": self.state["progress"]["number"]}
        values |= {f"progress/seen/{n}": value for n, value in enumerate(self.state["progress"]["seen"])}
        for number, group in enumerate(self.optimizer.param_groups):
            values[f"optimizer/param_groups/{number}/lr"] = group["lr"]
            for parameter in group["params"]:
                values[f"optimizer/group_of/{names[parameter].replace('/', '%2F')}"] = number
        return {"tensors": {name: digest(tensor) for name, tensor in tensors.items()}, "values": values}

    def grow(self, num_groups: int) -> None:
        """Have so many groups: as a checkpoint has that is to be restored."""
        while len(self.optimizer.param_groups) < num_groups:
            self.add_group()


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(bits(tensor))


def found(path: str) -> Truth:
    """The content of a checkpoint, in the form of `Loop.truth`."""
    view = holdfast.open(path)
    kept = ("progress/", "optimizer/group_of/")
    return {
        "tensors": {name: digest(view[name][...]) for name in view.names()},
        "values": {
            name: view.value(name)
            for name in view.value_names()
            if name.startswith(kept) or (name.startswith("optimizer/param_groups/") and name.endswith("/lr"))
        },
    }


@dataclass(frozen=True)
class Place:
    """The place where jobs work: the folder of one run, and a checkpoint to load from."""

    folder: Path
    source: str

    @property
    def run(self) -> str:
        return str(self.folder / "run")

    @property
    def log(self) -> Path:
        """The file into which the job writes the truth."""
        return self.folder / "truths"


def work(place: Place, seed: int, steps: range) -> None:
    """Save these steps; goes on from what is there."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    aside_nbytes = dice.choice([0, snapshot_module._ASIDE_NBYTES])
    with (
        place.log.open("a", encoding="utf-8") as truths,
        patch.object(snapshot_module, "_CALL_NBYTES", CALL_NBYTES),
        patch.object(snapshot_module, "_ASIDE_NBYTES", aside_nbytes),
        patch.object(torch, "_foreach_copy_", paused(torch._foreach_copy_, random.Random(seed + 1))),
    ):
        loop = Loop(dice, place.source)
        checkpointer = Checkpointer(place.run, loop.state, memory=Memory(node_dir=place.folder / "node"), timeout_s=60)
        restored(loop, checkpointer, place.run)
        for step in steps:
            loop.act()
            loop.state["progress"]["number"] = step
            print(json.dumps({"step": step, **loop.truth()}), file=truths, flush=True)
            interrupt = dice.choice([at_some_line, at_some_time]) if dice.random() < INTERRUPTED else unharmed
            with interrupt(dice):
                checkpointer.save(step)
        checkpointer.close()


def restored(loop: Loop, checkpointer: Checkpointer, run: str) -> None:
    """Restore what there is: it may have more groups than a new loop."""
    for num_groups in range(1, 6):
        loop.grow(num_groups)
        try:
            checkpointer.restore()
        except HoldfastError as error:
            if not error.code.startswith("incompatible"):
                raise
        else:
            return
    raise AssertionError(f"the head of {run} fits no loop")


def paused(copy: Callable[..., None], dice: random.Random) -> Callable[..., None]:
    """As `copy`, after a while."""

    def late(*args: Any, **options: Any) -> None:
        if dice.random() < 0.3:
            time.sleep(dice.random() * LONGEST_PAUSE_S)
        copy(*args, **options)

    return late


@contextmanager
def unharmed(_: random.Random) -> Iterator[None]:
    """No interrupt."""
    yield


@contextmanager
def at_some_line(dice: random.Random) -> Iterator[None]:
    """KeyboardInterrupt at some line of the library, in this thread."""
    left = [dice.randrange(NUM_LINES)]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0 and leaves_block(frame):
                left[0] = 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        # The interrupt is the attack itself: the job goes on after it, as one whose user caught Ctrl-C does.
        with suppress(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(None)


@contextmanager
def at_some_time(dice: random.Random) -> Iterator[None]:
    """KeyboardInterrupt from a signal, wherever this thread is then."""
    is_armed = [True]

    def interrupt(*_: object) -> None:
        if is_armed[0]:
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, dice.random() * SOON_S + 1e-5)
    try:
        yield
        is_armed[0] = False
    except KeyboardInterrupt:
        is_armed[0] = False
