"""vLLM's middleware on an application of a few lines: what it asks, what it passes on, when it gives way.

`tests/engines/vllm_ahead.py` runs it in vLLM's own server.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from gpu_worker.engines.conversations import CHAT, MOST_BODY_BYTES, RESPONSES, Reply, chat_fields
from gpu_worker.engines.vllm.ahead import (
    COMPLETIONS,
    NEXT,
    RENDER,
    TOKENIZE,
    AheadMiddleware,
    Message,
    Receive,
    Scope,
    Send,
)
from gpu_worker.planning.ahead import AheadQueue

THOUGHT = "x" * 100
WAIT_S = 10.0


class App:
    """A server that renders letters, strips thoughts when a user writes, and answers as it is told."""

    def __init__(self, *, has_priorities: bool = False) -> None:
        self.has_priorities = has_priorities
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.computed: list[list[int]] = []
        self.abort_count = 0
        self.holds = asyncio.Event()
        self.holds.set()
        self.is_computing = asyncio.Event()
        self.reply: dict[str, Any] = {"content": "answer", "reasoning": THOUGHT}
        self.finish = "stop"
        self.usage: dict[str, Any] = {}
        self.items: list[dict[str, Any]] = [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "answer"}]},
        ]
        self.is_stream, self.renders = False, True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        body = json.loads((await receive())["body"])
        path = scope["path"]
        self.asked.append((path, body))
        if dict(scope["headers"]).get(b"authorization") != b"Bearer key":
            return await self._say(send, 401, {})
        if path in (RENDER, TOKENIZE):
            return await self._say(send, *self._told_tokens(path, body))
        if path == COMPLETIONS:
            if body.get("priority") and not self.has_priorities:
                return await self._say(send, 400, {})
            return await self._compute(body, receive, send)
        if path == RESPONSES:
            response = {"object": "response", "status": "completed", "output": self.items}
            whole = {**response, "usage": self.usage}
            event = {"type": "response.completed", "response": whole}
            return await self._say(send, 200, event if self.is_stream else whole)
        choice = {"index": 0, "message": self.reply, "delta": self.reply, "finish_reason": self.finish}
        return await self._say(send, 200, {"choices": [choice], "usage": self.usage})

    def _told_tokens(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == TOKENIZE:
            return 200, {"tokens": self._tokens(body)}
        return (200, {"token_ids": self._tokens(body)}) if self.renders else (403, {})

    async def _compute(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        self.is_computing.set()
        left = asyncio.ensure_future(receive())
        done = asyncio.ensure_future(self.holds.wait())
        await asyncio.wait([left, done], return_when=asyncio.FIRST_COMPLETED)
        is_aborted = left.done()
        left.cancel()
        done.cancel()
        if is_aborted:
            self.abort_count += 1
            return await self._say(send, 499, {})
        self.computed.append(body["prompt"])
        return await self._say(send, 200, {})

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        if effort := (body.get("chat_template_kwargs") or {}).get("reasoning_effort"):
            body = body | {"reasoning_effort": effort}
        users = [i for i, message in enumerate(body["messages"]) if message["role"] == "user"]
        text = ""
        for i, message in enumerate(body["messages"]):
            thought = message.get("reasoning", "") if i > users[-1] else ""
            content = message.get("content") or ""
            if not isinstance(content, str):
                content = "".join(part["text"] for part in content)
            text += f"<{message['role']}>{thought}{content}"
            for call in message.get("tool_calls", ()):
                text += f"[{call['function']['name']} {call['function']['arguments']}]"
        text = f"<{body.get('reasoning_effort', '')}>{text}" if "reasoning_effort" in body else text
        return [*map(ord, text + ("<assistant>" if body.get("add_generation_prompt", True) else ""))]

    async def _say(self, send: Send, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        kind = b"application/json"
        if self.is_stream and ("choices" in answer or "response" in answer):
            data, kind = b"data: " + data + b"\n\ndata: [DONE]\n\n", b"text/event-stream; charset=utf-8"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        half = len(data) // 2
        await send({"type": "http.response.body", "body": data[:half], "more_body": True})
        await send({"type": "http.response.body", "body": data[half:], "more_body": False})


async def _post(app: AheadMiddleware, body: Any, path: str = CHAT, key: str = "key") -> tuple[int, bytes]:
    """What a caller gets."""
    parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": headers}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def _without_pauses(app: App) -> AheadMiddleware:
    """One that begins a pass as soon as the one before has ended."""
    middleware = AheadMiddleware(app)
    middleware._queue = AheadQueue(share=1.0)
    return middleware


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # nothing tells of what is waited for
            await asyncio.sleep(0)


def _body(text: str = "q" * 90, **fields: Any) -> dict[str, Any]:
    """A chain: the thought stays until the user writes again."""
    chain: list[dict[str, Any]] = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "call", "reasoning": THOUGHT},
        {"role": "tool", "content": "r" * 200},
    ]
    return {"model": "m", "messages": chain, "session_id": "alice", **fields}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("renders", [False, True], ids=["tokenizes", "renders"])
async def test_the_next_rendering_is_computed_once(*, is_stream: bool, renders: bool) -> None:
    """Without thoughts, up to where the user will write; by the conversation's name and the caller's key."""
    app = App()
    app.is_stream, app.renders = is_stream, renders
    middleware = AheadMiddleware(app)
    status, data = await _post(middleware, _body(stream=is_stream))
    direct = App()
    direct.is_stream = is_stream
    assert (status, data) == await _post(AheadMiddleware(direct), _body())
    await _until(lambda: bool(app.computed))
    text = "".join(map(chr, app.computed[0]))
    assert text == f"<user>{'q' * 90}<assistant>call<tool>{'r' * 200}<assistant>answer<user>"
    (_, asked) = next(one for one in reversed(app.asked) if one[0] == COMPLETIONS)
    assert (asked["session_id"], asked["max_tokens"], asked["model"]) == ("alice", 1, "m")
    assert "messages" not in asked


async def test_priorities_are_given_where_the_engine_has_them() -> None:
    """An engine that refuses one is asked without, from then on."""
    for has_priorities in (True, False):
        app = App(has_priorities=has_priorities)
        middleware = _without_pauses(app)
        for number in range(2):
            await _post(middleware, _body(session_id=f"s{number}"))
            await _until(lambda: len(app.computed) == number + 1)  # noqa: B023
        given = [body.get("priority") for path, body in app.asked if path == COMPLETIONS]
        assert [bool(each) for each in given] == ([True] * 2 if has_priorities else [True, False, False])


async def test_a_caller_comes_first() -> None:
    """The pass is aborted at once, and goes on when nobody is served; not for a conversation that is back."""
    app = App()
    middleware = _without_pauses(app)
    app.holds.clear()
    await _post(middleware, _body())
    await _until(app.is_computing.is_set)
    await _post(middleware, _body("other" * 20, session_id="bob"))
    await _until(lambda: app.abort_count == 1)
    app.holds.set()
    await _until(lambda: len(app.computed) == 1)
    await _until(lambda: len(app.computed) == 2)
    beginnings = {"".join(map(chr, prompt[:12])) for prompt in app.computed}
    assert beginnings == {"<user>qqqqqq", "<user>othero"}


@pytest.mark.parametrize(
    "reply",
    [
        {"content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"content": "answer"},
    ],
    ids=["a short call", "nothing is stripped"],
)
async def test_nothing_is_computed_where_nothing_will_differ(reply: dict[str, Any]) -> None:
    """Behind a short call within a chain, and where the next prompt is what was computed."""
    app = App()
    app.reply = reply
    middleware = AheadMiddleware(app)
    body = {"model": "m", "messages": [{"role": "user", "content": "q" * 90}]}
    await _post(middleware, body)
    await _until(lambda: not middleware._queue)
    for _ in range(50):
        await asyncio.sleep(0)
    assert not app.computed


ARGUMENTS = json.dumps({"city": "Oslo" * 30})


def _calling(app: App) -> None:
    """Its reply calls a tool, whose arguments are long."""
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
    app.finish = "tool_calls"
    app.reply = {"content": None, "reasoning": THOUGHT, "tool_calls": [call]}
    app.items = [
        app.items[0],
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": ARGUMENTS},
    ]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_call_is_computed_as_the_template_writes_it(*, path: str, is_stream: bool) -> None:
    """While the tool works: only the parser saw how the model wrote it. The thought stays in the chain."""
    app = App()
    _calling(app)
    app.is_stream = is_stream
    middleware = AheadMiddleware(app)
    question = {"role": "user", "content": "q" * 90}
    body = {"model": "m", "messages" if path == CHAT else "input": [question]}
    await _post(middleware, body, path)
    await _until(lambda: bool(app.computed))
    text = "".join(map(chr, app.computed[0]))
    assert text == f"<user>{'q' * 90}<assistant>{THOUGHT}[f {ARGUMENTS}]<tool>"


def _responses_body(**fields: Any) -> dict[str, Any]:
    """The same chain as that of `_body`, in items."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q" * 90}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r" * 200},
    ]
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    return {
        "model": "m",
        "instructions": "be",
        "input": items,
        "tools": [tool],
        "session_id": "alice",
        **fields,
    }


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("renders", [False, True], ids=["tokenizes", "renders"])
async def test_responses_are_conversations_too(*, is_stream: bool, renders: bool) -> None:
    """Items become the messages of the same prompt; the reply's own count of its tokens is compared."""
    app = App()
    app.is_stream, app.renders = is_stream, renders
    text = f"<system>be<user>{'q' * 90}<assistant>{THOUGHT}[f {{}}]<tool>{'r' * 200}<assistant>"
    app.usage = {"input_tokens": len(text)}
    middleware = _without_pauses(app)
    app.usage = {"input_tokens": len(text) + 1}
    await _post(middleware, _responses_body(stream=is_stream), RESPONSES)
    await _until(lambda: middleware._queue.is_idle)
    assert not app.computed
    app.usage = {"input_tokens": len(text)}
    await _post(middleware, _responses_body(stream=is_stream), RESPONSES)
    await _until(lambda: bool(app.computed))
    text = f"<system>be<user>{'q' * 90}<assistant>[f {{}}]<tool>{'r' * 200}<assistant>answer<user>"
    assert "".join(map(chr, app.computed[0])) == text
    told = next(body for path, body in app.asked if path == (RENDER if renders else TOKENIZE))
    assert told["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]},
        {"input": [{"type": "function_call"}]},
        {"input": 7},
        {"input": [7]},
        {"input": []},
        {"reasoning": 7},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_items_of_other_shapes_are_left_alone(fields: dict[str, Any]) -> None:
    """Their requests are served as without this."""
    assert chat_fields(json.dumps(_responses_body()).encode()) is not None
    assert chat_fields(json.dumps(_responses_body(**fields)).encode()) is None


async def test_a_client_that_sends_no_thoughts_back_is_known() -> None:
    """By its own earlier messages: within a chain the template would keep what it was sent."""
    app = App()
    _calling(app)
    middleware = AheadMiddleware(app)
    body = _body()
    del body["messages"][1]["reasoning"]
    await _post(middleware, body)
    await _until(lambda: bool(app.computed))
    text = "".join(map(chr, app.computed[0]))
    assert text == f"<user>{'q' * 90}<assistant>call<tool>{'r' * 200}<assistant>[f {ARGUMENTS}]<tool>"


@pytest.mark.parametrize("renders", [False, True], ids=["tokenizes", "renders"])
async def test_the_usual_effort_is_rendered(*, renders: bool) -> None:
    """A switch for one question changes the prompt's begin: the next is rendered as the others were."""
    app = App()
    app.renders = renders
    app.reply = {"content": "answer"}
    middleware = _without_pauses(app)
    messages = [{"role": "user", "content": "q" * 90}]
    for effort in ("low", "low"):
        await _post(middleware, _body(messages=messages, reasoning_effort=effort))
        await _until(lambda: middleware._queue.is_idle)
    assert not app.computed
    await _post(middleware, _body(messages=messages, reasoning_effort="high"))
    await _until(lambda: bool(app.computed))
    assert "".join(map(chr, app.computed[0])) == f"<low><user>{'q' * 90}<assistant>answer<user>"


def test_a_call_in_pieces_is_put_together() -> None:
    """Streams send a call's arguments in any pieces, and calls side by side; one that broke off is none."""
    whole = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    deltas: list[dict[str, Any]] = [
        {"reasoning": "so"},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    for finish, expected in (("tool_calls", whole), ("length", None)):
        reply = Reply()
        reply.begin(200, "text/event-stream")
        choices: list[dict[str, Any]] = [
            {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
        ]
        choices.append({"index": 0, "delta": {}, "finish_reason": finish})
        parts: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
        parts.append({"choices": [], "usage": {"prompt_tokens": 7}})
        text = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
        reply.add(text.encode())
        reply.end()
        said = reply.message()
        assert reply.prompt_count == 7
        if expected is None:
            assert said is None
        else:
            assert said == {"role": "assistant", "content": "", "reasoning": "so", "tool_calls": expected}


async def test_what_a_client_will_send_is_computed_for_who_may_ask() -> None:
    """An answer at once; a wrong key and a body that is none are refused."""
    app = App()
    middleware = AheadMiddleware(app)
    body = {"model": "m", "messages": [{"role": "user", "content": "pruned" * 20}]}
    assert (await _post(middleware, body, NEXT, key="wrong"))[0] == 401
    wrongs: list[Any] = [[], {}, {"messages": []}, {"messages": "text"}, "text", None]
    for wrong in wrongs:
        assert (await _post(middleware, wrong, NEXT))[0] == 400
    status, data = await _post(middleware, body, NEXT)
    assert (status, json.loads(data)) == (202, {"token_count": 137})
    await _until(lambda: bool(app.computed))
    assert len(app.computed[0]) == 137


async def test_a_client_may_say_its_history_before_the_next_message() -> None:
    """Whatever that will say: the thought of the last reply goes before it."""
    app = App()
    middleware = AheadMiddleware(app)
    reply = {"role": "assistant", "content": "answer", "reasoning": THOUGHT}
    body = {"model": "m", "messages": [{"role": "user", "content": "pruned" * 20}, reply]}
    status, data = await _post(middleware, body, NEXT)
    await _until(lambda: bool(app.computed))
    text = "".join(map(chr, app.computed[0]))
    assert text == f"<user>{'pruned' * 20}<assistant>answer<user>"
    assert (status, json.loads(data)) == (202, {"token_count": len(text)})


async def test_whatever_is_asked_is_passed_on_as_it_is() -> None:
    """What is no chat, streams that break off, several replies: the server answers, nothing follows."""
    app = App()
    middleware = AheadMiddleware(app)
    bodies: list[Any] = [[], {"messages": [{"role": "user", "content": "x"}], "n": 2}]
    for body in bodies:
        await _post(middleware, body)
    assert [path for path, _ in app.asked] == [CHAT] * 2
    broken = Reply()
    broken.begin(200, "application/json")
    broken.add(b"{")
    assert broken.message() is None
    large = Reply()
    large.begin(200, "application/json")
    large.add(bytes(MOST_BODY_BYTES + 1))
    large.end()
    assert large.message() is None
