"""vLLM's own OpenAI server in processes of its own, asked by HTTP.

Worst case: it ends, which is a RuntimeError with the end of its log.
"""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lab.engines.vllm_process import END_S, ENVIRONMENT

START_S = 600.0
CALL_S = 120.0
NAME = "tiny"
"""The model's, to callers."""


def give_tokenizer(model: Path, vocabulary: int) -> None:
    """Put a tokenizer beside a model's files: token 7 is `t7`."""
    words = {f"t{token}": token for token in range(vocabulary)}
    backend = Tokenizer(models.WordLevel(vocab=words, unk_token="t0"))  # noqa: S106  a word
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=backend, unk_token="t0").save_pretrained(model)  # noqa: S106


class VllmServer:
    """A running server. A context manager."""

    def __init__(self, model: Path, log: Path, transfer: Mapping[str, Any] | None, *options: str) -> None:
        """`transfer`: its `--kv-transfer-config`, None without a connector. `options`: further words."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._log = log
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", NAME),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024"),
            "--disable-uvicorn-access-log",
            *(() if transfer is None else ("--kv-transfer-config", json.dumps(transfer))),
            *options,
        ]

    @property
    def log(self) -> str:
        """All that it wrote."""
        return self._log.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        """Whether it answers, and its engine too."""
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S)
            connection.request("GET", "/health")
            return self._process.poll() is None and connection.getresponse().status == http.HTTPStatus.OK
        return False

    def wait_for(self, text: str) -> None:
        """Wait until the server has written this."""
        end_s = time.monotonic() + CALL_S
        while text not in self.log:
            if time.monotonic() > end_s:
                raise RuntimeError(f"vLLM does not say {text!r}: {self.log[-4000:]}")
            time.sleep(0.05)

    def __enter__(self) -> Self:
        environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with self._log.open("ab") as log:
            # A group of its own: the engine is a child of the server.
            self._process = subprocess.Popen(  # noqa: S603
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        end_s = time.monotonic() + START_S
        while not self.is_alive:
            if self._process.poll() is not None or time.monotonic() > end_s:
                self._kill()
                raise RuntimeError(f"vLLM does not start: {self.log[-4000:]}")
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            raise TimeoutError(f"vLLM does not end: {self.log[-4000:]}") from None
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def post(
        self, body: bytes, headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Ask for a completion; the answer is still to be read. Close the connection to abort it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S)
        try:
            fields = {"Content-Type": "application/json"} | dict(headers or {})
            connection.request("POST", "/v1/completions", body, fields)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def complete(self, prompt: list[int], count: int, **fields: Any) -> list[int]:
        """The tokens of an answer."""
        connection, response = self.post(json.dumps(body_of(prompt, count) | fields).encode())
        try:
            answer = json.loads(response.read())
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"{response.status}: {answer}")
            tokens: list[int] = answer["choices"][0]["token_ids"]
            return tokens
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return sum(map(float, re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))


def body_of(prompt: list[int], count: int) -> dict[str, Any]:
    """A request for so many tokens behind these."""
    return {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
