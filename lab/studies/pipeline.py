"""The times of restoring through the pipeline on this machine, and the cost of verifying every row again.

A random model of SmolLM2-135M's shape and its rows in a store of its own; all ways in turn, medians.
Prints one JSON line a way.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.types import Durability
from ctxcache.format.streams import TOKENS, Stream
from gpu_worker.families import Adapter
from gpu_worker.forms.rows import pack_rows
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.lane import Deadline, device_of
from gpu_worker.pipeline.pipeline import Pipeline
from gpu_worker.pipeline.sources import LeasedSource
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.plan import Method, RestorePlan, RestoreSchedule
from lab.demo.embedded_store import EmbeddedStore

SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
}
STORE_BYTES = 1 << 30
METHODS = (Method.KV, Method.HIDDEN)


def _save(client: Client, adapter: Adapter, token_count: int) -> dict[Method, str]:
    spec = model_spec(adapter.model, model_id="pipeline-bench")
    model = client.models.register(spec)
    names = {}
    for method in METHODS:
        streams = [Stream(layer, method.kind) for layer in range(len(adapter.layers))]
        session = client.sessions.create(model, id=method.value, layout=[TOKENS, *streams])
        size = adapter.hidden_size if method is Method.HIDDEN else adapter.row_size
        rows = {TOKENS: np.zeros((token_count, 4), np.uint8)}
        for resolved in (one for one in spec.resolve(streams) if one.stream != TOKENS):
            packed = pack_rows(torch.randn(token_count, size, dtype=adapter.model.dtype), resolved)
            rows[resolved.stream] = np.frombuffer(packed, np.uint8).reshape(token_count, -1)
        names[method] = session.append(rows, durability=Durability.DISK).name
    return names


def _pipelined(pipeline: Pipeline, client: Client, adapter: Adapter, name: str, method: Method) -> float:
    model = CallerModel(model_spec(adapter.model, model_id="pipeline-bench"))
    with client.sessions.open(name, model).read(
        streams=[Stream(i, method.kind) for i in range(len(adapter.layers))]
    ) as rows:
        count = rows.token_count
        target = CacheTarget(adapter, count)
        schedule = RestoreSchedule.of_methods(
            RestorePlan.uniform(method, target.layer_count), count, [0] * target.layer_count
        )
        compute = Modules(adapter, torch.arange(count))
        with pipeline.start(
            schedule, LeasedSource(rows), target, compute, deadline=Deadline.after_s(60)
        ) as restoration:
            restoration.wait_all()
    return restoration.restored_s


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=1024)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=1)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    adapter = adapt(model.eval())
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory(dir="/dev/shm") as arena:
        store = EmbeddedStore(Path(data), Path(arena), size_bytes=STORE_BYTES)
        store.start()
        try:
            target = store.ready.target
            with (
                ctxcache.connect(target, verify="never") as client,
                ctxcache.connect(target) as verifying,
                Pipeline(device_of(adapter.layers[0].device)) as pipeline,
            ):
                names = _save(client, adapter, given.tokens)
                for _ in range(given.rounds):
                    for method in METHODS:
                        name, what = names[method], method.value
                        taken[what, "pipeline"].append(_pipelined(pipeline, client, adapter, name, method))
                        taken[what, "pipeline, verified again"].append(
                            _pipelined(pipeline, verifying, adapter, name, method)
                        )
        finally:
            store.close()
    for (method_name, way), seconds in taken.items():
        print(json.dumps({"rows": method_name, "way": way, "ms": round(statistics.median(seconds) * 1e3, 2)}))


if __name__ == "__main__":
    main()
