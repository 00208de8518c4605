"""Errors about names and shapes that differ: few lines, nothing implausible, at most one cause."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import HoldfastError, IncompatibleError
from holdfast.format.near import near, substitution
from holdfast.mapping import Rename
from holdfast.state.differences import grouped
from tests.support.ranks import run_ranks


def model(layers: int = 12, *, width: int = 4) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(width, width) for _ in range(layers))})


def stepped(module: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer = kind(module.parameters(), lr=0.1)  # type: ignore[call-arg]
    torch.stack([parameter.sum() for parameter in module.parameters()]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return optimizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "gpt"
    module = model()
    holdfast.save(path, {"model": module, "optimizer": stepped(module), "progress": {"epoch": 3}}, 1)
    return path


def refused(run: Path, into: dict[str, object]) -> HoldfastError:
    with pytest.raises(HoldfastError) as caught:
        holdfast.load(run, into=into)
    return caught.value


def num_causes(error: BaseException) -> int:
    text = "".join(traceback.format_exception(error))
    return text.count("direct cause of") + text.count("During handling of")


def test_a_slip_of_the_finger_in_a_name_gets_the_right_one(run: Path) -> None:
    module = model()
    error = refused(run, {"model": module, "optimzer": stepped(module), "progress": {"epoch": 3}})
    assert "perhaps renamed (stored -> live):\n    optimizer -> optimzer" in str(error)
    assert len(str(error).splitlines()) <= 6


def test_a_part_that_the_checkpoint_does_not_have_is_left_out_by_select(run: Path) -> None:
    module = model()
    entries = {"model": module, "optimizer": stepped(module), "progress": {"epoch": 3}}
    error = refused(run, entries | {"ema": {"decay": 0.9}})
    assert "The checkpoint has nothing of 'ema'" in error.action
    assert 'select=["model", "optimizer", "progress"]' in error.action
    holdfast.load(run, into=entries | {"ema": {"decay": 0.9}}, select=["model", "optimizer", "progress"])


def test_the_advice_to_select_left_random_generators_out(tmp_path: Path) -> None:
    """A user who followed it went on with other random numbers."""
    state = {"model": model(1), "random": holdfast.RandomState(), "own": holdfast.PerRank({"seen": 1})}
    holdfast.save(tmp_path / "run", state, 1)
    error = refused(tmp_path / "run", state | {"ema": {"decay": 0.9}})
    assert 'select=["model", "own", "random"]' in error.action


def test_two_renames_into_an_engine_get_the_select_that_loads_what_there_is(run: Path) -> None:
    module = model()
    engine = {"model": module, "optimizer": stepped(module), "engine": {"steps": 0}, "scaling": {"scale": 1.0}}
    rules = [Rename("model", "engine/model"), Rename("optimizer", "engine/optimizer"), Rename("progress", "progress")]
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(run, into={"engine": engine, "progress": {"epoch": 0}}, mapping=rules)
    assert "has nothing of 'engine/engine', 'engine/scaling'" in caught.value.action
    assert 'select=["progress", "engine/model", "engine/optimizer"]' in caught.value.action
    chosen = ["progress", "engine/model", "engine/optimizer"]
    holdfast.load(run, into={"engine": engine, "progress": {"epoch": 0}}, mapping=rules, select=chosen)


def test_a_selected_name_with_a_typing_error_was_told_to_select_what_the_state_has_not(run: Path) -> None:
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(run, into={"modle": model()}, select="modle")
    assert "perhaps renamed (stored -> live):\n    model -> modle" in str(caught.value)
    assert "select" not in caught.value.action


def test_flat_names_get_the_rule_that_puts_the_entry_of_the_state_before_them(tmp_path: Path) -> None:
    module = model()
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    error = refused(tmp_path / "weights.pt", {"model": module, "optimizer": stepped(module)})
    rule = 'Rename("{x:**}", "model/{x}")'
    assert f"mapping=[{rule}] puts it there" in error.action
    holdfast.load(tmp_path / "weights.pt", {"model": module}, mapping=[Rename("{x:**}", "model/{x}")])


def test_hyper_parameters_of_another_optimizer_are_not_said_to_be_renamed() -> None:
    ours = ["betas/0", "betas/1", "eps", "amsgrad", "capturable", "decoupled_weight_decay", "foreach", "fused"]
    for name in ("momentum", "dampening", "nesterov"):
        assert near(f"optimizer/param_groups/0/{name}", [f"optimizer/param_groups/0/{key}" for key in ours]) == []


@pytest.mark.parametrize(
    ("stored", "live", "plausible"),
    [
        ("optimizer", "optimzer", True),
        ("model/enc.weight", "model/encoder.weight", True),
        ("model/layers.0.weight", "model/backbone.layers.0.weight", True),
        ("model/tok_emb.weight", "model/tok_emb.wieght", True),
        ("model/layers.3.weight", "model/layers.13.weight", False),
        ("groups/0/eps", "groups/0/momentum", False),
        ("model/enc.layers.3.norm2.weight", "model/tok_emb.weight", False),
    ],
)
def test_near_names_are_plausible(stored: str, live: str, plausible: bool) -> None:
    assert (near(live, [stored]) == [stored]) == plausible
    assert (substitution(stored, live) is not None) == plausible


def test_names_that_differ_in_a_number_are_one_line(run: Path) -> None:
    module = model(40)
    error = refused(run, {"model": module, "progress": {"epoch": 3}})
    assert "    model/layers.{12-39}.weight (28 names)" in str(error)
    assert len(str(error).splitlines()) <= 8
    assert max(map(len, str(error).splitlines())) <= 160


def test_grouping_loses_no_name() -> None:
    assert grouped(["a.1.w", "a.2.w", "a.4.w", "b/x", "b/y", "c"]) == [
        "a.{1,2,4}.w (3 names)",
        "b/{x, y} (2 names)",
        "c",
    ]
    assert grouped(["a.1.b.1", "a.2.b.3"]) == ["a.1.b.1 and 1 more alike"]


def test_shapes_that_differ_alike_are_one_line(run: Path) -> None:
    error = refused(run, {"model": model(width=8), "progress": {"epoch": 3}})
    assert error.code == "incompatible.shape"
    assert "  model/layers.{0-11}.weight (12 names): (8, 8) here, (4, 4) in the checkpoint" in str(error)
    assert len(str(error).splitlines()) <= 5


def test_a_name_that_a_terminal_would_obey_is_escaped_in_its_line(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"evil\x1b[2J\nname": 1, "other": 1}, 1)
    error = refused(tmp_path / "run", {})
    assert "\x1b" not in str(error)
    assert all(line.isprintable() for line in str(error).splitlines())


@pytest.mark.parametrize("path", ["no-such-run", "{run}@step=9", "{run}@9.9"])
def test_an_error_has_at_most_one_cause(run: Path, path: str) -> None:
    with pytest.raises(HoldfastError) as caught:
        holdfast.load(path.format(run=run), into={"model": model()})
    assert num_causes(caught.value) <= 1


def test_an_error_in_one_process_has_no_cause_and_no_news_of_ranks(run: Path) -> None:
    for into in ({"model": model(width=8)}, {"model": model()}):
        error = refused(run, dict(into))
        assert num_causes(error) == 0
        assert "rank 0" not in str(error)


def load_wrong_on_rank_1(run: str) -> int:
    rank = dist.get_rank()
    try:
        holdfast.load(run, into={"model": model(width=4 + 4 * rank)}, select="model")
    except HoldfastError as error:
        return num_causes(error)
    raise AssertionError("it was loaded")


def test_an_error_of_one_rank_has_at_most_one_cause_on_all(run: Path) -> None:
    assert max(run_ranks(2, load_wrong_on_rank_1, str(run))) <= 1


class Unwilling:
    """Fails while it is saved."""

    def state_dict(self) -> dict[str, int]:
        raise KeyError("batch")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("batch")


def save_what_fails_on_all_ranks(run: str) -> int:
    try:
        holdfast.save(f"{run}-of-ranks", {"loader": Unwilling()}, 1)
    except HoldfastError as error:
        return num_causes(error)
    raise AssertionError("it was saved")


def test_an_error_of_all_ranks_has_at_most_one_cause_on_each(run: Path) -> None:
    assert max(run_ranks(2, save_what_fails_on_all_ranks, str(run))) <= 1


def test_a_value_asked_for_as_a_tensor_leads_to_how_to_get_it(run: Path) -> None:
    view = holdfast.open(run)
    for name, call in (("progress/epoch", "value"), ("progress", "value"), ("optimizer", "tree")):
        with pytest.raises(holdfast.NotFoundError) as caught:
            view[name]
        assert f"view.{call}({name!r})" in str(caught.value)
        getattr(view, call)(name)
    assert view.value("progress/epoch") == 3
    with pytest.raises(holdfast.NotFoundError, match=r"Did you mean 'model/layers\.0\.weight'\?"):
        view["model/layers.0.wieght"]


def test_a_load_of_the_model_alone_is_told_to_select_it(run: Path) -> None:
    assert 'select="model"' in refused(run, {"model": model()}).action
    error = refused(run, {"model": model(), "progress": {"epoch": 0}})
    assert 'select=["model", "progress"]' in error.action
    assert "select" not in refused(run, {"modle": model()}).action


def test_a_renamed_container_is_one_guess(run: Path) -> None:
    module = model()
    error = refused(run, {"modle": module, "optimizer": stepped(module), "progress": {"epoch": 3}})
    assert [line.strip() for line in error.details if " -> " in line and "perhaps" not in line] == ["model -> modle"]


def test_a_container_with_quite_another_name_is_one_guess_and_the_names_of_an_optimizer_one_line(run: Path) -> None:
    module = model()
    error = refused(run, {"net": module, "optimizer": stepped(module), "progress": {"epoch": 3}})
    text = str(error)
    assert "perhaps renamed (stored -> live):\n    model -> net" in text
    assert text.count("optimizer (the optimizer state of these parameters: ") == 2
    assert "group_of" not in text
    assert len(text.splitlines()) <= 11


def test_what_an_optimizer_lacks_of_its_own_is_listed(run: Path) -> None:
    module = model()
    optimizer = stepped(module)
    optimizer.param_groups[0]["warmup"] = 3
    error = refused(run, {"model": module, "optimizer": optimizer, "progress": {"epoch": 3}})
    assert "optimizer/param_groups/0/warmup" in str(error)


def test_a_tensor_of_another_shape_is_no_renamed_one(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"q_proj.weight": torch.zeros(4, 4), "k.weight": torch.zeros(4)}, 1)
    into = {"q_proj.lora_A.weight": torch.zeros(2, 4), "kk.weight": torch.zeros(4)}
    error = refused(tmp_path / "run", dict(into))
    assert [line.strip() for line in error.details if " -> " in line and "perhaps" not in line] == [
        "k.weight -> kk.weight"
    ]


def test_letters_that_changed_places_are_near() -> None:
    assert near("gtp", ["gpt"]) == ["gpt"]
    assert near("w12", ["w21"]) == []


@pytest.mark.parametrize("begun", [{}, None])
def test_a_best_state_dict_that_the_live_state_lacks_is_to_be_built_before_the_load(
    tmp_path: Path, begun: object
) -> None:
    model = nn.Linear(2, 3)
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    holdfast.save(tmp_path / "run", {"model": model, "best": best}, 0)
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(tmp_path / "run", {"model": nn.Linear(2, 3), "best": begun})
    assert re.search(r"build (the dict 'best' with its entries before it|that before the load)", str(caught.value))
    built = {name: torch.empty_like(tensor) for name, tensor in best.items()}
    holdfast.load(tmp_path / "run", {"model": nn.Linear(2, 3), "best": built})
    assert all(torch.equal(built[name], best[name]) for name in best)
