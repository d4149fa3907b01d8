"""A real llama.cpp computes edited conversations ahead of their next requests, on a real store.

Run by `make engines`. The template keeps thoughts within a chain of tools and strips them when a user writes,
as templates of thinking models do. Each reply is that of a server that has no store and computes nothing
ahead.
"""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.engines.llamacpp_sessions import ABSENT, READY, START_S, Llama, model, store
from tests.server_process import ServerProcess

__all__ = ["model", "store"]

AHEAD = "is computed ahead"
TEMPLATE = (
    "{%- set seen = namespace(user=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set seen.user = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content and loop.index0 > seen.user -%}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{%- endif -%}"
    "{{ m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
OPTIONS = ("--param", f"chat_template={TEMPLATE}", "--param", "use_jinja=true", "--ahead", "1")
MESSAGE_TOKENS = 40
"""More than a user's message and the marks around it have."""
Message = dict[str, Any]


def chain(subject: str, count: int = 12) -> list[Message]:
    """A question, a thought behind it, and what a tool said."""
    thought = f"They ask about {subject}. " * 5
    result = f"{subject} is liked by many people, for reasons that are told here at length. " * count
    return [
        {"role": "user", "content": f"Tell me about {subject}."},
        {"role": "assistant", "content": "I look.", "reasoning_content": thought},
        {"role": "tool", "content": result},
    ]


def asked(llama: Llama, messages: list[Message], session: str | None, *, is_stream: bool = False) -> Message:
    """The reply's text, tokens of the prompt and those of them that were there."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": 16, "temperature": 0, "stream": is_stream}
    if session is not None:
        body["session_id"] = session
    status, _, data = llama.request("POST", "/v1/chat/completions", body)
    assert status == 200, data
    if is_stream:
        lines = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: ")]
        parts = [json.loads(line) for line in lines if line != b"[DONE]"]
        deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
        return {"text": "".join(delta.get("content") or "" for delta in deltas)}
    answer = json.loads(data)
    usage = answer["usage"]
    return {
        "text": answer["choices"][0]["message"]["content"],
        "there": usage["prompt_tokens_details"]["cached_tokens"],
        "prompt": usage["prompt_tokens"],
    }


def following(messages: list[Message], reply: Message, text: str = "Why?") -> list[Message]:
    """The next request's messages."""
    return [*messages, {"role": "assistant", "content": reply["text"]}, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server without a store, which computes nothing ahead."""
    options = (*OPTIONS[:-1], "0")
    with Llama(model, ABSENT, tmp_path_factory.mktemp("plain"), *options) as llama:
        yield llama


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_stripped_thoughts_cost_the_next_request_nothing(
    model: Path, store: ServerProcess, tmp_path: Path, plain: Llama, *, is_stream: bool
) -> None:
    """Another conversation has had the slot meanwhile; all but the user's message comes back."""
    one, other = chain("Paris"), chain("green tea")
    with Llama(model, store.target, tmp_path, *OPTIONS) as llama:
        llama.wait_for(READY)
        replies = [
            asked(llama, messages, name, is_stream=is_stream) for name, messages in (("a", one), ("b", other))
        ]
        llama.wait_for(AHEAD, 2)
        for name, messages, reply in zip("ab", (one, other), replies, strict=True):
            assert reply["text"] == asked(plain, messages, None)["text"]
            then = asked(llama, following(messages, reply), name)
            assert then["there"] >= then["prompt"] - MESSAGE_TOKENS
            assert then["text"] == asked(plain, following(messages, reply), None)["text"]
        # The state is durable: another process finds it.
        assert llama.end() == 0


def test_a_request_that_comes_waits_for_one_step(
    model: Path, store: ServerProcess, tmp_path: Path, plain: Llama
) -> None:
    """The pass goes on behind it; whoever asks meanwhile, in whatever conversation, is answered rightly."""
    long, short = chain("Paris", 24), chain("green tea", 1)
    with Llama(model, store.target, tmp_path, *OPTIONS) as llama:
        llama.wait_for(READY)
        reply = asked(llama, long, "a")
        assert asked(llama, short, "b")["text"] == asked(plain, short, None)["text"]
        # The user of the long one is back while its pass runs, or waits.
        then = asked(llama, following(long, reply), "a")
        assert then["text"] == asked(plain, following(long, reply), None)["text"]
        answers: list[Message] = []
        threads = [
            threading.Thread(target=lambda name=name: answers.append(asked(llama, short, name)))
            for name in ("c", "d", "a")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(START_S)
        assert {answer["text"] for answer in answers} == {asked(plain, short, None)["text"]}
        assert len(answers) == 3


def test_a_client_says_what_it_will_send(
    model: Path, store: ServerProcess, tmp_path: Path, plain: Llama
) -> None:
    """An agent prunes: the request behind that finds its prompt. What cannot be is refused."""
    messages = chain("Paris")
    pruned = [{"role": "user", "content": "What is said of Paris, in short? " * 8}]
    with Llama(model, store.target, tmp_path, *OPTIONS) as llama:
        llama.wait_for(READY)
        asked(llama, messages, "a")
        llama.wait_for(AHEAD)
        body: dict[str, Any] = {"messages": pruned, "session_id": "a"}
        status, _, data = llama.request("POST", "/v1/ctxcache/next", body)
        assert status == 202, data
        llama.wait_for(AHEAD, 2)
        then = asked(llama, pruned, "a")
        assert json.loads(data) == {"token_count": then["prompt"]}
        assert then["there"] >= then["prompt"] - 1
        assert then["text"] == asked(plain, pruned, None)["text"]
        for wrong, word in (
            ({"messages": pruned}, b"session_id"),
            ({"session_id": "a"}, b"messages"),
            ({"session_id": "a", "messages": []}, b"messages"),
            ({"session_id": "a", "messages": [{"role": 7}]}, b"messages"),
            ([], b"no object"),
        ):
            status, _, data = llama.request("POST", "/v1/ctxcache/next", wrong)
            assert (status, word in data) == (400, True), data
    assert plain.request("POST", "/v1/ctxcache/next", body)[0] == 404


@pytest.mark.parametrize("whose", ["store", "llama.cpp"])
def test_kills_in_a_pass_cost_nothing_but_the_pass(
    model: Path, store: ServerProcess, tmp_path: Path, plain: Llama, whose: str
) -> None:
    """The store has the one state or the other; every reply is right."""
    messages = chain("Paris", 24)
    with Llama(model, store.target, tmp_path, *OPTIONS) as llama:
        llama.wait_for(READY)
        reply = asked(llama, messages, "a")
        if whose == "store":
            store.kill9()
        else:
            llama.process.kill()
    if whose == "store":
        store.start()
    right = asked(plain, following(messages, reply), None)
    with Llama(model, store.target, tmp_path, *OPTIONS) as llama:
        llama.wait_for(READY, 2)
        assert asked(llama, following(messages, reply), "a")["text"] == right["text"]
