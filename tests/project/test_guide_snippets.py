"""The pieces of code in the guides run. (For those of some pages there are `test_mapping_guide`,
`test_migrating` and `test_observability_guide`.)"""

from __future__ import annotations

import itertools
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, TensorDataset

import holdfast
from holdfast.data import MixedOrder, PackedTokens, ShardedStream, ShardOfDataset
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.models import start_new_job
from tests.support.nursery import run_script
from tests.support.ranks import run_ranks

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
#: Guides whose pieces have a file of tests of their own.
ELSEWHERE = ("accelerate", "foreign", "lightning", "mapping", "observability", "ray", "torchtitan")
Names = dict[str, object]


class Loader:
    """A data loader that knows its place."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class ScheduleFree(torch.optim.SGD):
    """An optimizer that changes parameters when it switches to evaluation."""

    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(7)


def snippets(guide: str) -> list[str]:
    return re.findall(r"```py\n(.*?)```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """The names that the scripts of the guides have when a snippet begins: a state, also as the run runs/gpt."""
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(2, 2)
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    state: Names = {"model": model, "optimizer": optimizer, "epoch": 1, "seen": 3}
    holdfast.save("runs/gpt", state, 5)
    yield {"holdfast": holdfast, "dist": dist, "model": model, "optimizer": optimizer, "state": state}
    dist.destroy_process_group()


def test_a_sampler_goes_on_behind_the_samples_that_were_seen(job: Names) -> None:
    dataset = TensorDataset(torch.arange(10))
    sampler: DistributedSampler[object] = DistributedSampler(dataset, shuffle=False)
    job |= {"itertools": itertools, "DataLoader": DataLoader, "sampler": sampler, "dataset": dataset}
    exec(snippets("ddp")[0], job)
    loader = job["loader"]
    assert isinstance(loader, DataLoader)
    assert torch.cat([batch for (batch,) in loader]).tolist() == [3, 4, 5, 6, 7, 8, 9]


def test_the_state_with_a_loader_and_generators_saves_and_loads(job: Names) -> None:
    job["loader"] = loader = Loader()
    exec(snippets("ddp")[1], job)
    state = job["state"]
    assert isinstance(state, dict)
    loader.position = 4
    holdfast.save("runs/ddp", state, 1)
    loader.position = 0
    holdfast.load("runs/ddp", into=state)
    assert loader.position == 4


def test_a_change_under_the_guard_does_not_reach_the_save_before_it(job: Names) -> None:
    model, state = job["model"], job["state"]
    assert isinstance(model, nn.Module)
    assert isinstance(state, dict)
    before = [parameter.clone() for parameter in model.parameters()]
    with holdfast.Checkpointer("runs/guard", state, memory=None) as checkpointer:
        checkpointer.save(0)
        (code,) = (code for code in snippets("checkpointer") if "guard()" in code)
        exec(code, job | {"checkpointer": checkpointer})
    assert all((parameter == 7).all() for parameter in model.parameters())
    holdfast.load("runs/guard", into=state)
    assert all(map(torch.equal, model.parameters(), before))


def test_a_checkpoint_that_three_jobs_have_resumed_in_vain_is_passed_over(job: Names) -> None:
    state = job["state"]
    assert isinstance(state, dict)
    holdfast.save("runs/gpt", state, 6)
    for _ in range(3):
        holdfast.Checkpointer("runs/gpt", state, memory=None).restore()
        start_new_job()
    (code,) = (code for code in snippets("checkpointer") if "max_resumes" in code)
    exec(code.replace("state,", "state, memory=None,"), job)
    report, checkpointer = job["report"], job["checkpointer"]
    assert isinstance(report, holdfast.RestoreReport)
    assert isinstance(checkpointer, holdfast.Checkpointer)
    assert report.step == 5
    checkpointer.close()


def test_training_may_be_told_to_stop_when_saves_fail(job: Names) -> None:
    (code,) = (code for code in snippets("checkpointer") if "StopAfter" in code)
    for line in code.splitlines():
        checkpointer = eval(line, job | {"run": "runs/stopped"})
        assert isinstance(checkpointer, holdfast.Checkpointer)
        checkpointer.close()


def test_a_fork_goes_on_at_the_step_after_the_checkpoint(job: Names) -> None:
    holdfast.save("runs/gpt", {"model": nn.Linear(2, 2)}, 7)
    (code,) = (code for code in snippets("checkpointer") if "fork=True" in code)
    exec(code.replace("state,", "state, memory=None,"), job)
    checkpointer = job["checkpointer"]
    assert isinstance(checkpointer, holdfast.Checkpointer)
    checkpointer.close()
    assert [row.step for row in holdfast.ls("runs/other-rate")] == [6]
    assert [row.step for row in holdfast.ls("runs/gpt")] == [7, 5]


def test_a_warm_start_with_the_model_alone_happens_once(job: Names) -> None:
    weight = torch.rand(2, 2)
    model = job["model"]
    assert isinstance(model, nn.Linear)
    (code,) = (code for code in snippets("checkpointer") if "runs/fine" in code)
    trained: list[tuple[int, bool]] = []

    def train(step: int) -> None:
        trained.append((step, bool((model.weight == weight).all())))
        with torch.no_grad():
            model.weight.add_(1)

    for num_steps in (2, 3):  # a job, and its restart
        start_new_job()
        with torch.no_grad():
            model.weight.copy_(weight)
        if num_steps == 2:
            holdfast.save("runs/gpt", {"model": model, "optimizer": job["optimizer"]}, 5, takeover=True)
            torch.nn.init.zeros_(model.weight)
            start_new_job()
        own = code.replace("save=holdfast", "memory=None, save=holdfast")
        exec(own, job | {"num_steps": num_steps, "train": train})
    assert trained == [(0, True), (1, False), (2, False)]
    assert torch.equal(model.weight, weight + 1 + 1 + 1)


def test_a_signal_in_the_middle_of_a_step_leads_to_a_save_at_its_end(job: Names) -> None:
    def train(step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with holdfast.Checkpointer("runs/preempted", {"n": 1}, memory=None) as checkpointer:
            names = {"checkpointer": checkpointer, "signal": signal, "train": train, "start": 0, "num_steps": 9}
            exec(snippets("checkpointer")[0], job | names)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert holdfast.open("runs/preempted").step == 3


def test_the_call_with_bandwidths_loads_and_its_report_has_what_the_guide_lists(job: Names) -> None:
    call, _, report = snippets("loading")
    exec(call, job)
    lines = re.findall(r"^(report\.\w+)", report, re.MULTILINE)
    assert len(lines) == 9
    found = {line: eval(line, job) for line in lines}
    assert (found["report.step"], found["report.next_step"]) == (5, 6)
    assert set(found["report.seconds"]) == set(re.findall(r"per phase: (.*)", report)[0].split(", "))


def test_another_learning_rate_is_that_of_the_next_steps() -> None:
    (code,) = (code for code in snippets("loading") if "param_groups" in code)
    for kind in (lambda optimizer: LambdaLR(optimizer, lambda _: 1.0), lambda optimizer: StepLR(optimizer, 100)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = kind(optimizer)
        exec(code, {"optimizer": optimizer, "scheduler": scheduler})
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 3e-4


def test_samples_come_from_datasets_by_their_weights_and_new_weights_hold_from_the_next_round_on(job: Names) -> None:
    mixed, reweighted, _ = snippets("data")
    web, code = TensorDataset(torch.arange(10)), TensorDataset(torch.arange(100, 104))
    job |= {
        "DataLoader": DataLoader,
        "ConcatDataset": ConcatDataset,
        "MixedOrder": MixedOrder,
        "web": web,
        "code": code,
    }
    exec(mixed, job)
    batches = job["batches"]
    assert isinstance(batches, Iterator)
    for num_of_code in (2, 4):
        (batch,) = next(batches)
        assert (len(batch), int((batch >= 100).sum())) == (8, num_of_code)
        exec(reweighted, job)


def test_a_stream_of_packed_tokens_saves_and_loads_its_shards(job: Names) -> None:
    _, _, code = snippets("data")
    job |= {"DataLoader": DataLoader, "ShardedStream": ShardedStream, "ShardOfDataset": ShardOfDataset}
    job |= {"PackedTokens": PackedTokens, "documents": [np.full(number % 9 + 1, number) for number in range(100)]}
    exec(code, job)
    batches, state = job["batches"], job["state"]
    assert isinstance(batches, Iterator)
    assert isinstance(state, dict)
    first = next(batches)
    assert first.shape == (8, 16)
    holdfast.save("runs/stream", state, 1)
    second = next(batches)
    holdfast.load("runs/stream", into=state)
    assert torch.equal(next(batches), second)


def publish_as_the_guide(code: str) -> float:
    lines: list[Callable[[], object]] = [
        lambda: exec(code.splitlines()[0], {"holdfast": holdfast, "trained": served}),
        lambda: exec(code.splitlines()[1], {"holdfast": holdfast, "served": served}),
    ]
    served = nn.Linear(2, 2)
    nn.init.constant_(served.weight, 3.0 - 2 * dist.get_rank())
    lines[dist.get_rank()]()
    return served.weight.sum().item()


def test_trainer_and_inference_ranks_pass_what_they_have() -> None:
    code, *_ = snippets("publishing")
    assert run_ranks(2, publish_as_the_guide, code) == [12.0, 12.0]


def test_a_pinned_checkpoint_is_listed_and_an_unpinned_one_is_removed(
    job: Names, capsys: pytest.CaptureFixture[str]
) -> None:
    state = job["state"]
    assert isinstance(state, dict)
    for step in (8, 9):
        holdfast.save("runs/gpt", state, step)
    (code,) = snippets("retention")
    exec(code, job)
    assert capsys.readouterr().out == "[8]\n"
    assert [checkpoint.step for checkpoint in holdfast.ls("runs/gpt")] == [9, 5]


@pytest.mark.usefixtures("memory_is_given_back")
def test_a_loop_exports_some_of_its_checkpoints(job: Names, capsys: pytest.CaptureFixture[str]) -> None:
    _, code = snippets("reading")
    start_new_job()
    exec(code, job)
    assert "'step-0000001000'" in capsys.readouterr().out
    found = holdfast.open("hub/step-0000001000")
    model = job["model"]
    assert isinstance(model, nn.Linear)
    assert torch.equal(found["weight"][...], model.weight.detach().bfloat16())


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_stock_job_of_dcp_loads_an_exported_training(job: Names) -> None:
    code, _ = snippets("reading")
    saved = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(2)).sum().backward()
    optimizer.step()
    holdfast.save("runs/old", {"model": saved, "optimizer": optimizer, "epoch": 1}, 3)
    holdfast.export("runs/old", "folder", "dcp")
    model = nn.Linear(2, 2)
    names = job | {"dcp": dcp, "model": model, "optimizer": (live := torch.optim.AdamW(model.parameters()))}
    exec(code, names)
    assert torch.equal(model.weight, saved.weight)
    assert torch.equal(live.state[model.weight]["exp_avg"], optimizer.state[saved.weight]["exp_avg"])


def test_a_plain_model_loads_what_stands_at_the_path_of_an_engine(job: Names) -> None:
    saved, model = nn.Linear(2, 2), job["model"]
    assert isinstance(model, nn.Linear)
    engine = {"model": saved, "optimizer": torch.optim.AdamW(saved.parameters()), "engine": {"global_steps": 3}}
    holdfast.save("runs/deepspeed", {"engine": engine, "seen": 24}, 2)
    code = snippets("deepspeed")[0]  # the others need DeepSpeed: `tests/interop/deepspeed_jobs.py` runs them
    exec(code, job | {"optimizer": torch.optim.AdamW(model.parameters())})
    assert torch.equal(model.weight, saved.weight)


def test_every_piece_of_code_in_the_guides_is_run_by_a_test() -> None:
    run = {
        "ddp": 2,
        "checkpointer": 8,
        "data": 3,
        "deepspeed": 3,
        "matrix": 2,  # `tests/jobs/test_matrix.py`
        "loading": 3,
        "policies": 3,
        "publishing": 3,  # the second: tests/inference/test_publisher.py
        "reading": 2,
        "retention": 1,
    }
    for guide in GUIDES.glob("*.md"):
        if guide.stem not in ELSEWHERE:
            assert len(snippets(guide.stem)) == run.get(guide.stem, 0), guide.name
        text = re.sub(r"```.*?```", "", guide.read_text(), flags=re.DOTALL)
        assert re.search(r"\n\n    \S", text) is None, f"fence the indented code of {guide.name}"


@pytest.mark.usefixtures("memory_is_given_back")
def test_a_restarted_job_goes_on_to_keep_the_best_beside_the_run_that_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loop, look = (code for code in snippets("checkpointer") if "runs/best" in code)
    losses = [3.0, 2.0, 5.0, 4.0, 6.0, 1.0, 7.0]
    steps = {}
    for num_steps in (4, 7):  # a job, and its restart
        start_new_job()
        model = nn.Linear(2, 2)
        optimizer = ScheduleFree(model.parameters(), lr=0.1)
        progress = {"best": float("inf"), "steps": 0}
        state = {"model": model, "optimizer": optimizer, "progress": progress}

        def train(progress: dict[str, float] = progress) -> None:
            progress["steps"] += 1

        def validate(progress: dict[str, float] = progress) -> float:
            return losses[int(progress["steps"]) - 1]

        names = {"holdfast": holdfast, "state": state, "progress": progress, "num_steps": num_steps}
        exec(loop, names | {"train": train, "validate": validate})
        exec(look, names)
        assert capsys.readouterr().out == {4: "step 1 has a loss of 2.0\n", 7: "step 5 has a loss of 1.0\n"}[num_steps]
        run = Run.open(open_store(Location(str(tmp_path / "runs" / "best"))))
        steps[num_steps] = [commit.step for commit in run.lineage()]
    assert steps == {4: [1, 0], 7: [5, 1, 0]}
    assert holdfast.open("runs/last").step == 6
    assert holdfast.open("runs/best@step=0").metrics == {"loss": 3.0}


class Metadata(BaseHTTPRequestHandler):
    """A metadata server that announces a preemption from the third question on."""

    num_asked = 0

    def do_GET(self) -> None:
        Metadata.num_asked += 1
        assert self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"TRUE" if Metadata.num_asked > 2 else b"FALSE")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is that of the base class
        """Print nothing."""


class ServedLinear(nn.Linear):
    """A model of an engine with the parameters of a Linear."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)


def test_an_engine_of_ones_own_shows_what_was_published(job: Names) -> None:
    model, left, right = job["model"], ServedLinear(2, 2), ServedLinear(2, 2)
    assert isinstance(model, nn.Linear)
    (code,) = (code for code in snippets("publishing") if "OwnEngine" in code)
    exec(code, job | {"left": left, "right": right})
    for served in (left, right):
        assert torch.equal(served.weight, model.weight)
        assert torch.equal(served.bias, model.bias)


def test_a_cloud_announces_a_preemption_and_an_evaluation_is_broken_off(job: Names) -> None:
    notice, evaluation, _ = snippets("policies")
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        names: Names = {"holdfast": holdfast, "urllib": urllib}
        exec(notice.replace("metadata.google.internal", f"127.0.0.1:{server.server_port}"), names)
        policy = names["policy"]
        assert isinstance(policy, holdfast.OnPreemption)
        policy = replace(policy, poll_s=0.01)
        start_new_job()
        with holdfast.Checkpointer("runs/gpt", {"epoch": 1}, memory=None, save=policy, takeover=True) as own:
            seen: list[int] = []

            def evaluate(batch: int, seen: list[int] = seen) -> None:
                seen.append(batch)
                time.sleep(0.005)

            names |= {"checkpointer": own, "batches": range(10_000), "evaluate": evaluate}
            exec(evaluation, names)
            assert own.step(0) is not None
            assert own.preempted
        server.shutdown()
    assert len(seen) < 10_000
    assert own.exit_code == 75


TORCHRUN_STOPS_IT = """
import os, signal, sys
from pathlib import Path
import holdfast

class Slow(type(Path())):
    def touch(self):
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun, when another rank has ended
        super().touch()

def train(step):
    if step == 2:
        os.kill(os.getpid(), signal.SIGTERM)

os.chdir(sys.argv[2])
names = {"holdfast": holdfast, "policy": holdfast.OnPreemption(), "state": {"n": 1}, "sys": sys, "Path": Slow}
exec(sys.argv[1], names | {"num_steps": 9, "train": train, "rank": 0})
"""


def test_the_file_that_asks_for_a_requeue_is_written_although_torchrun_stops_slower_ranks(
    tmp_path: Path,
) -> None:
    *_, code = snippets("policies")
    code = code.replace("save=policy", "memory=None, save=policy")
    ended = run_script(TORCHRUN_STOPS_IT, code, str(tmp_path))
    assert ended.status == 75, ended.err
    assert (tmp_path / "preempted").exists()
