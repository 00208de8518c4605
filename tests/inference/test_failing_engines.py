"""Engines that cannot be reached, fail or die: every rank of the trainer names the engine, its worker and the cause."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import HoldfastError
from holdfast.inference import EngineClient, HTTPEngineClient, InferenceWorker, ModuleEngine, Publisher, StoredWeights
from tests.inference import engine_models as models
from tests.support.nursery import start
from tests.support.ranks import run_ranks

Weighted = Iterable[tuple[str, torch.Tensor]]


class ThreadedClient:
    """An engine whose workers are threads of this process."""

    def __init__(self, workers: list[InferenceWorker]) -> None:
        self._workers = workers

    def _all(self, call: Callable[[InferenceWorker], None]) -> None:
        with ThreadPoolExecutor(len(self._workers)) as pool:
            for each in [pool.submit(call, worker) for worker in self._workers]:
                each.result()

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        self._all(lambda worker: worker.init(init_info))

    def start_weight_update(self) -> None:
        self._all(lambda worker: worker.start())

    def update_weights(self, update_info: dict[str, object]) -> None:
        self._all(lambda worker: worker.update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(lambda worker: worker.finish())


class Plain(nn.Module):
    """A model of an engine of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Weighted) -> None:
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)


def engine(size: int, *, num_workers: int | None = None) -> ThreadedClient:
    made = [Plain() for _ in range(size)]
    return ThreadedClient(
        [
            InferenceWorker(ModuleEngine(each, each.load_weights), index=index, num_workers=num_workers)
            for index, each in enumerate(made)
        ]
    )


def refused(*clients: EngineClient, num_workers: list[int], timeout_s: float = 30.0) -> HoldfastError:
    """The error of a publisher of one weight."""
    with pytest.raises(HoldfastError) as raised:
        Publisher({"weight": torch.ones(4)}, clients, num_workers, host="127.0.0.1", timeout_s=timeout_s)
    return raised.value


def publish_to_nobody(port: int, others: int) -> tuple[str, str, bool]:
    first = dist.get_rank() == 0
    began = time.monotonic()
    with pytest.raises(HoldfastError) as raised:
        Publisher(
            {"weight": torch.ones(4)},
            [engine(others), HTTPEngineClient(f"http://127.0.0.1:{port}")] if first else (),
            [others, 100] if first else (),  # more than ranks of a group, whose first one waits for the others of it
            host="127.0.0.1",
        )
    return raised.value.code, str(raised.value), time.monotonic() - began < 100  # of 300 s


@pytest.mark.slow
def test_an_engine_that_cannot_be_reached_is_named_at_once_on_all_ranks() -> None:
    with socket.socket() as taken:  # bound, and not listening: connections to it are refused
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for code, message, at_once in run_ranks(2, publish_to_nobody, port, 1):
            assert (code, at_once) == ("storage.engine", True)
            assert f"http://127.0.0.1:{port}/init_weight_transfer_engine" in message
            assert "Connection refused" in message


@pytest.mark.slow
def test_a_worker_that_does_not_come_is_called_by_its_engine_and_num_workers_is_named() -> None:
    error = refused(engine(1), engine(2), num_workers=[1, 3], timeout_s=10.0)
    assert error.code == "timeout.ranks"
    assert error.message.startswith("worker 2 of engine 1 did not reach 'needs'")
    assert "By num_workers, engine 1 has 3 workers: correct that if it is wrong." in error.action


@pytest.mark.slow
def test_engines_with_more_or_fewer_workers_than_num_workers_are_refused_at_once() -> None:
    began = time.monotonic()
    fewer = refused(engine(2, num_workers=2), num_workers=[3])
    more = refused(engine(2, num_workers=2), num_workers=[1])
    unknown = refused(engine(2), num_workers=[1])
    unequal = refused(engine(2), num_workers=[2, 2])
    assert time.monotonic() - began < 20
    assert [each.code for each in (fewer, more, unknown, unequal)] == ["config.num_workers"] * 4
    assert "engine 0 has 3 workers by num_workers, but it has 2" in str(fewer)
    assert "engine 0 has 1 worker by num_workers, but it has 2" in str(more)
    assert "engine 0 has 1 worker by num_workers, but this is worker 1 of it" in str(unknown)
    assert "num_workers is [2, 2] for 1 client" in str(unequal)


def test_an_error_of_load_weights_names_the_weight_and_the_worker() -> None:
    with pytest.raises(HoldfastError) as raised:
        Publisher(
            {"weight": torch.ones(4), "wright": torch.ones(4)}, [engine(2)], [2], host="127.0.0.1", timeout_s=30.0
        )
    assert raised.value.code == "incompatible.loader"
    assert "worker 0 of engine 0 failed in 'needs'" in str(raised.value)
    assert "load_weights of the engine raises AttributeError at the weight 'wright'" in str(raised.value)


def serve_and_die(folder: str, name: str) -> None:
    """A worker of one process. The worker `mortal` is killed in the middle of an update."""
    os.environ["WORLD_SIZE"] = "2"  # as in a process that was started beside a job of torchrun
    model = models.Served(0, 1)
    worker = InferenceWorker(ModuleEngine(model, model.load_weights))
    if name == "mortal":
        worker.update = lambda info: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    server = models.Server(worker)
    home = Path(folder)
    (home / f"{name}.tmp").write_text(str(server.port))
    (home / f"{name}.tmp").rename(home / name)
    while not (home / "end").exists():
        time.sleep(0.02)
    if name != "mortal":
        assert model.bits() == models.loaded(0, 1, 1)


def begin(home: Path, name: str) -> int:
    process = start(serve_and_die, str(home), name, err=home / f"{name}.err")
    end = time.monotonic() + 60
    while not (home / name).exists():
        assert process.is_running, process.err
        assert time.monotonic() < end
        time.sleep(0.01)
    return int((home / name).read_text())


def publish_to_the_dying(port: int) -> tuple[str, str]:
    model = models.trainer_model()
    first = dist.get_rank() == 0
    clients = [models.FannedClient([port])] if first else []  # raises what urllib raises
    publisher = Publisher(model, clients, [1] if first else [], host="127.0.0.1", timeout_s=60.0)
    with pytest.raises(HoldfastError) as raised:
        publisher.publish()
    return raised.value.code, raised.value.message


def test_a_worker_that_dies_is_an_error_of_its_engine_on_all_ranks(tmp_path: Path) -> None:
    for code, message in run_ranks(2, publish_to_the_dying, begin(tmp_path, "mortal")):
        assert code == "storage.engine"
        assert "engine 0" in message
        assert "rank 2" not in message


def test_a_worker_that_inherited_world_size_reads_a_checkpoint(tmp_path: Path) -> None:
    model = models.trainer_model()
    models.fill(model, 1)
    holdfast.save(tmp_path / "run", {"model": model}, step=1)
    client = HTTPEngineClient(f"http://127.0.0.1:{begin(tmp_path, 'heir')}")
    publisher = Publisher(StoredWeights(tmp_path / "run"), [client], [1], host="127.0.0.1", timeout_s=60.0)
    report = publisher.publish()
    assert report.received_nbytes == report.needed_nbytes
    (tmp_path / "end").touch()


def test_small_weights_that_no_worker_reads_are_not_sent_with_their_neighbours() -> None:
    weights = {"a": torch.ones(4), "b.unread": torch.ones(8), "c": torch.full((4,), 2.0)}
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(4), requires_grad=False) for name in ("a", "c")})

    def load_weights(given: Weighted) -> None:
        for name, weight in given:
            if name in model:
                model[name].data.copy_(weight)

    client = ThreadedClient([InferenceWorker(ModuleEngine(model, load_weights))])
    report = Publisher(weights, [client], [1], host="127.0.0.1", timeout_s=30.0).publish()
    assert report.unread == ("b.unread",)
    assert report.sent_nbytes == report.distinct_nbytes == 32
    assert [model[name].tolist() for name in ("a", "c")] == [[1.0] * 4, [2.0] * 4]


def test_no_thread_is_left_after_a_publisher_was_refused() -> None:
    refused(engine(2, num_workers=2), num_workers=[3])
    left = [each.name for each in threading.enumerate() if each.name.startswith("holdfast-engine")]
    assert left == []
