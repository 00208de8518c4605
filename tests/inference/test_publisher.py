"""Publishing from a trainer to inference engines over HTTP: real processes, and the bits of stock loading."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.inference import EngineClient, HTTPEngineClient, InferenceWorker, ModuleEngine, Publisher, StoredWeights
from tests.inference import engine_models as models
from tests.support.nursery import start
from tests.support.ranks import RanksFailedError, run_ranks

#: Workers as (tensor-parallel rank, size): an engine of two, and one of one.
WORKERS = ((0, 2), (1, 2), (0, 1))
DISTINCT = 4 * sum(torch.Size(shape).numel() for name, shape in models.SHAPES.items() if "rotary" not in name)


def serve(folder: str, number: int) -> None:
    """One worker: a server, and a file for each version that it shows."""
    rank, size = WORKERS[number]
    model = models.Served(rank, size)
    worker = InferenceWorker(ModuleEngine(model, model.load_weights), index=rank)
    server = models.Server(worker)
    home = Path(folder)
    (home / f"{number}.tmp").write_text(str(server.port))
    (home / f"{number}.tmp").rename(home / f"{number}.port")
    while not (home / "end").exists():
        ask = home / f"{number}.ask"
        if ask.exists():
            ask.unlink()
            shown = [v for v in range(4) if models.loaded(rank, size, v) == model.bits()]
            (home / f"{number}.tmp").write_text(f"{worker.version} {shown}")
            (home / f"{number}.tmp").rename(home / f"{number}.shown")
        time.sleep(0.01)


def found(path: Path) -> str:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.005)
    text = path.read_text()
    path.unlink()
    return text


class Engines:
    """The processes of all workers."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._processes = [start(serve, str(home), n, err=home / f"{n}.err") for n in range(len(WORKERS))]
        self.ports = [int(found(home / f"{number}.port")) for number in range(len(WORKERS))]

    def shown(self) -> list[str]:
        """The answer of each worker: the count of versions, and those whose bits its model has."""
        for number in range(len(WORKERS)):
            (self.home / f"{number}.ask").touch()
        return [found(self.home / f"{number}.shown") for number in range(len(WORKERS))]

    def end(self) -> None:
        (self.home / "end").touch()
        for process in self._processes:
            assert process.wait() == 0, process.err


def clients(ports: list[int]) -> list[EngineClient]:
    return [models.FannedClient(ports[:2]), HTTPEngineClient(f"http://127.0.0.1:{ports[2]}")]


def train(ports: list[int], versions: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """A trainer of FSDP2 ranks that publishes versions."""
    model = models.trainer_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    first = dist.get_rank() == 0
    publisher = Publisher(
        model, clients(ports) if first else (), (2, 1) if first else (), host="127.0.0.1", timeout_s=30
    )
    found = []
    for version in versions:
        models.fill(model, version)
        report = publisher.publish(str(version))
        assert report.unread == ("rotary.inv_freq",)
        found.append((report.sent_nbytes, report.received_nbytes, report.needed_nbytes, report.distinct_nbytes))
    return found


def die(ports: list[int], when: str) -> None:
    """A trainer whose last rank is killed in the middle of a transfer, or whose ranks are after it."""
    if when == "transfer" and dist.get_rank() == dist.get_world_size() - 1:
        from holdfast.publishing.live import LiveFile

        def killed(self: LiveFile, offset: int, out: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        LiveFile.read_at = killed  # type: ignore[method-assign]
    if when == "finish":
        Publisher._finish = lambda self, version: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    train(ports, (3,))


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path)


def test_every_worker_gets_its_parts_of_each_version_and_no_byte_more(engines: Engines, tmp_path: Path) -> None:
    needed = models.needed_nbytes(WORKERS)
    assert engines.shown() == ["0 [0]"] * 3
    assert run_ranks(2, train, engines.ports, (1, 2)) == [[(DISTINCT, needed, needed, DISTINCT)] * 2] * 2
    assert engines.shown() == ["2 [2]"] * 3
    for when in ("transfer", "finish"):
        with pytest.raises(RanksFailedError):
            run_ranks(2, die, engines.ports, when)
        assert engines.shown() == ["2 [2]"] * 3
    run_ranks(1, train, engines.ports, (1,))
    assert engines.shown() == ["3 [1]"] * 3
    engines.end()


def test_a_checkpoint_is_published_and_the_workers_read_their_parts_of_it(engines: Engines, tmp_path: Path) -> None:
    model = models.trainer_model()
    models.fill(model, 1)
    holdfast.save(tmp_path / "run", {"model": model}, step=1)
    publisher = Publisher(StoredWeights(tmp_path / "run"), clients(engines.ports), (2, 1), host="127.0.0.1")
    report = publisher.publish()
    assert report.received_nbytes == report.needed_nbytes == models.needed_nbytes(WORKERS)
    assert engines.shown() == ["1 [1]"] * 3
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "publishing.md").read_text()
    code = next(each for each in re.findall(r"```py\n(.*?)```", guide, re.DOTALL) if "Publisher(" in each)
    code = code.replace("http://engine:8000", f"http://127.0.0.1:{engines.ports[2]}").replace("[2])", "[1])")
    exec(code, {"model": model, "num_steps": 2, "train": lambda step: models.fill(model, step + 2)})
    assert engines.shown() == ["1 [1]", "1 [1]", "3 [3]"]
    engines.end()
