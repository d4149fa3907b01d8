"""vLLM's OpenAI server computes an edited conversation ahead of its next request, on a real store.

Run by `make engines`. The template keeps thoughts within a chain of tools and strips them when a user writes,
as templates of thinking models do. Each reply is compared with one that the server computes from nothing:
nobody else has its salt. vLLM's own prefix cache is off, so that what is not computed comes from the store.
"""

import http.client
import itertools
import json
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ctxcache
from lab.engines.families import SHAPE
from lab.engines.vllm_server import CALL_S, NAME, VllmServer, give_tokenizer
from tests.server_process import ServerProcess

BLOCK = 32
KEY = "a-key"
USED = "the context store is used"
WAIT_S = 60.0
_salts = itertools.count()
TEMPLATE = """
{%- set seen = namespace(user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set seen.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set thought = message.reasoning or message.reasoning_content or '' -%}
  {{- {'user': 't3', 'assistant': 't4', 'tool': 't5', 'system': 't6'}[message.role] ~ ' ' -}}
  {%- if thought and loop.index0 > seen.user -%}{{- 't7 ' ~ thought ~ ' t8 ' -}}{%- endif -%}
  {{- message.content ~ ' t9 ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 't4 ' -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The store."""
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


def save_model(directory: Path, context: int = SHAPE["max_position_embeddings"]) -> None:
    """Write a tiny model of this context, with its tokenizer, and the template beside it."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, "max_position_embeddings": context})).save_pretrained(directory)
    give_tokenizer(directory, SHAPE["vocab_size"])
    (directory / "template.jinja").write_text(TEMPLATE)


def served(model: Path, log: Path, store: ServerProcess, *options: str, **settings: object) -> VllmServer:
    """A server with the middleware, which asks for a key. Enter it, then `wait_until_used`."""
    transfer = {
        "kv_connector": "CtxcacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "target": store.target, "model_id": "tiny", "timeout_s": 60, **settings,
        },
    }  # fmt: skip
    return VllmServer(
        model,
        log,
        transfer,
        *("--no-enable-prefix-caching", "--enable-prompt-tokens-details", "--api-key", KEY),
        *("--chat-template", str(model / "template.jinja")),
        *("--middleware", "ctxcache.engines.vllm.AheadMiddleware"),
        *options,
    )


def wait_until_used(server: VllmServer, count: int = 1) -> None:
    """Wait until its log has said so often that it has a store."""
    end_s = time.monotonic() + CALL_S
    while server.log.count(USED) < count:
        assert time.monotonic() < end_s, server.log[-2000:]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(store: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server with the middleware."""
    place = tmp_path_factory.mktemp("server")
    save_model(place / "tiny")
    with served(place / "tiny", place / "log", store) as running:
        wait_until_used(running)
        yield running


def posted(server: VllmServer, path: str, body: dict[str, Any], key: str = KEY) -> tuple[int, str]:
    """Post a body; the answer's status and text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=CALL_S)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        connection.request("POST", path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def chat(server: VllmServer, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The reply: its text, and how many tokens of the prompt were restored. Streams are put together."""
    body = {"model": NAME, "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    status, text = posted(server, "/v1/chat/completions", body | fields)
    assert status == HTTPStatus.OK, text
    if not fields.get("stream"):
        answer = json.loads(text)
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return {"text": answer["choices"][0]["message"]["content"], "cached": cached}
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    parts = [json.loads(line) for line in lines if line != "[DONE]"]
    deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
    return {"text": "".join(delta.get("content") or "" for delta in deltas), "cached": 0}


def expected(server: VllmServer, messages: list[dict[str, Any]]) -> str:
    """The reply computed from nothing, of a conversation that ends with it: nothing is computed behind it."""
    over = {"ends": True}
    answer = chat(server, messages, cache_salt=f"s{next(_salts)}", kv_transfer_params=over)
    assert answer["cached"] == 0
    text: str = answer["text"]
    return text


def rendered(server: VllmServer, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of messages, as the server renders them."""
    status, text = posted(server, "/tokenize", {"model": NAME, "messages": messages})
    assert status == HTTPStatus.OK, text
    tokens: list[int] = json.loads(text)["tokens"]
    return tokens


def words(seed: int, count: int) -> str:
    """A text of so many tokens."""
    return " ".join(f"t{(31 * seed + 7 * i * i) % 480 + 10}" for i in range(count))


def chain(seed: int, result: int = 150) -> list[dict[str, Any]]:
    """A user's question, a thought with a call, and what the tool said: the thought is behind no user."""
    return [
        {"role": "user", "content": words(seed, 40)},
        {"role": "assistant", "content": words(seed + 1, 6), "reasoning_content": words(seed + 2, 20)},
        {"role": "tool", "content": words(seed + 3, result), "tool_call_id": "1"},
    ]


def passes(server: VllmServer, outcome: str) -> float:
    """How many passes ended so."""
    return server.metric(f'vllm:ctxcache_ahead_passes_total{{outcome="{outcome}"}}')


def ahead(server: VllmServer, what: str) -> float:
    """How many tokens of passes were computed, used or wasted."""
    return server.metric(f'vllm:ctxcache_ahead_tokens_total{{what="{what}"}}')


def wait_for_a_pass(server: VllmServer, outcome: str, before: float) -> None:
    """Wait until one more has ended so."""
    end_s = time.monotonic() + WAIT_S
    while passes(server, outcome) <= before:
        assert time.monotonic() < end_s, server.log[-3000:]
        time.sleep(0.05)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_stripped_thoughts_cost_the_next_request_nothing(
    server: VllmServer, store: ServerProcess, *, is_stream: bool
) -> None:
    """All whole blocks of the next prompt but the user's message come from the store; the reply is right."""
    name, messages = f"stripped-{is_stream}", chain(100 + 10 * is_stream)
    before = passes(server, "computed")
    reply = chat(server, messages, session_id=name, stream=is_stream)
    assert reply["text"] == expected(server, messages)
    wait_for_a_pass(server, "computed", before)
    following = [
        *messages,
        {"role": "assistant", "content": reply["text"]},
        {"role": "user", "content": "t11 t12"},
    ]
    stable = len(rendered(server, following)) - 4
    answer = chat(server, following, session_id=name)
    assert answer["cached"] >= stable // BLOCK * BLOCK - BLOCK
    assert answer["text"] == expected(server, following)
    with ctxcache.connect(store.target) as client:
        assert client.sessions.get(f"sessions/{name}").token_count >= stable // BLOCK * BLOCK


def test_where_nothing_is_stripped_nothing_is_computed(server: VllmServer) -> None:
    """A conversation without thoughts goes on where it was."""
    before = passes(server, "nothing to do")
    chat(server, [{"role": "user", "content": words(200, 90)}], session_id="plain")
    wait_for_a_pass(server, "nothing to do", before)


def test_a_client_says_what_it_will_send_next(server: VllmServer) -> None:
    """An agent prunes a tool's result: the request behind that finds its prompt."""
    messages = chain(300)
    before = passes(server, "computed")
    chat(server, messages, session_id="pruned")
    wait_for_a_pass(server, "computed", before)
    pruned = [
        messages[0],
        {"role": "assistant", "content": words(301, 120)},
        {"role": "user", "content": "t20"},
    ]
    before, computed = passes(server, "computed"), ahead(server, "computed")
    fields = {"model": NAME, "messages": pruned, "session_id": "pruned"}
    status, text = posted(server, "/v1/ctxcache/next", fields)
    tokens = len(rendered(server, pruned))
    assert (status, json.loads(text)) == (HTTPStatus.ACCEPTED, {"token_count": tokens})
    wait_for_a_pass(server, "computed", before)
    # The chain's beginning was there, up to a whole block.
    told = ahead(server, "computed") - computed
    assert tokens - 40 - BLOCK <= told <= tokens - 40 + BLOCK
    used, before = ahead(server, "used"), passes(server, "nothing to do")
    answer = chat(server, pruned, session_id="pruned")
    assert answer["cached"] >= (tokens - 1) // BLOCK * BLOCK
    assert answer["text"] == expected(server, pruned)
    wait_for_a_pass(server, "nothing to do", before)
    assert ahead(server, "used") - used == told


def test_who_may_not_ask_the_server_has_nothing_computed(server: VllmServer) -> None:
    """A wrong key is refused as by the server itself; so is a body that is none."""
    fields = {"model": NAME, "messages": chain(400)}
    before = passes(server, "computed")
    assert posted(server, "/v1/ctxcache/next", fields, key="wrong")[0] == HTTPStatus.UNAUTHORIZED
    assert posted(server, "/v1/chat/completions", fields, key="wrong")[0] == HTTPStatus.UNAUTHORIZED
    for wrong in ({"model": NAME}, {"model": NAME, "messages": []}, {"model": NAME, "messages": "x"}):
        assert posted(server, "/v1/ctxcache/next", wrong)[0] == HTTPStatus.BAD_REQUEST
    assert posted(server, "/v1/ctxcache/next", fields | {"model": "none"})[0] == HTTPStatus.NOT_FOUND
    assert passes(server, "computed") == before
