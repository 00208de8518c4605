"""A model as Hugging Face's hub has it: its names, its folder, and the training state that it is a part of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

from bench.state import MOMENTS, NUM_LAYERS, VOCABULARY, LlamaLike, State, Tree, content, parameter_shapes, width_for

_LAYER = {
    **{f"attention.w{part}": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"mlp.{part}": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}
_HEAD_WIDTH = 64
NUM_SHARDS = 4


class HubLike(NamedTuple):
    """A recipe for the state of `LlamaLike`, in rows, with the names of transformers; or for its model alone."""

    min_nbytes: int
    model_only: bool = False

    @property
    def width(self) -> int:
        return width_for(self.min_nbytes)

    def build(self, world: int) -> State:
        tree = LlamaLike(self.min_nbytes).build(world).tree
        model, optimizer = (cast("dict[str, Tree]", tree[part]) for part in ("model", "optimizer"))
        named: Tree = {"model": _renamed(model)}
        if not self.model_only:
            named |= {**tree, **named, "optimizer": {slot: _renamed(slots) for slot, slots in optimizer.items()}}
        return State(named)

    def contents(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """By the keys of each tensor in a state of dicts, joined by dots: the path that its `content` follows from, and
        its shape."""
        shapes, found = parameter_shapes(self.width), dict[str, tuple[str, tuple[int, ...]]]()
        for name, shape in shapes.items():
            found[f"model.{hub_name(name)}"] = f"model/{name}", shape
            if not self.model_only:
                for slot in MOMENTS:
                    found[f"optimizer.state.{hub_name(name)}.{slot}"] = f"{slot}/{name}", shape
        return found

    def config(self) -> dict[str, Any]:
        """The arguments for `LlamaConfig`."""
        return {
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "intermediate_size": 4 * self.width,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": self.width // _HEAD_WIDTH,
            "tie_word_embeddings": False,
        }


def hub_name(name: str) -> str:
    """The name that transformers has for a parameter of `LlamaLike`."""
    if name.startswith("layers."):
        _, index, part = name.split(".", 2)
        return f"model.layers.{index}.{_LAYER[part]}"
    return {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "output": "lm_head.weight"}[name]


def _renamed(tensors: Mapping[str, Any]) -> Tree:
    return {hub_name(name): tensor for name, tensor in tensors.items()}


def by_parameter(state: State) -> dict[str, Any]:
    """A state of `HubLike` as `get_state_dict` nests it: the slots of the optimizer below each parameter."""
    model, optimizer = state.tree["model"], cast("dict[str, dict[str, Any]]", state.tree["optimizer"])
    slots = {name: {slot: tensors[name] for slot, tensors in optimizer.items()} for name in cast("Tree", model)}
    return {"model": model, "optimizer": {"state": slots}}


def write_hub(folder: Path, recipe: HubLike) -> None:
    """Write the model as `save_pretrained` does, in a few files."""
    from safetensors.torch import save_file

    folder.mkdir()
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", **recipe.config()}
    (folder / "config.json").write_text(json.dumps(about))
    contents = recipe._replace(model_only=True).contents()
    names, homes, total = list(contents), dict[str, str](), 0
    bounds = [len(names) * part // NUM_SHARDS for part in range(NUM_SHARDS + 1)]
    for number, (low, high) in enumerate(pairwise(bounds), start=1):
        home = f"model-{number:05d}-of-{NUM_SHARDS:05d}.safetensors"
        shard = {name.removeprefix("model."): content(*contents[name]) for name in names[low:high]}
        save_file(shard, folder / home, {"format": "pt"})
        homes |= dict.fromkeys(shard, home)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
