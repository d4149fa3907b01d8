"""The status page of an empty store: lines that point an engine at it, in the place of charts. Pure."""

import json
from collections.abc import Mapping, Sequence

from ctxcache.observe.status_page_markup import Html, element

HOST = "HOST"
"""Stands for this machine's name where the store listens on all of its addresses."""
WILDCARDS = ("0.0.0.0:", "[::]:")
GUARDS = ("identities", "tls_certificate", "token_hashes")
"""Settings by which a caller needs more than the address."""


def guide(addresses: Sequence[str], settings: Mapping[str, str]) -> Html:
    """The lines for each engine, with the address that the store listens on."""
    address = reachable(addresses)
    rows = [
        element("div", element("dt", engine), element("dd", element("code", line)))
        for engine, line in lines(address).items()
    ]
    words = ["Nothing is stored, and nobody has asked. The store listens on ", element("code", address)]
    if address.startswith(HOST):
        words.append(f"; {HOST} is this machine's name")
    words.append(". To point an engine at it:")
    guards = [name for name in GUARDS if name in settings]
    more = []
    if guards:
        named = [part for name in guards for part in (element("code", name), ", ")][:-1]
        text = ". Callers need a token or a certificate besides: docs/security.md."
        more.append(element("p", "This store sets ", *named, text, class_="quiet"))
    return element(
        "section",
        element("h2", "Point an engine at it"),
        element("p", *words),
        element("dl", *rows, class_="lines"),
        *more,
        element("p", "More in docs/engines.md, and in each engine's own page.", class_="quiet"),
        class_="card wide",
    )


def reachable(addresses: Sequence[str]) -> str:
    """The first address, as a caller may name it."""
    address = addresses[0]
    wildcard = next((each for each in WILDCARDS if address.startswith(each)), "")
    return f"{HOST}:{address.removeprefix(wildcard)}" if wildcard else address


def lines(address: str) -> dict[str, str]:
    """By engine, the line that has it use the store at this address."""
    connector = {
        "kv_connector": "CtxcacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"target": address},
    }
    second_tier = {
        "type": "plugin",
        "module_path": "ctxcache.engines.lmcache",
        "class_name": "CtxcacheL2",
        "adapter_params": {"target": address, "model_directory": "MODEL"},
    }
    backend = {
        "backend_name": "ctxcache",
        "module_path": "ctxcache.engines.sglang",
        "class_name": "CtxcacheHiCache",
        "interface_v1": 1,
        "target": address,
    }
    return {
        "vLLM": f"vllm serve MODEL --kv-transfer-config '{json.dumps(connector)}'",
        "LMCache": (
            f"lmcache server --l1-size-gb 8 --eviction-policy LRU --l2-adapter '{json.dumps(second_tier)}'"
        ),
        "SGLang": (
            "python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --page-size 64 "
            "--hicache-mem-layout page_first --hicache-storage-backend dynamic "
            f"--hicache-storage-backend-extra-config '{json.dumps(backend)}'"
        ),
        "llama.cpp": f"ctxcache worker llamacpp MODEL.gguf --store {address}",
        "Python": f'import ctxcache; cache = ctxcache.connect("{address}")',
    }
