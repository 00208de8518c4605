"""Publishing to the real vLLM, on CPUs: its server with two tensor-parallel workers, and a trainer of two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.inference import HTTPEngineClient, Publisher, PublishReport
from tests.support.ranks import RanksFailedError, run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

PROMPT, LENGTH = [5, 6, 7, 8], 8


def build(version: int) -> Any:
    """The model of a version, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(version)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def generated(version: int) -> list[int]:
    """The tokens that the model of a version finds likeliest after the prompt."""
    model, tokens = build(version), list(PROMPT)
    with torch.no_grad():
        for _ in range(LENGTH):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


class Served:
    """A running server of vLLM."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, route: str, body: dict[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    def tokens(self) -> list[int]:
        greedy = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
        form = {"model": "tiny", "return_token_ids": True, "detokenize": False}
        answer = self.ask("v1/completions", {"prompt": PROMPT, **greedy, **form})
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    def version(self) -> str:
        return str(self.ask("weight_info")["weight_version"])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    build(0).save_pretrained(tmp_path / "model")
    port = 18000 + os.getpid() % 1000
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    options = (
        f"--model {tmp_path / 'model'} --served-model-name tiny --port {port} --host 127.0.0.1 "
        "--skip-tokenizer-init --dtype float32 "
        "--enforce-eager --max-model-len 64 --max-num-seqs 2 --tensor-parallel-size 2 --no-enable-prefix-caching"
    )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options.split()]
    command += ["--weight-transfer-config", '{"backend": "holdfast"}']
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True)
    try:
        found = Served(f"http://127.0.0.1:{port}")
        while True:
            try:
                found.ask("get_world_size")
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()[-4000:]
                time.sleep(0.5)
        yield found
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def train(url: str, versions: tuple[int, ...], dies: str) -> list[PublishReport]:
    model: nn.Module = build(0)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    first = dist.get_rank() == 0
    publisher = Publisher(
        model, [HTTPEngineClient(url)] if first else (), (2,) if first else (), host="127.0.0.1", timeout_s=30
    )
    if dies == "transfer" and not first:
        publisher._move = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]
    if dies == "finish":
        publisher._finish = lambda version: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    reports = []
    for version in versions:
        held = dict(build(version).named_parameters())
        for name, parameter in model.named_parameters():
            whole = held[name].detach()
            with torch.no_grad():
                parameter.copy_(
                    torch.distributed.tensor.distribute_tensor(
                        whole,
                        parameter.device_mesh,  # type: ignore[attr-defined]
                        parameter.placements,  # type: ignore[attr-defined]
                    )
                )
        reports.append(publisher.publish(str(version)))
    return reports


def test_vllm_generates_what_the_trainer_does_and_gets_no_byte_more(served: Served) -> None:
    assert served.tokens() == generated(0)
    for reports in run_ranks(2, train, served.url, (1, 2), "", timeout_s=120):
        for report in reports:
            assert report.sent_nbytes == report.distinct_nbytes == 4 * sum(p.numel() for p in build(0).parameters())
            assert report.received_nbytes == report.needed_nbytes
            assert report.unread == ()
    assert (served.tokens(), served.version()) == (generated(2), "2")
    for when in ("transfer", "finish"):
        with pytest.raises(RanksFailedError):
            run_ranks(2, train, served.url, (3,), when, timeout_s=120)
        assert (served.tokens(), served.version()) == (generated(2), "2")
    run_ranks(1, train, served.url, (4,), "", timeout_s=120)
    assert (served.tokens(), served.version()) == (generated(4), "4")
