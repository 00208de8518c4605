"""Publish weights from a trainer, or from a checkpoint, to inference engines: vLLM, or any with a `load_weights`.

The trainer makes a `Publisher`, each worker of an engine an `InferenceWorker`. vLLM finds such a worker by itself, as
backend ``holdfast`` of its weight transfer (``holdfast.inference.vllm_backend``), where holdfast is installed.
"""

from __future__ import annotations

from holdfast.inference.clients import EngineClient, HTTPEngineClient
from holdfast.inference.needs import EngineNeeds, StagedVersion, discover
from holdfast.inference.publisher import Publisher, PublishReport
from holdfast.inference.weights import PublishedTensor, StoredWeights
from holdfast.inference.worker import EngineModel, InferenceWorker, ModuleEngine

__all__ = [
    "EngineClient",
    "EngineModel",
    "EngineNeeds",
    "HTTPEngineClient",
    "InferenceWorker",
    "ModuleEngine",
    "PublishReport",
    "PublishedTensor",
    "Publisher",
    "StagedVersion",
    "StoredWeights",
    "discover",
]
