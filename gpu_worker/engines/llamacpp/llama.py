"""llama.cpp's own server in this process, its slots, and what their bytes depend on."""

import hashlib
import http.client
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xllamacpp

from ctxcache.client import BlockSpace, Client
from ctxcache.errors import InvalidArgument
from gpu_worker.engines.llamacpp import LlamaSettings

OWNED = ("model", "port", "hostnames", "slot_save_path", "api_keys", "n_parallel", "n_ctx")
"""Parameters of llama.cpp that are set here."""
NEUTRAL = {"port", "slot_save_path", "n_parallel", "n_ctx", "n_threads_http", "n_predict", "model_alias"} | {
    "verbosity", "warmup", "n_gpu_layers", "n_batch", "n_ubatch", "load_mode", "endpoint_metrics",
}  # fmt: skip
"""Parameters that a slot's bytes do not depend on; n_ctx counts as a slot's share of it."""
CALL_TIMEOUT_S = 60.0


class LlamaServer:
    """llama.cpp's own server on a port of this host that only the proxy knows. Raises RuntimeError."""

    def __init__(self, settings: LlamaSettings, directory: Path) -> None:
        self.directory = directory
        self._files = [path.open("rb") for path in model_files(settings.model)]
        self._stats = [os.fstat(file.fileno()) for file in self._files]
        parameters = common_parameters(settings)
        parameters.model.path = str(settings.model)
        parameters.hostnames, parameters.port = ["127.0.0.1"], 0
        parameters.n_parallel, parameters.n_ctx = settings.slot_count, settings.context_tokens
        parameters.slot_save_path = f"{directory}/"
        parameters.endpoint_slots = True
        # The store is what keeps conversations that have no slot.
        parameters.cache_ram_mib, parameters.cache_idle_slots = 0, False
        self._server = xllamacpp.Server(parameters)
        address = urlsplit(self._server.listening_address)
        if address.hostname is None or address.port is None:
            raise RuntimeError(f"llama.cpp does not listen: {self._server.listening_address}")
        self.address = address.hostname, address.port
        scalars = {name: getattr(parameters, name) for name in dir(parameters) if name not in NEUTRAL}
        self._facts = {
            "llama.cpp": [xllamacpp.__version__, xllamacpp.BUILD_INFO],
            "slot_tokens": self.call("GET", "/props")["default_generation_settings"]["n_ctx"],
            "parameters": {
                name: value for name, value in scalars.items() if isinstance(value, bool | int | float | str)
            },
        }

    def space(self, client: Client) -> BlockSpace:
        """Where slots are looked for: what their bytes depend on is in it. Asks the store once."""
        digest = hashlib.sha256(json.dumps(self._facts, sort_keys=True, default=str).encode())
        for file, before in zip(self._files, self._stats, strict=True):
            file.seek(0)
            digest.update(hashlib.file_digest(file, "sha256").digest())
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise ValueError(f"{file.name} changed after llama.cpp had loaded it")
        space = BlockSpace(digest.digest(), layout_tag="llama.cpp slot")
        client.blocks.look_up(space, [digest.digest()])
        return space

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """One of llama.cpp's own operations. Raises LlamaRefused, OSError."""
        connection = http.client.HTTPConnection(*self.address, timeout=CALL_TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except http.client.HTTPException as error:
            raise LlamaRefused(repr(error)) from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise LlamaRefused(text.decode(errors="replace"))
        found: dict[str, Any] = json.loads(text)
        return found

    def slot(self, number: int, action: str, file: Path | None = None) -> dict[str, Any]:
        """Save, restore or erase a slot. Raises LlamaRefused, OSError."""
        body = {} if file is None else {"filename": file.name}
        return self.call("POST", f"/slots/{number}?action={action}", body)


class LlamaRefused(Exception):
    """llama.cpp answered with an error; the message is its own."""


def model_files(model: Path) -> list[Path]:
    """The files of a model: one, or all shards. Raises InvalidArgument."""
    shard = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", model.name)
    files = sorted(model.parent.glob(f"{shard[1]}-*-of-{shard[2]}.gguf")) if shard else [model]
    if not files or not all(file.is_file() for file in files):
        raise InvalidArgument(field="model", problem=f"{model} is no file")
    return files


def common_parameters(settings: LlamaSettings) -> Any:
    """Parameters of xllamacpp with those that the user gave. Raises InvalidArgument."""
    parameters = xllamacpp.CommonParams()
    for name, text in settings.parameters.items():
        *outer, field = name.split(".")
        place, value = parameters, None
        with suppress(AttributeError):
            for part in outer:
                place = getattr(place, part)
            value = getattr(place, field)
        if name.partition(".")[0] in OWNED or not isinstance(value, bool | int | float | str):
            raise InvalidArgument(field=f"param {name}", problem="is not a parameter that may be set")
        try:
            given = {"true": True, "false": False}[text] if isinstance(value, bool) else type(value)(text)
            setattr(place, field, given)
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            kind = type(value).__name__
            raise InvalidArgument(field=f"param {name}", problem=f"{text!r} is no {kind}") from error
    return parameters
