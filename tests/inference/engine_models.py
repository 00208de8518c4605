"""A model as vLLM makes it: fused qkv and gate_up, tensor-parallel parts, parameters that load themselves; and its
trainer's plain counterpart."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast.inference import InferenceWorker

WIDTH, HEADS, KV_HEADS, HEAD, INNER, VOCAB = 16, 4, 2, 4, 24, 10
SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (VOCAB, WIDTH),
    "layers.0.self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
    "layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD, WIDTH),
    "layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD, WIDTH),
    "layers.0.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
    "layers.0.mlp.gate_proj.weight": (INNER, WIDTH),
    "layers.0.mlp.up_proj.weight": (INNER, WIDTH),
    "layers.0.mlp.down_proj.weight": (WIDTH, INNER),
    "rotary.inv_freq": (HEAD,),
    "norm.weight": (WIDTH,),
}


def full(name: str, version: int) -> torch.Tensor:
    """The whole weight of a version; every element differs from those of other weights and versions."""
    seed = sorted(SHAPES).index(name) + 100 * version
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def trainer_model() -> nn.Module:
    """Modules whose parameters have the names of `SHAPES`."""
    root = nn.Module()
    for name, shape in SHAPES.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    return root


def fill(model: nn.Module, version: int) -> None:
    """Set the parameters of a trainer to a version."""
    for name, parameter in model.named_parameters():
        value = full(name, version)
        local: Any = parameter.data
        if isinstance(local, DTensor):
            value = distribute_tensor(value, local.device_mesh, local.placements).to_local()
            local = local.to_local()
        with torch.no_grad():
            local.copy_(value)


class Served(nn.Module):
    """One tensor-parallel worker's model, with vLLM's kinds of loaders: `stacked_params_mapping`, and a `weight_loader`
    on each parameter that narrows the parameter and the weight, and copies."""

    stacked = (
        ("qkv_proj", "q_proj", "q"),
        ("qkv_proj", "k_proj", "k"),
        ("qkv_proj", "v_proj", "v"),
        ("gate_up_proj", "gate_proj", 0),
        ("gate_up_proj", "up_proj", 1),
    )

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        q, kv, inner = HEADS * HEAD // size, KV_HEADS * HEAD // size, INNER // size
        self.sections = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv), 0: (0, inner), 1: (inner, inner)}
        vocab = -(-VOCAB // (2 * size)) * 2  # padded, as vocabularies are
        shapes = {
            "embed_tokens.weight": (vocab, WIDTH, self.vocabulary),
            "layers.0.self_attn.qkv_proj.weight": (q + 2 * kv, WIDTH, self.merged),
            "layers.0.self_attn.o_proj.weight": (WIDTH, q, self.row),
            "layers.0.mlp.gate_up_proj.weight": (2 * inner, WIDTH, self.merged),
            "layers.0.mlp.down_proj.weight": (WIDTH, inner, self.row),
            "norm.weight": (WIDTH, None, self.plain),
        }
        self.params: dict[str, nn.Parameter] = {}
        for name, (rows, columns, loader) in shapes.items():
            extents = (rows,) if columns is None else (rows, columns)
            parameter = nn.Parameter(torch.zeros(extents, dtype=torch.bfloat16), requires_grad=False)
            parameter.weight_loader = loader  # type: ignore[attr-defined]
            self.params[name] = parameter
            self.register_parameter(name.replace(".", "_"), parameter)

    def vocabulary(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        rows = parameter.shape[0]
        start = min(self.rank * rows, VOCAB)
        stop = min(start + rows, VOCAB)
        weight = weight.narrow(0, start, stop - start)
        parameter.data[: weight.shape[0]].copy_(weight)
        parameter.data[weight.shape[0] :].fill_(0)

    def merged(self, parameter: nn.Parameter, weight: torch.Tensor, shard: str | int) -> None:
        offset, size = self.sections[shard]
        weight = weight.narrow(0, self.rank * size, size)
        target = parameter.data.narrow(0, offset, size)
        assert target.shape == weight.shape
        target.copy_(weight)

    def row(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        parameter.data.copy_(weight.chunk(self.size, dim=1)[self.rank])

    def plain(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        parameter.data.copy_(weight)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for given, weight in weights:
            if "rotary" in given:
                continue
            for merged, part, shard in self.stacked:
                if f".{part}." in given:
                    parameter = self.params[given.replace(part, merged)]
                    parameter.weight_loader(parameter, weight, shard)  # type: ignore[attr-defined]
                    break
            else:
                parameter = self.params[given]
                parameter.weight_loader(parameter, weight)  # type: ignore[attr-defined]
        return set(self.params)

    def bits(self) -> dict[str, bytes]:
        return {name: each.data.contiguous().view(torch.uint8).numpy().tobytes() for name, each in self.params.items()}


def loaded(rank: int, size: int, version: int) -> dict[str, bytes]:
    """The bits that a worker has after the stock loading of whole weights of a version; 0: none was loaded."""
    model = Served(rank, size)
    if version:
        model.load_weights((name, full(name, version)) for name in SHAPES)
    return model.bits()


def needed_nbytes(workers: Sequence[tuple[int, int]]) -> int:
    """The bytes of the weights (in fp32) that workers need: all elements that their models hold, less the padding."""
    held = sum(sum(each.numel() for each in Served(rank, size).params.values()) for rank, size in workers)
    padding = sum(
        Served(0, size).params["embed_tokens.weight"].shape[0] * WIDTH for _, size in workers
    ) - VOCAB * WIDTH * len({size for _, size in workers})
    return 4 * (held - padding)


class Server:
    """An engine's HTTP server with the routes of vLLM, in a thread of a worker's process."""

    def __init__(self, worker: InferenceWorker) -> None:
        phases: dict[str, Callable[[dict[str, Any]], object]] = {
            "/init_weight_transfer_engine": lambda body: worker.init(body["init_info"]),
            "/start_weight_update": lambda body: worker.start(),
            "/update_weights": lambda body: worker.update(body["update_info"]),
            "/finish_weight_update": lambda body: worker.finish(),
        }

        class Routes(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    phases[self.path](json.loads(body) if body else {})
                    status, text = 200, "{}"
                except Exception as error:  # noqa: BLE001 - the caller gets it
                    status, text = 500, f"{type(error).__name__}: {error}"
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class FannedClient:
    """The client of an engine of several workers: each call goes to all of them at once, as vLLM's front end does."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports

    def _all(self, route: str, body: dict[str, object] | None = None) -> None:
        failed: list[Exception] = []

        def call(port: int) -> None:
            try:
                data = b"" if body is None else json.dumps(body).encode()
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{route}", data=data, timeout=60).close()
            except Exception as error:  # noqa: BLE001 - raised by the calling thread
                failed.append(error)

        threads = [threading.Thread(target=call, args=(port,)) for port in self._ports]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        self._all("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, object]) -> None:
        self._all("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")
