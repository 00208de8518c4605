"""Folders of torch_checkpointing are read directly, on any layout, to the same bits as by its own manager."""

from __future__ import annotations

import itertools
import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from holdfast.errors import HoldfastError
from tests.interop.changed_bytes import SOUND, changed_bytes, outcome
from tests.interop.test_pickle_machine import ATTACKS
from tests.interop.torch_archives import rewrite
from tests.support.bound import bits
from tests.support.ranks import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch_checkpointing import CheckpointManager, ItemSpec, barriers, config
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

pytestmark = pytest.mark.filterwarnings("ignore")


def _gathered(data: object, group: Any = None) -> dict[int, object]:
    """The exchange of torch_checkpointing, which needs CUDA for it."""
    found: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, data, group)
    return dict(enumerate(found))


def manager() -> Any:
    """A manager of the stock library, with its defaults, but without direct I/O, which ext4 refuses."""
    barriers._barrier_sequence = itertools.count()  # warm processes have made managers for other stores
    made = CheckpointManager.Config(
        items={"plain": ItemSpec(required=False)},
        default=ItemSpec(resharder=DefaultResharder()),
        save=config.SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
    made._metadata_manager._all_gather_pickled_data = _gathered
    logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)
    return made


class Job:
    """A model that FSDP2 divides on several ranks, and its optimizer, after two steps."""

    def __init__(self, seed: int, *, steps: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 9), nn.Linear(9, 5, bias=False))
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * (seed + 1))
        for _ in range(steps):
            self.model(torch.arange(8) % 11).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def contents(self) -> dict[str, bytes]:
        """The bits of all weights and slots, as if they were on one rank."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = bits(whole(parameter.detach()))
            for slot, value in self.optimizer.state[parameter].items():
                found[f"{name} {slot}"] = bits(whole(value))
        return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_job(folder: str) -> dict[str, bytes]:
    job = Job(1)
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    manager().save(folder, state | {"extra": {"step": 7, "names": ["a", {"b": (1.5, None)}], "seen": {3: True}}})
    return job.contents()


def load_job(folder: str) -> tuple[dict[str, bytes], object]:
    job = Job(2)
    live: dict[str, Any] = {"model": job.model, "optimizer": job.optimizer, "extra": {}}
    holdfast.load(folder, live)
    return job.contents(), live["extra"]


@pytest.mark.parametrize("ranks", [(2, 3), (3, 1), (1, 2)])
def test_a_job_goes_on_from_the_folder_on_another_number_of_ranks(tmp_path: Path, ranks: tuple[int, int]) -> None:
    saved = run_ranks(ranks[0], save_job, str(tmp_path / "c"))
    extra = {"step": 7, "names": ["a", {"b": (1.5, None)}], "seen": {3: True}}
    assert run_ranks(ranks[1], load_job, str(tmp_path / "c")) == [(saved[0], extra)] * ranks[1]


def save_layouts(folder: str) -> list[tuple[str, bytes]]:
    mesh = init_device_mesh("cpu", (2, 2))
    placements: dict[str, Any] = {
        "rows": (Shard(0), Replicate()),
        "columns": (Replicate(), Shard(1)),
        "both": (Shard(0), Shard(1)),
        "twice": (Shard(0), Shard(0)),
        "nobody": (Replicate(), Replicate()),
    }
    full = torch.arange(77.0).reshape(7, 11)
    state: dict[str, Any] = {name: distribute_tensor(full, mesh, placed) for name, placed in placements.items()}
    strided = (_StridedShard(0, split_factor=2), Shard(0))
    state["strided"] = distribute_tensor(full, mesh, (Shard(0), Shard(0))).redistribute(placements=strided)
    state["deep"] = {"cube": distribute_tensor(torch.arange(60).reshape(3, 4, 5), mesh, (Shard(1), Shard(2)))}
    state["none"] = distribute_tensor(torch.zeros(0, 3), mesh, (Shard(0), Shard(0)))
    state["scalar"] = torch.tensor(2.5)
    own = {"own": torch.full((2,), dist.get_rank())}
    manager().save(folder, {"t": state, "rank": {"mine": dist.get_rank(), "all": "x"}, "plain": own})
    flat = [(name, item) for name, item in state.items() if name != "deep"] + [("deep/cube", state["deep"]["cube"])]
    return [(name, bits(whole(item))) for name, item in flat]


def test_every_division_is_read_whole_and_values_of_ranks_by_rank(tmp_path: Path) -> None:
    saved = run_ranks(4, save_layouts, str(tmp_path / "c"))[0]
    view = holdfast.open(tmp_path / "c")
    assert [(name, bits(view[f"t/{name}"][...])) for name, _ in saved] == saved
    assert bits(view["t/both"][2:5, 3:]) == bits(torch.arange(77.0).reshape(7, 11)[2:5, 3:])
    assert view.value("rank/all") == "x"
    assert [view.value(f"rank/mine/%rank={rank}") for rank in range(4)] == [0, 1, 2, 3]
    own = [f"plain/own/%rank={rank}" for rank in range(4)]
    assert view.names() == sorted([*own, *(f"t/{name}" for name, _ in saved)])


def save_own(folder: str) -> None:
    manager().save(folder, {"plain": {"own": torch.full((2,), dist.get_rank())}, "t": {"w": torch.ones(2)}})


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_file_of_one_rank_made_the_part_of_the_other_the_whole(tmp_path: Path, lost: int) -> None:
    run_ranks(2, save_own, str(tmp_path / "c"))
    (tmp_path / "c" / f"plain_{lost}.pt").unlink()
    view = holdfast.open(tmp_path / "c")
    assert view.names() == ["t/w"]
    assert view["t/w"][...].tolist() == [1, 1]
    live = {"plain": {"own": torch.zeros(2, dtype=torch.int64)}}
    with pytest.raises(HoldfastError, match=rf"plain_{lost}\.pt is missing") as caught:
        holdfast.load(tmp_path / "c", into=live, select="plain/own")
    assert caught.value.code == "corrupt.foreign"
    assert live["plain"]["own"].tolist() == [0, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one process, without a process group."""
    path = tmp_path_factory.mktemp("stock") / "c"
    manager().save(str(path), {"model": {"w": torch.arange(6.0), "b": torch.ones(2)}, "plain": {"x": torch.ones(3)}})
    return path


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_items_without_a_resharder_are_read_too(folder: Path) -> None:
    assert holdfast.open(folder).names() == ["model/b", "model/w", "plain/x"]
    assert holdfast.open(folder)["plain/x"][...].tolist() == [1, 1, 1]


def test_a_missing_a_cut_and_a_malformed_file_are_named(folder: Path, tmp_path: Path) -> None:
    missing = copied(folder, tmp_path / "missing")
    (missing / "model_0.pt").unlink()
    with pytest.raises(holdfast.CorruptError, match=r"model_0\.pt is missing|lacks 1 file"):
        holdfast.open(missing)
    cut = copied(folder, tmp_path / "cut")
    (cut / "model_0.pt").write_bytes((folder / "model_0.pt").read_bytes()[:-40])
    with pytest.raises(HoldfastError, match=r"model_0\.pt"):
        holdfast.open(cut)
    known = pickle.loads((folder / "metadata.pkl").read_bytes())
    for number, change in enumerate(({"version": "3.0"}, {"world_size": 0}, {"metadata": []}, {"metadata": {1: {}}})):
        wrong = copied(folder, tmp_path / str(number))
        (wrong / "metadata.pkl").write_bytes(pickle.dumps(known | change))
        with pytest.raises(holdfast.CorruptError, match=r"metadata\.pkl is malformed") as caught:
            holdfast.open(wrong)
        assert caught.value.code == "corrupt.foreign"


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_are_refused_or_read_and_never_raise_another_error(folder: Path, data: st.DataObject) -> None:
    with changed_bytes(folder / data.draw(st.sampled_from(["metadata.pkl", "model_0.pt", "plain_0.pt"])), data):
        assert outcome(folder) in SOUND


def test_metadata_that_does_not_fit_the_files_is_refused(folder: Path, tmp_path: Path) -> None:
    known = pickle.loads((folder / "metadata.pkl").read_bytes())
    (record,) = known["metadata"]["model"]["nested_path_to_metadata"]['["w"]']
    record["sharding_metadata"]["data"]["global_shape"] = [7]
    wrong = copied(folder, tmp_path / "c")
    (wrong / "metadata.pkl").write_bytes(pickle.dumps(known))
    with pytest.raises(holdfast.CorruptError, match="has a part of model/w"):
        holdfast.open(wrong)


@pytest.mark.parametrize("where", ["metadata", "file"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_pickles_that_would_run_code_are_refused_by_name(folder: Path, tmp_path: Path, attack: str, where: str) -> None:
    data, said = ATTACKS[attack](str(tmp_path / "hit"))
    bad = copied(folder, tmp_path / "c")
    if where == "metadata":
        (bad / "metadata.pkl").write_bytes(data)
    else:
        rewrite(bad / "model_0.pt", {"data.pkl": data})
    with pytest.raises(HoldfastError, match=said or None):
        holdfast.load(bad, {"model": {"w": torch.zeros(6), "b": torch.zeros(2)}}, select="model")
    assert not (tmp_path / "hit").exists()
