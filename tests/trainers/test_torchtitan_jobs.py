"""Jobs of torchtitan's own Trainer with the manager of holdfast: killed, and gone on with on other layouts.

``make test-titan`` runs these. ``torchtitan_on_cpu`` lists what is replaced for want of a GPU. Torchtitan 0.3.0 trains
with pipeline parallelism beside later versions of torch than 2.13 only, so no step is done there: these jobs load into
virtual stages, and save what they loaded.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

import holdfast
from holdfast.data import GlobalOrder
from tests.project.test_guides import example
from tests.project.test_migrating import samples_of
from tests.project.torchrun import TorchrunResult, run_torchrun
from tests.trainers.stored import contents

pytestmark = [pytest.mark.titan, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def job(tmp_path: Path, node_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the job, and a tokenizer for torchtitan to load."""
    shutil.copy(Path(__file__).with_name("torchtitan_job.py"), tmp_path / "train.py")
    write_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def write_tokenizer(folder: Path) -> None:
    folder.mkdir()
    Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))


def train(
    job: Path, ranks: int, run: str, steps: int, *, tp: int = 1, pp: int = 1, again: str = "", **more: int
) -> TorchrunResult:
    last = [again] if again else []
    return run_torchrun(job, ranks, run, *map(str, (steps, more.get("killed", -1), tp, pp)), *last)


def state_in(run: Path) -> dict[str, object]:
    """The newest checkpoint of a run, without random generators, which belong to the ranks of a job."""
    return {name: value for name, value in contents(run).items() if not name.startswith("random")}


def test_a_killed_job_goes_on_bit_for_bit_and_on_any_other_layout(job: Path) -> None:
    assert train(job, 2, "whole", 6).status == 0
    assert train(job, 2, "parts", 6, killed=5).status != 0
    status, lines = train(job, 2, "parts", 6)
    assert status == 0
    assert 4 <= min(samples_of(lines)) <= 5  # the killed job had staged it in the node's memory
    assert contents(job / "parts") == contents(job / "whole")

    expected = state_in(job / "parts")
    assert expected["train_state/ntokens_seen"] == 6 * 12 * 16
    assert sum(name.startswith("optimizer/state/") for name in expected) == 3 * sum(
        name.startswith("model/") for name in expected
    )
    layouts = {"tp": (4, {"tp": 2}), "pp": (4, {"pp": 2}), "three": (3, {}), "one": (1, {})}
    for name, (ranks, parallel) in layouts.items():
        status, lines = train(job, ranks, "parts", 6, again=name, **parallel)
        assert (status, set(lines)) == (0, {f"parts: {parallel.get('pp', 1)}"})
        assert state_in(job / name) == expected, name

    status, lines = train(job, 4, "parts", 8, tp=2)
    assert status == 0
    status, more = train(job, 3, "parts", 10)
    assert status == 0
    batches = iter(GlobalOrder(36, global_batch_size=12, seed=7))
    order = {step: sorted(next(batches)) for step in range(1, 11)}
    assert {step: sorted({*found}) for step, found in samples_of(lines).items()} == {s: order[s] for s in (7, 8)}
    assert {step: sorted(found) for step, found in samples_of(more).items()} == {s: order[s] for s in (9, 10)}
    assert [each.step for each in holdfast.ls(job / "parts")][:3] == [10, 9, 8]
    assert holdfast.open(job / "parts").value("train_state/ntokens_seen") == 10 * 12 * 16


def test_the_loader_of_torchtitan_goes_on_with_as_many_data_parallel_ranks(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADER", "theirs")
    assert train(job, 2, "whole", 6).status == 0
    assert train(job, 2, "parts", 3).status == 0
    assert train(job, 2, "parts", 6).status == 0
    assert state_in(job / "parts") == state_in(job / "whole")
    names = [name for name in state_in(job / "parts") if name.startswith("dataloader/") and "position" in name]
    assert [name.split("/")[1] for name in names] == ["dp_rank_0", "dp_rank_1"]
    assert train(job, 4, "parts", 6, tp=2, again="tp").status == 0
    assert state_in(job / "tp") == state_in(job / "parts")
    assert train(job, 3, "parts", 7).status != 0  # the position belongs to one of two ranks
    assert holdfast.ls(job / "parts")[0].step == 6
    monkeypatch.setenv("EXCLUDED", "dataloader")
    assert train(job, 3, "parts", 7).status == 0
    assert holdfast.ls(job / "parts")[0].step == 7


def test_a_run_begins_with_what_the_manager_of_torchtitan_saved(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as theirs:
        theirs.setenv("MANAGER", "theirs")
        assert train(job, 2, "theirs", 4).status == 0
    assert train(job, 2, "ours", 4).status == 0
    monkeypatch.setenv("INITIAL", str(job / "theirs" / "step-4"))
    status, lines = train(job, 2, "begun", 5)
    assert (status, min(samples_of(lines))) == (0, 5)
    monkeypatch.delenv("INITIAL")
    assert train(job, 2, "ours", 5).status == 0
    assert state_in(job / "begun") == state_in(job / "ours")


def test_a_preempted_job_saves_its_step_and_goes_on(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNALLED", "3")
    status, lines = train(job, 2, "run", 6)
    assert status != 0
    last = max(samples_of(lines))
    assert last in (3, 4)  # ranks may agree one step later
    assert holdfast.ls(job / "run")[0].step == last
    monkeypatch.delenv("SIGNALLED")
    status, lines = train(job, 2, "run", last + 1)
    assert (status, [*samples_of(lines)]) == (0, [last + 1])


def test_the_example_of_the_guide_goes_on_with_other_parallelism(job: Path) -> None:
    script, calls = example(ROOT / "docs/guides/torchtitan.md")
    (job / "train.py").write_text(f"import tests.trainers.torchtitan_on_cpu\n{script}")
    assert len({call.num_ranks for call in calls}) == 2
    for call in calls:
        status, lines = run_torchrun(job, call.num_ranks, *call.arguments)
        assert (status, lines) == (0, call.output)


OPTIONS = """
from tests.trainers import torchtitan_on_cpu
from torchtitan.config.manager import ConfigManager
import sys, types
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from holdfast.trainers.torchtitan_manager import TorchtitanManager
from holdfast.errors import ConfigurationError
import holdfast, json, pytest

def ours():
    config = llama3_debugmodel()
    config.checkpoint = TorchtitanManager.Config(enable=True, keep=holdfast.KeepLast(2), save=holdfast.EverySteps(7))
    return config

registry = types.ModuleType("my_jobs")
registry.ours = ours
sys.modules["my_jobs"] = registry
config = ConfigManager().parse_args(["--module", "my_jobs", "--config", "ours", "--checkpoint.interval", "20"])
assert type(config.checkpoint) is TorchtitanManager.Config, config.checkpoint
assert (config.checkpoint.interval, config.checkpoint.keep) == (20, holdfast.KeepLast(2))
assert "EverySteps" in json.dumps(config.to_dict())
parts = {"dataloader": None, "model_parts": [], "optimizers": None, "lr_schedulers": None, "sd_adapter": None}
for option in ("last_save_model_only", "create_seed_checkpoint"):
    refused = TorchtitanManager.Config(enable=True, **{option: True})
    with pytest.raises(ConfigurationError, match=f"checkpoint.{option} is set") as caught:
        refused.build(states={}, **parts)
    assert caught.value.code == "config.trainer"
assert not TorchtitanManager.Config().build(states={}, **parts).load()
"""


def test_options_come_from_the_command_line_and_those_without_a_place_are_refused() -> None:
    subprocess.run([sys.executable, "-c", OPTIONS], check=True, cwd=ROOT, timeout=120)
