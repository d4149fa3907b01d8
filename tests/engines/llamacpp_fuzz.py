"""Fuzz of a real llama.cpp by HTTP: whatever a body says, the request is answered, and nothing else changes.

Run by `make engines`; see `hostile` for a long run.
"""

import http.client
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.hostile import COUNT, TEXTS, Hostile
from tests.engines.llamacpp_sessions import HELLO, READY, START_S, Llama, model
from tests.server_process import ServerProcess

__all__ = ["model"]

PATHS = (
    *("/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"),
    *("/infill", "/tokenize", "/detokenize", "/apply-template", "/embedding", "/v1/rerank", "/props"),
    *("/slots/0?action=save", "/%73lots/0?action=restore", "/lora-adapters", "/v1/messages/count_tokens"),
    *("/v1/chat/completions/control", "/chat/completions", "/completions", "/v1/systemone", "/nothing"),
)
LENGTHS = {"n_predict": [0, 1], "max_tokens": [1]}
FIELDS = (
    *("session_id", "id_slot", "lora", "n", "n_cmpl", "cache_prompt", "n_keep", "n_discard", "n_cache_reuse"),
    *("prompt", "messages", "input", "content", "tokens", "system", "model", "stream", "stream_options"),
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "logit_bias", "n_probs", "logprobs"),
    *("grammar", "json_schema", "response_format", "tools", "tool_choice", "chat_template_kwargs"),
    *("samplers", "penalties", "dry_sequence_breakers", "mirostat", "typical_p", "repeat_last_n"),
    *("image_data", "return_progress", "timings_per_token", "response_fields", "ignore_eos", "n_indent"),
    *("reasoning_format", "thinking_budget_tokens", "grammar_triggers", "preserved_tokens", "best_of"),
    *(
        "control_vectors",
        "rope_freq_base",
        "mmproj",
        "speculative.n_max",
        "return_tokens",
        "post_sampling_probs",
    ),
    *("input_prefix", "input_suffix", "input_extra", "id", "action", "query", "documents", "add_special"),
)
PLAUSIBLE: dict[str, dict[str, list[Any]]] = {
    "/completion": {"prompt": ["Hi", [1, 2, 3], ["a"], [[1], [2]], [1, "a"]], **LENGTHS},
    "/v1/chat/completions": {"messages": [HELLO, [{"role": "system", "content": "x"}, *HELLO]], **LENGTHS},
    "/v1/messages": {"messages": [HELLO], **LENGTHS},
    "/v1/responses": {"input": ["Hi"], "max_output_tokens": [1]},
    "/tokenize": {"content": ["Hi"]},
    "/detokenize": {"tokens": [[1, 2]]},
}
DANGEROUS = {
    "grammar": [b'"root ::= %b"' % (b"(" * 50_000), b'"root ::= %b \\"a\\" %b"' % (b"(" * 90, b")" * 90)],
    "json_schema": [b'{"type": "string", "pattern": "^%b$"}' % (b"(" * 9000)],
    "lora": [b'[{"id": 0, "scale": 1.0}]', b'[{"id": -1}]'],
    "id_slot": [b"0", b"1", b"7", b"-2"],
}
OPTIONS = ("--slots", "2", "--ctx-size", "512", "--param", "n_ubatch=64")


class Fuzz:
    """Requests on one connection after another, and what was wrong with their answers."""

    def __init__(self, llama: Llama, seed: int) -> None:
        self.llama, self.hostile = llama, Hostile(seed)
        self.statuses: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self, count: int) -> None:
        """So many requests, or until the server has ended."""
        for _ in range(count):
            # Most of what can go wrong is on the paths that run in a slot of their own.
            path = self.hostile.draw.choice(PATHS if self.hostile.draw.random() < 0.5 else PATHS[:3])
            known = PLAUSIBLE.get(path) or self.hostile.draw.choice(list(PLAUSIBLE.values()))
            self._ask(path, self.hostile.body(known, FIELDS, DANGEROUS))
            if self.llama.process.poll() is not None:
                self.problems.append(f"the server ended: {self.llama.process.returncode}")
                return

    def _ask(self, path: str, body: bytes) -> None:
        headers = {}
        if self.hostile.draw.random() < 0.3:
            name = self.hostile.draw.choice(TEXTS).encode(errors="surrogatepass").decode("latin-1")
            headers["X-Session-ID"] = "".join(letter for letter in name if letter not in "\r\n\0") or "a"
        connection = http.client.HTTPConnection(self.llama.address, timeout=START_S)
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.problems.append(f"{path} {body[:2000]!r}: {error!r}")
            return
        finally:
            connection.close()
        own = b'"type": "ctxcache"' in data
        self.statuses[f"{response.status}{' by the proxy' if own else ''}"] += 1
        # What llama.cpp says is its own; that it says nothing, or that the proxy met an error, is not.
        if own and response.status >= 500:
            self.problems.append(f"{path} {body[:2000]!r}: {data[:500]!r}")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


def test_fuzz_of_bodies_ends_nothing(model: Path, store: ServerProcess, tmp_path: Path) -> None:
    """And a conversation of before goes on afterwards as if nothing had been."""
    with Llama(model, store.target, tmp_path, *OPTIONS) as llama:
        llama.wait_for(READY)
        before = llama.turn(HELLO, "canary")
        fuzz = Fuzz(llama, 1)
        fuzz.run(COUNT)
        sys.stdout.write(f"{sum(fuzz.statuses.values())} bodies: {dict(fuzz.statuses)}\n")
        assert fuzz.problems == [], "\n".join(fuzz.problems[:20])
        assert llama.turn(HELLO, "canary").text == before.text
        assert "Traceback" not in llama.log
        assert llama.end() == 0


PLANTED = """
from gpu_worker.engines.llamacpp import bodies
bodies._check_depth = lambda _read: None
from ctxcache.cli.main import main
main()
"""


def test_fuzz_finds_a_guard_that_is_missing(model: Path, store: ServerProcess, tmp_path: Path) -> None:
    """Without a look at how deep a body is, one of them ends the server."""
    llama = Llama(model, store.target, tmp_path, *OPTIONS, planted=PLANTED)
    with llama:
        llama.wait_for(READY)
        fuzz = Fuzz(llama, 1)
        fuzz.run(5000)
        assert fuzz.problems
