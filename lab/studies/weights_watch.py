#!/usr/bin/env python3
"""The cost of a sample of a model's weights: `.venv/bin/python -m lab.studies.weights_watch`.

A model of 32 layers, 291 parameters; the cost goes by their number and not by their size.
"""

import argparse
import json
import statistics
import time

from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.model.weights import WeightsWatch


def main() -> int:
    """Print the median, the 99th percentile and the number of parameters, as JSON."""
    parser = argparse.ArgumentParser(prog="lab.studies.weights_watch", description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1000)
    options = parser.parse_args()
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_hidden_layers=options.layers,
        vocab_size=1000,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    watch = WeightsWatch(model)
    took_s = []
    for _ in range(options.rounds):
        begun_s = time.perf_counter()
        if not watch.sample().is_equal():
            raise RuntimeError("a sample of weights that nobody changed differs")
        took_s.append(time.perf_counter() - begun_s)
    figures = {
        "parameters": sum(1 for _ in model.parameters()),
        "median_ms": round(statistics.median(took_s) * 1e3, 3),
        "p99_ms": round(statistics.quantiles(took_s, n=100)[98] * 1e3, 3),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
