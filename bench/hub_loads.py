"""Those that load a folder of Hugging Face onto a model of FSDP2, on several ranks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from bench.contenders import Raw, Registry, why_absent
from bench.hub import HubLike, write_hub
from bench.runner import Job
from bench.save_load import Loads
from bench.schema import OURS
from bench.state import as_bytes, digest, local
from bench.ways import Site, Way
from holdfast.mapping import Rename

_LLAMA = "transformers.models.llama.modeling_llama"


class HubWay(Way):
    """Makes a model of FSDP2 of the folder of a whole one. Without a package there is no model."""

    package = "transformers"

    def __init__(self, site: Site, entrant: str) -> None:
        super().__init__(site, entrant)
        self._llama = import_module(_LLAMA)
        self._config = import_module(self.package).LlamaConfig(**cast("HubLike", site.recipe).config())
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._model: nn.Module | None = None

    def place(self, what: object) -> Path:
        return hub_folder(self.site)

    @property
    def memory(self) -> Self:
        return self

    def clear(self) -> None:
        self._model = None

    def digests(self) -> dict[str, str]:
        """Those of what this rank has of the model; before the first load, of what it is to have."""
        if self._model is None:
            return self.state.digests()
        tensors = ((name, local(tensor)) for name, tensor in self._model.named_parameters())
        return {f"model/{name}": digest(as_bytes(tensor)) for name, tensor in tensors}

    def _on_meta(self) -> Any:
        """A model without memory, but for what no checkpoint has."""
        with torch.device("meta"):
            model = self._llama.LlamaForCausalLM(self._config)
        self._add_tables(model)
        return model

    def _add_tables(self, model: Any) -> None:
        model.model.rotary_emb = self._llama.LlamaRotaryEmbedding(self._config)

    def _sharded(self, model: Any) -> nn.Module:
        for layer in model.model.layers:
            fully_shard(layer, mesh=self._mesh)
        sharded: nn.Module = fully_shard(model, mesh=self._mesh)
        return sharded


class FromPretrained(HubWay):
    """Every rank loads the whole model and keeps its shards."""

    name = "from_pretrained + fully_shard"

    def load(self, folder: Path) -> None:
        self._model = self._sharded(self._llama.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))


class DcpHub(HubWay):
    """torch.distributed.checkpoint.load with its reader of Hugging Face's folders."""

    name = "dcp"

    def load(self, folder: Path) -> None:
        self._model = self._sharded(self._on_meta())
        self._model.to_empty(device="cpu")
        self._add_tables(self._model)
        dcp_load(self._model.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder)))


class HoldfastHub(HubWay):
    """holdfast.load, defaults."""

    name = OURS

    def load(self, folder: Path) -> None:
        self._model = self._sharded(self._on_meta())
        holdfast.load(folder, {"model": self._model}, mapping=[Rename("{x:**}", "model/{x}")])


HUB_LOADING: Registry = {kind.name: kind for kind in (Raw, FromPretrained, DcpHub, HoldfastHub)}
STOCK = FromPretrained.name


class HubLoads(Loads):
    """Every contender loads one folder of Hugging Face."""

    def __init__(self, job: Job, site: Site) -> None:
        super().__init__(job, site)
        if self.leads and not why_absent(HubWay.package):
            write_hub(hub_folder(site), cast("HubLike", site.recipe))
        dist.barrier()


def hub_folder(site: Site) -> Path:
    return site.folder / "hub"
