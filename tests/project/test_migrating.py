"""The page for those who come from other libraries: its pieces of code run, and its tables name what is there."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import holdfast
from holdfast.data import GlobalOrder
from tests.project.torchrun import run_torchrun
from tests.support.models import start_new_job

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
#: The surroundings of the pieces for Lightning: a model that prints the samples of each step, and a SIGTERM for rank 1
#: of 2 in the step that the script names.
LIGHTNING = """
import os, signal, sys, time, lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import holdfast
from holdfast.data import GlobalOrder
from holdfast.trainers.lightning_trainer import LightningCheckpoint

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch):
        step, rank = self.trainer.global_step, self.trainer.global_rank
        print(f"{step:02} {rank}: {batch[0].int().flatten().tolist()}", flush=True)
        if step == killed and rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch):
        self.log("val_loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)}

num_steps, killed = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
dataset = TensorDataset(torch.arange(24.0)[:, None])
loader, val_loader = DataLoader(dataset, batch_size=6), DataLoader(dataset, batch_size=6)
devices = int(os.environ["LOCAL_WORLD_SIZE"])
options = {"logger": False, "accelerator": "cpu", "devices": devices, "strategy": "ddp" if devices > 1 else "auto"}
options |= {"enable_progress_bar": False, "enable_model_summary": False}
"""
TRANSFORMERS = """
import os, signal, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer as Base, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from holdfast.trainers.transformers_trainer import HoldfastCallback

class Trainer(Base):
    def training_step(self, model, inputs, *more):
        step, rank = self.state.global_step, self.args.process_index
        print(f"{step:02} {rank}: {inputs['input_ids'][:, 0].tolist()}", flush=True)
        if step == killed and rank == self.args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        return super().training_step(model, inputs, *more)

num_steps, killed = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(attention_dropout=0.1, **sizes))
dataset = [{"input_ids": row, "labels": row} for row in torch.arange(24)[:, None].expand(24, 8)]
eval_dataset = dataset[:6]
options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 6}
"""


def pieces(section: str) -> list[str]:
    """The pieces of code in a section of the page."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return re.findall(r"```py\n(.*?)```", text, re.DOTALL)


def with_own_trainer(code: str) -> str:
    """The piece of code with the `Trainer` of `TRANSFORMERS`, which prints and kills, in place of the imported one."""
    return code.replace("import Trainer, TrainingArguments", "import TrainingArguments")


def arguments_in(title: str) -> set[str]:
    """The arguments in the first column of the table of options that begins with this title."""
    table = PAGE.read_text().partition(title)[2].partition("\n\n")[0]
    firsts = re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE)
    return {name for first in firsts for name in re.findall(r"(?:`|Options\(|Planner\()([a-z_0-9]+)[=`]", first)}


def test_every_piece_of_code_on_the_page_is_run_by_a_test() -> None:
    sections = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    number = {"Lightning": 2, "transformers Trainer": 2, "torch.distributed.checkpoint": 2}
    number["Checkpoints that exist already"] = 1
    assert {section: len(pieces(section)) for section in sections if pieces(section)} == number


class StopError(Exception):
    """The end of a job in the middle of its steps."""


def job_in_the_loop(steps: list[int], stop: int) -> dict[str, object]:
    """The names that the loops of the section on DCP find; the job is stopped in step `stop`."""
    start_new_job()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(step: int) -> None:
        if step == stop:
            raise StopError
        steps.append(step)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    names: dict[str, object] = {"model": model, "optimizer": optimizer, "train": train, "num_steps": 11}
    return (
        names
        | {"holdfast": holdfast, "torch": torch, "dcp": dcp, "StateDictOptions": StateDictOptions}
        | {
            "get_state_dict": get_state_dict,
            "set_state_dict": set_state_dict,
        }
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.usefixtures("memory_is_given_back")
def test_the_loops_with_dcp_and_with_holdfast_go_on_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = pieces("torch.distributed.checkpoint")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first, second = list[int](), list[int]()
        with pytest.raises(StopError):
            exec(before, job_in_the_loop(first, 7) | {"newest": None})
        wait_for(Path("checkpoints/4/.metadata").exists)
        exec(before, job_in_the_loop(second, -1) | {"newest": "checkpoints/4"})
        assert (first, second) == ([*range(7)], [*range(5, 11)])
        first, second = list[int](), list[int]()
        with pytest.raises(StopError):
            exec(after, job_in_the_loop(first, 7))
        exec(after, job_in_the_loop(second, -1))
        assert (first, second) == ([*range(7)], [*range(5, 11)])
    finally:
        dist.destroy_process_group()
    assert [checkpoint.step for checkpoint in holdfast.ls("runs/gpt")] == [10, 8, 4]


def test_the_table_of_dcp_names_arguments_that_are_there() -> None:
    calls: list[Callable[..., object]] = [dcp.save, dcp.load, dcp.async_save, StateDictOptions, dcp.DefaultLoadPlanner]
    named = arguments_in("| DCP |") - {"get_state_dict", "set_state_dict"}
    assert len(named) == 14
    assert named <= {name for call in calls for name in inspect.signature(call).parameters}
    assert hasattr(dcp.state_dict_saver.AsyncCheckpointerType, "PROCESS")


def test_a_file_of_torch_save_is_brought_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = pieces("Checkpoints that exist already")

    def job() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = job()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}, "old.pt")
    fresh, other = job()
    exec(code, {"torch": torch, "holdfast": holdfast, "model": fresh, "optimizer": other})
    last, last_optimizer = job()
    assert holdfast.load("runs/new", {"model": last, "optimizer": last_optimizer}).next_step == 8
    assert torch.equal(weight_of(last), weight_of(model))
    assert repr(last_optimizer.state_dict()) == repr(optimizer.state_dict())
    view = holdfast.open("runs/new")
    assert torch.equal(view["model/0.weight"][...], weight_of(model))
    tree = view.tree("model")
    assert isinstance(tree, dict)
    assert tree.keys() == model.state_dict().keys()


def weight_of(model: nn.Sequential) -> Tensor:
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    return linear.weight


def samples_of(lines: list[str]) -> dict[int, list[int]]:
    """The samples of each step, over all ranks, as the lines of a job say: ``04 1: [3, 9]``."""
    found: dict[int, list[int]] = {}
    for line in lines:
        match = re.fullmatch(r"(\d\d) \d: \[(.*)\]", line)
        if match is not None:
            found.setdefault(int(match[1]), []).extend(map(int, match[2].split(", ")))
    return found


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("section", "names", "run"),
    [("Lightning", LIGHTNING, "lightning"), ("transformers Trainer", TRANSFORMERS, "trainer")],
)
def test_a_job_of_a_framework_loses_nothing_to_a_preemption_of_one_rank(
    section: str, names: str, run: str, tmp_path: Path
) -> None:
    before, after = map(with_own_trainer, pieces(section))
    (tmp_path / "today").mkdir()
    (tmp_path / "today" / "train.py").write_text(names + before)
    for _ in range(2):
        assert run_torchrun(tmp_path / "today", 1, "12", "-1").status == 0
    (tmp_path / "train.py").write_text(names + after)
    status, lines = run_torchrun(tmp_path, 2, "40", "5")
    assert status != 0
    first = samples_of(lines)
    num_done = len(first)
    assert 6 <= num_done < 30
    assert holdfast.open(tmp_path / "runs" / run).step == num_done - 1
    status, lines = run_torchrun(tmp_path, 3, str(num_done + 6), "-1")
    assert status == 0
    second = samples_of(lines)
    assert [*second] == [*range(num_done, num_done + 6)]
    if "GlobalOrder" in after:
        batches = iter(GlobalOrder(24, global_batch_size=6, seed=7))
        assert (first | second) == {step: next(batches) for step in range(num_done + 6)}
    samples = [sample for step in range(num_done + 6) for sample in (first | second)[step]]
    for start in range(0, len(samples) - 23, 24):
        assert sorted(samples[start : start + 24]) == [*range(24)]
    assert holdfast.open(tmp_path / "runs" / run).step == num_done + 5


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("section", "names", "old", "changes"),
    [
        ("Lightning", LIGHTNING, "checkpoints/last.ckpt", {"val_loader)\nsys": "val_loader, ckpt_path=old)\nsys"}),
        (
            "transformers Trainer",
            TRANSFORMERS,
            "output/checkpoint-12",
            {"trainer.train()": "trainer.train(old)"},
        ),
    ],
)
def test_a_job_of_a_framework_brings_an_old_checkpoint_along(
    section: str, names: str, old: str, changes: dict[str, str], tmp_path: Path
) -> None:
    before, after = map(with_own_trainer, pieces(section))
    script = tmp_path / "train.py"
    script.write_text(names + before)
    assert run_torchrun(tmp_path, 1, "12", "-1").status == 0
    assert (tmp_path / old).exists()
    once = after
    for found, given in changes.items():
        assert found in after
        once = once.replace(found, given)
    script.write_text(names + f"old = {old!r}\n" + once)
    status, lines = run_torchrun(tmp_path, 1, "16", "-1")
    assert (status, [*samples_of(lines)]) == (0, [12, 13, 14, 15])
    (run,) = (tmp_path / "runs").iterdir()
    assert holdfast.open(run).step == 15
    script.write_text(names + after)
    status, lines = run_torchrun(tmp_path, 1, "18", "-1")
    assert (status, [*samples_of(lines)]) == (0, [16, 17])


@pytest.mark.frameworks
def test_the_tables_of_frameworks_name_arguments_that_are_there() -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from transformers import TrainingArguments

    for title, call, number in (
        ("| `ModelCheckpoint`, `Trainer` |", ModelCheckpoint, 14),
        ("| `TrainingArguments`, `train` |", TrainingArguments, 12),
    ):
        named = arguments_in(title)
        assert len(named) == number
        assert named <= set(inspect.signature(call).parameters)
