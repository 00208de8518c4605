"""The position of a loop in a loader that accelerate prepared, and how the loop's next pass begins there.

The loader itself counts the batches that the loop takes from it. On the same number of ranks, with the same batches, a
resumed pass skips whole batches, so each rank gets the batches that it would have got. Otherwise the pass consists of
the samples of the epoch that are left, divided among the ranks that there are now.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import Sampler

from holdfast.data.batch_order import BatchOrder
from holdfast.data.data_identity import check_identity
from holdfast.errors import ConfigurationError
from holdfast.frameworks.random_generators import GeneratorStates, RandomGenerators
from holdfast.trainers.loader_passes import LoaderShape, countable_sampler, iterate, sampler_of, shape_of, skipping

_log = logging.getLogger(__name__)

#: The number of batches of a pass that began in the middle of its epoch.
_BY_SAMPLES: Final = -1
#: The attribute of a loader that is followed.
_KNOWN: Final = "_holdfast_position"


class PassPlace(NamedTuple):
    """The place after some batches of a pass. `samples` are those of the epoch that come before it."""

    epoch: int
    batches: int
    samples: int


class FollowedLoader:
    """The position of the loop in `loader`, as an entry of the state. A batch counts as trained on when the loop gets
    it, so a save after the step of a batch has the position after that batch.

    A load has the next pass over the loader begin at the stored position. An iteration that began before a load raises
    `ConfigurationError`, code ``config.batch``, at its next batch.
    """

    @classmethod
    def of(cls, loader: Any, *, world_size: int) -> FollowedLoader:
        """The position of the loop in `loader`; the same object in each call, because the loader counts once."""
        known = vars(loader).get(_KNOWN)
        if known is None:
            _refuse_order(loader)
            known = cls(loader, world_size=world_size)
            setattr(loader, _KNOWN, known)
        assert isinstance(known, FollowedLoader)
        return known

    def __init__(self, loader: Any, *, world_size: int) -> None:
        self.random = PassRandom(loader, self)
        self._loader = loader
        self._shape = shape_of(loader, world_size=world_size, per_rank=loader.batch_size or 1)
        self._place = PassPlace(loader.iteration, 0, 0)
        #: The place and the shape of the loader that were loaded, until a pass begins there.
        self._loaded: tuple[PassPlace, LoaderShape] | None = None
        self._num_loads = 0
        self._undo = _nothing
        plain = type(loader).__iter__
        iterate(loader, lambda: self._pass(plain))

    @property
    def is_between_passes(self) -> bool:
        """Whether the next batch is the first of a pass."""
        place, _ = self._position()
        return not place.samples and not place.batches

    def state_dict(self) -> dict[str, int]:
        """The position. Equal on all ranks."""
        place, shape = self._position()
        return {
            "epoch": place.epoch,
            "batches": place.batches,
            "position": place.samples,
            "num_samples": shape.num_samples,
            "batch_size": shape.batch_size,
            "world_size": shape.world_size,
        }

    def _position(self) -> tuple[PassPlace, LoaderShape]:
        if self._loaded is not None:
            return self._loaded
        place = self._place
        if place.batches and self._loader.end_of_dataloader:
            place = PassPlace(place.epoch + 1, 0, 0)
        return place, self._shape

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Have the next pass begin at the position of the save.

        Raises:
            IncompatibleError: the dataset has another length (code ``incompatible.dataset``).
        """
        samples = check_identity({"num_samples": self._shape.num_samples}, state)
        shape = LoaderShape(state["num_samples"], state["batch_size"], state["world_size"])
        self._loaded = PassPlace(state["epoch"], state["batches"], samples), shape
        self._num_loads += 1
        self._loader.iteration = state["epoch"]

    def _pass(self, plain: Any) -> Iterator[Any]:
        """The batches of a pass. `plain` begins an iteration of the loader as accelerate does."""
        self._undo()
        self._undo, loads = _nothing, self._num_loads
        random = RandomGenerators().read()
        is_resumed = self._resume()
        if not is_resumed:
            self.random.note(random)
        try:
            for batch in plain(self._loader):
                if self._num_loads != loads:
                    raise _stale()
                if is_resumed:  # the pass had begun before the save, with all that it draws
                    RandomGenerators().write(random)
                    is_resumed = False
                self._count()
                yield batch
        finally:
            if self._num_loads == loads:
                self._undo()
                self._undo = _nothing
        self._place = PassPlace(self._loader.iteration, 0, 0)

    def _count(self) -> None:
        epoch, batches, samples = self._place
        samples += self._shape.batch_size
        if self._shape.num_samples >= 0:
            samples = min(samples, self._shape.num_samples)
        self._place = PassPlace(epoch, batches if batches == _BY_SAMPLES else batches + 1, samples)

    def _resume(self) -> bool:
        """Go to the loaded place. Returns whether that is in the middle of an epoch."""
        self._place = PassPlace(self._loader.iteration, 0, 0)
        if self._loaded is None:
            return False
        place, shape = self._loaded
        self._loaded = None
        self._loader.iteration = place.epoch
        if not place.samples:
            self._place = place
            return False
        sampler = countable_sampler(self._loader)
        if hasattr(sampler_of(self._loader), "set_epoch"):  # a loader that skips batches does not pass it on
            sampler_of(self._loader).set_epoch(place.epoch)
        if shape == self._shape and place.batches != _BY_SAMPLES:
            self.random.begin_again()
            self._place, self._undo = place, skipping(self._loader, place.batches)
        elif sampler is not None:
            self._loader.set_sampler(RestSampler(sampler, place.samples))
            self._place, self._undo = place._replace(batches=_BY_SAMPLES), lambda: self._loader.set_sampler(sampler)
        else:
            batches = place.samples // self._shape.batch_size
            _log.warning(
                "the job has another number of ranks or other batches, and its loader cannot be positioned by samples: "
                "it goes on at batch %d of epoch %d, and a few samples may be trained on twice, or not at all",
                batches,
                place.epoch,
            )
            self._place = PassPlace(place.epoch, batches, batches * self._shape.batch_size)
            self._undo = skipping(self._loader, batches)
        return True


class PassRandom:
    """The random generators from which a loader draws the order of its samples, as a rank's entry of the state."""

    def __init__(self, loader: Any, followed: FollowedLoader) -> None:
        self._sampler = sampler_of(loader)
        self._followed = followed
        self._generators = RandomGenerators().read()
        self._order = self._read_order()

    def _read_order(self) -> bytes:
        generator = getattr(self._sampler, "generator", None)
        return b"" if generator is None else generator.get_state().cpu().numpy().tobytes()

    def note(self, generators: GeneratorStates) -> None:
        """A pass begins, where the process's generators have these states."""
        self._generators, self._order = generators, self._read_order()

    def begin_again(self) -> None:
        """Bring back the process's generators of the beginning of the pass."""
        RandomGenerators().write(self._generators)

    def state_dict(self) -> dict[str, object]:
        """The states at the beginning of the pass, or of now between two passes."""
        order = self._read_order() if self._followed.is_between_passes else self._order
        seed = self._sampler.initial_seed if isinstance(self._sampler, SeedableRandomSampler) else None
        return {"generators": self._generators, "order": order, "seed": seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back the states of the sampler; those of the process follow when a pass begins."""
        self._generators, self._order = state["generators"], state["order"]
        generator = getattr(self._sampler, "generator", None)
        if generator is not None and self._order:
            words = torch.frombuffer(bytearray(self._order), dtype=torch.uint8)
            generator.set_state(words)
        if isinstance(self._sampler, SeedableRandomSampler) and state["seed"] is not None:
            self._sampler.initial_seed = state["seed"]


class RestSampler(Sampler[int]):
    """The samples that `sampler` gives after the first `skipped` ones."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler = sampler
        self._skipped = skipped

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._skipped)

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self._sampler), self._skipped, None)


def _nothing() -> None:
    pass


def _refuse_order(loader: Any) -> None:
    """Refuse a loader whose batches holdfast has divided among the ranks: accelerate divides them once more."""
    inner = loader.batch_sampler
    while inner is not None:
        if isinstance(inner, BatchOrder):
            raise ConfigurationError(
                f"The loader with the batch sampler {type(inner).__name__} went through accelerator.prepare, which "
                "divides its batches among the ranks once more.",
                code="config.accelerator",
                action="Leave that loader out of prepare, follow it with the order (order.follow), and add the order "
                "to the state.",
            )
        inner = getattr(inner, "batch_sampler", None)


def _stale() -> ConfigurationError:
    return ConfigurationError(
        "A checkpoint was loaded while a loop iterated over a loader, and the batches that follow are not those after "
        "its position.",
        code="config.batch",
        action="Begin a new iteration of the loader after each restore.",
    )
