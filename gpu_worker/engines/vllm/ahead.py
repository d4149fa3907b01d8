"""Edited conversations, computed ahead in vLLM's OpenAI server: an ASGI middleware.

    vllm serve MODEL --middleware ctxcache.engines.vllm.AheadMiddleware --kv-transfer-config ...

```
   a chat request ends ──► what was asked and said ──► queue
   nobody is served    ──► rendered: as it was computed, and with the next message, of a user or a tool
                           they part before many tokens? one completion of max_tokens=1 for the new rendering
   a request comes     ──► that completion is aborted; what its steps computed stays
```

All of it goes by the server's own API, through the application that is behind this middleware: its renderer,
its authorization with the caller's own headers, its connector, which saves the rows. No template is known by
name: the conversation is rendered with two different next messages, and what both begin with is computed.
Where its effort level or its tools were others of late, it is rendered by those that were the usual ones.
`POST /v1/ctxcache/next` takes the messages that a client will send next, where no rendering
can foresee them: an agent that prunes or compacts.

Responses are passed on as they come, byte by byte. Worst case: a rendering that is not what the client sends,
and the pass was for nothing.
"""

import asyncio
import hashlib
import json
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, NamedTuple

import prometheus_client

from gpu_worker.engines.conversations import (
    CHAT,
    MOST_BODY_BYTES,
    PATHS,
    THOUGHTS,
    WAYS,
    Fields,
    Reply,
    as_sent,
    chat_fields,
    goes_on,
    way_of,
)
from gpu_worker.engines.next_prompts import UsualWays, common_count, ends_with_reply, possible_nexts
from gpu_worker.planning.ahead import GAVE_WAY, AheadCounts, AheadQueue, AheadTally

log = logging.getLogger("vllm.ctxcache")

# Any: messages of ASGI.
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COMPLETIONS, NEXT = "/v1/completions", "/v1/ctxcache/next"
RENDER, TOKENIZE = f"{CHAT}/render", "/tokenize"
MOST_WAITING = 32
LEAST_TOKENS = 64
"""Where fewer differ, the turn computes them as soon as a pass would have begun."""
LOW_PRIORITY = 1000
"""Greater than what callers give: vLLM serves the lowest number first."""
_MOST_HELD = 256
_KEPT_FIELDS = ("model", "session_id", "cache_salt")
_TOKENIZED = (
    *("model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs", "tools", "mm_processor_kwargs", "media_io_kwargs"),
)
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "root_path", "client", "server", "app")

PASSES = prometheus_client.Counter(
    "vllm:ctxcache_ahead_passes", "Conversations that were to be computed ahead, by outcome.", ["outcome"]
)
TOKENS = prometheus_client.Counter(
    "vllm:ctxcache_ahead_tokens", "Tokens computed ahead, and what became of them.", ["what"]
)
WAITING = prometheus_client.Gauge(
    "vllm:ctxcache_ahead_waiting",
    "Conversations that are to be computed ahead, or are computed.",
    multiprocess_mode="livesum",
)


class Asked(NamedTuple):
    """A conversation behind its reply: the request, the reply as its client will send it, and the caller."""

    body: Fields
    reply: Fields | None
    """None where `body` is what the client will send next."""
    scope: Scope
    """The caller's request, to ask as it did."""
    usual: Fields
    """The fields by which the conversation's history is rendered as a rule."""
    prompt_count: int | None
    """Tokens of the prompt, where the reply said it."""
    aborted: asyncio.Event
    """Set where a caller comes while the server is asked."""


class Refused(Exception):
    """The server's answer to one of our own requests: its status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class AheadMiddleware:
    """See the module. One event loop owns it."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._queue: AheadQueue[Asked] = AheadQueue(most_waiting=MOST_WAITING)
        self._tally, self._shown, self._told = AheadTally(), AheadCounts(), AheadCounts()
        self._held: OrderedDict[str, array[int]] = OrderedDict()
        self._usual: UsualWays[Fields] = UsualWays()
        self._served_count = 0
        self._changed = asyncio.Event()
        self._aborted = asyncio.Event()
        """That of the pass that runs."""
        self._worker: asyncio.Task[None] | None = None
        self._has_priorities = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope.get("method") != "POST":
            await self.app(scope, receive, send)
        elif path == NEXT:
            await self._take_next(scope, receive, send)
        elif path in PATHS:
            with self._serving():
                await self._converse(scope, receive, send)
        elif path.endswith("/render") or not path.startswith("/v1/"):
            # It costs the engine nothing.
            await self.app(scope, receive, send)
        else:
            with self._serving():
                await self.app(scope, receive, send)

    # -- what callers ask ----------------------------------------------------------------------------

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """A caller is served: nothing is computed ahead meanwhile."""
        self._served_count += 1
        self._aborted.set()
        try:
            yield
        finally:
            self._served_count -= 1
            self._changed.set()

    async def _converse(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages, data = await _read(receive)
        body = chat_fields(data)
        if body is not None:
            self._queue.turn_begins(_name(body, scope), time.monotonic())
            self._show_waiting()
        reply = Reply()

        async def sent(message: Message) -> None:
            _add(reply, message)
            await send(message)

        await self.app(scope, _replayed(messages, receive), sent)
        said = reply.message()
        if body is not None and said is not None and goes_on(body):
            usual = self._usual.asked(_name(body, scope), way_of(body))
            said = as_sent(said, body["messages"])
            self._offer(Asked(body, said, scope, usual, reply.prompt_count, asyncio.Event()))

    async def _take_next(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, data = await _read(receive)
        body = chat_fields(data)
        if body is None:
            problem = "the body is no JSON object with `messages`, or with `input` of texts, calls and tools"
            await _answer(send, HTTPStatus.BAD_REQUEST, problem)
            return
        asked = Asked(body, None, scope, way_of(body), None, asyncio.Event())
        try:
            # Before it is taken: whoever may not ask the server has nothing computed.
            tokens = await self._stated(asked)
        except Refused as error:
            await _answer(send, error.status, "the server does not render these messages")
            return
        self._offer(asked)
        await _answer(send, HTTPStatus.ACCEPTED, "", token_count=len(tokens))

    def _offer(self, asked: Asked) -> None:
        self._queue.offer(_name(asked.body, asked.scope), asked)
        self._show_waiting()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run())
        self._changed.set()

    # -- ahead ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            pause_s = max(self._queue.due_s() - time.monotonic(), 0.0)
            offer = None if self._served_count else self._queue.take(time.monotonic())
            if offer is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(pause_s, 3600.0) or None)
                continue
            self._aborted = asyncio.Event()
            try:
                outcome = await self._passed(offer.session_id, offer.work._replace(aborted=self._aborted))
            except Refused as error:
                outcome = GAVE_WAY if self._aborted.is_set() else f"refused, {error.status}"
            # The task goes on: one conversation's error is no other's.
            except Exception:
                log.exception("a conversation was not computed ahead")
                outcome = "broken"
            self._queue.ended(outcome, time.monotonic())
            self._show_waiting()
            PASSES.labels(outcome).inc()

    async def _passed(self, name: str, asked: Asked) -> str:
        """Compute what a conversation's next prompt begins with; what came of it, in few words."""
        if asked.reply is None:
            computed, following = list[int](), await self._stated(asked)
        else:
            prompt = await self._rendered(asked, asked.body)
            if asked.prompt_count not in (None, len(prompt)):
                return "rendered otherwise"
            self._account(name, prompt)
            computed = await self._computed(asked, prompt, asked.reply)
            following = await self._following(asked, asked.reply)
        common = common_count(computed, following)
        differing = len(following) - common
        if differing < LEAST_TOKENS or not self._queue.is_worth(differing, differing):
            return "nothing to do"
        found_count = await self._compute(asked, following)
        # Without a reply no rendering shows which tokens were computed before. The server may count them.
        begin = found_count if asked.reply is None else common
        if begin is not None:
            self._tally.held(name, begin, len(following))
            self._held[name] = array("i", following)
            if len(self._held) > _MOST_HELD:
                self._account(self._held.popitem(last=False)[0], ())
        self._show_counts()
        return "computed"

    async def _stated(self, asked: Asked) -> list[int]:
        """The prompt that a client announced; behind a reply, the beginning of the one that follows."""
        *before, last = asked.body["messages"]
        if not ends_with_reply([last]):
            return await self._rendered(asked, asked.body)
        return await self._following(asked._replace(body=asked.body | {"messages": before}), last)

    async def _computed(self, asked: Asked, prompt: list[int], reply: Fields) -> list[int]:
        """The tokens of prompt and reply that the engine has computed, as far as a rendering shows them."""
        # How the model itself wrote its calls, only their parser has seen.
        spoken = {name: value for name, value in reply.items() if name != "tool_calls"}
        open_end = {"add_generation_prompt": False, "continue_final_message": True}
        with suppress(Refused):
            messages = [*asked.body["messages"], spoken]
            rendered = await self._rendered(asked, asked.body | {"messages": messages} | open_end)
            if rendered[: len(prompt)] == prompt:
                return rendered
        return prompt

    async def _following(self, asked: Asked, reply: Fields) -> list[int]:
        """The beginning of the next prompt. Raises Refused."""
        body = {name: value for name, value in asked.body.items() if name not in WAYS} | asked.usual
        first, second = [
            await self._rendered(asked, body | {"messages": [*asked.body["messages"], reply, *following]})
            for following in possible_nexts(reply)
        ]
        return first[: common_count(first, second)]

    def _account(self, name: str, prompt: Sequence[int]) -> None:
        """A conversation is back: count what of its tokens was computed ahead."""
        held = self._held.pop(name, None)
        self._tally.returned(name, 0 if held is None else common_count(held, prompt))
        self._show_counts()

    def _show_waiting(self) -> None:
        WAITING.set(self._queue.unfinished_count)

    def _show_counts(self) -> None:
        shown, self._shown = self._shown, self._tally.counts
        TOKENS.labels("computed").inc(self._shown.computed_token_count - shown.computed_token_count)
        TOKENS.labels("used").inc(self._shown.used_token_count - shown.used_token_count)
        TOKENS.labels("wasted").inc(self._shown.wasted_token_count - shown.wasted_token_count)

    async def _rendered(self, asked: Asked, body: Fields) -> list[int]:
        """Token ids of a chat request's prompt. Raises Refused."""
        plain = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        try:
            answer = await self._asked(RENDER, asked, plain)
        except Refused as error:
            if error.status not in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
                raise
        else:
            return [int(token) for token in answer["token_ids"]]
        # A server without `--enable-scale-out` has this alone, and takes a template's arguments one by one.
        answer = await self._asked(TOKENIZE, asked, _to_tokenize(body))
        return [int(token) for token in answer["tokens"]]

    async def _compute(self, asked: Asked, prompt: list[int]) -> int | None:
        """Have the engine compute a prompt. Returns how many tokens it had, where the server says that.

        Raises Refused, also where a caller came first.
        """
        body = {key: asked.body[key] for key in _KEPT_FIELDS if asked.body.get(key) is not None}
        given, counts = asked.body.get("kv_transfer_params"), self._tally.counts
        kept = given if isinstance(given, dict) else {}
        told = {key: kept[key] for key in ("session_id", "labels") if key in kept}
        told["kv_hints"] = _hint(self._told, counts)
        body |= {"kv_transfer_params": told, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        try:
            usage = (await self._completed(asked, body)).get("usage") or {}
        except Refused:
            # One that is aborted has told its hint as well.
            if asked.aborted.is_set():
                self._told = counts
            raise
        self._told = counts
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    async def _completed(self, asked: Asked, body: Fields) -> Fields:
        if self._has_priorities:
            try:
                return await self._asked(COMPLETIONS, asked, body | {"priority": LOW_PRIORITY})
            except Refused as error:
                # An engine that serves in order of arrival refuses any priority.
                if error.status != HTTPStatus.BAD_REQUEST or asked.aborted.is_set():
                    raise
                self._has_priorities = False
        return await self._asked(COMPLETIONS, asked, body)

    async def _asked(self, path: str, asked: Asked, body: Fields) -> Fields:
        """Ask the server behind this middleware as the caller would. Raises Refused."""
        data = json.dumps(body).encode()
        left = (b"content-length", b"content-type", b"transfer-encoding", b"accept-encoding", b"x-request-id")
        headers = [(name, value) for name, value in asked.scope["headers"] if name.lower() not in left]
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        # A router leaves what it found in a request's scope: ours begins with what any request has.
        scope: Scope = {key: asked.scope[key] for key in _SCOPE if key in asked.scope}
        path = asked.scope.get("root_path", "") + path
        scope.update(path=path, raw_path=path.encode(), query_string=b"", headers=headers, state={})
        parts = iter([{"type": "http.request", "body": data, "more_body": False}])
        status, received = 0, bytearray()

        async def receive() -> Message:
            part = next(parts, None)
            if part is not None:
                return part
            # A caller comes: the engine hears that nobody waits for this any more.
            await asked.aborted.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                received.extend(message.get("body", b""))

        await self.app(scope, receive, send)
        # A request that nobody waits for may have any answer.
        if status != HTTPStatus.OK or asked.aborted.is_set():
            raise Refused(status)
        answer: Fields = json.loads(bytes(received))
        return answer


def _add(reply: Reply, message: Message) -> None:
    """Tell a reply a message of ASGI."""
    if message["type"] == "http.response.start":
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        reply.begin(message["status"], headers.get(b"content-type", b"").decode(errors="replace"))
        return
    reply.add(message.get("body", b""))
    if not message.get("more_body", False):
        reply.end()


async def _read(receive: Receive) -> tuple[list[Message], bytes]:
    """A request's messages as they came, and its body."""
    messages, data = list[Message](), bytearray()
    while True:
        message = await receive()
        messages.append(message)
        data += message.get("body", b"")
        # A body beyond the bound is passed on as it comes.
        if not message.get("more_body", False) or len(data) > MOST_BODY_BYTES:
            return messages, bytes(data)


def _replayed(messages: list[Message], receive: Receive) -> Receive:
    left = iter(messages)

    async def again() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return again


def _to_tokenize(body: Fields) -> Fields:
    """The fields of a chat request on which its prompt depends, as `/tokenize` takes them."""
    told = {key: body[key] for key in _TOKENIZED if body.get(key) is not None}
    # A chat request takes both names of a thought, and a template is given the one.
    told["messages"] = [
        {**message, THOUGHTS[0]: message[THOUGHTS[1]]}
        if message.get(THOUGHTS[1]) and not message.get(THOUGHTS[0])
        else message
        for message in body["messages"]
    ]
    effort = body.get("reasoning_effort")
    if effort is not None:
        given = body.get("chat_template_kwargs") or {}
        of_effort = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        told["chat_template_kwargs"] = of_effort | given
    return told


def _hint(told: AheadCounts, counts: AheadCounts) -> Fields:
    """The hint by which the connector has the store add up what was counted since the last one."""
    payload = {
        "computed_token_count": counts.computed_token_count - told.computed_token_count,
        "used_token_count": counts.used_token_count - told.used_token_count,
        "wasted_token_count": counts.wasted_token_count - told.wasted_token_count,
    }
    action = {"action_id": "", "action_type": "ahead", "action_version": "1", "payload": payload}
    return {"protocol_version": "1", "message_id": "", "actions": [action]}


def _name(body: Mapping[str, Any], scope: Scope) -> str:
    """The conversation's name to its caller; what its messages begin with where it has none."""
    headers = {name.lower(): value for name, value in scope["headers"]}
    given = body.get("kv_transfer_params")
    named = body.get("session_id") or (given.get("session_id") if isinstance(given, dict) else None)
    named = named or headers.get(b"x-session-id", b"").decode(errors="replace")
    if named:
        return f"named {named}"
    beginning = json.dumps(body["messages"][:2], sort_keys=True)
    return hashlib.sha256(beginning.encode(errors="surrogatepass")).hexdigest()


async def _answer(send: Send, status: int, problem: str, **facts: int) -> None:
    fields = {"error": {"message": problem, "code": int(status)}} if problem else facts
    content = json.dumps(fields).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": content})
