"""An agent whose history is compacted in the background, and computed ahead: OpenAI's Agents SDK on vLLM.

    pip install openai-agents
    vllm serve MODEL --middleware ctxcache.engines.vllm.AheadMiddleware --kv-transfer-config ...
    python -m lab.engines.compacting_agent http://127.0.0.1:8000/v1 MODEL

```
   a turn ends ──► the older items are summarized, while nobody waits
               ──► POST /v1/ctxcache/next: the body of the next request, without its new message
               ──► the session has the compacted items
   a turn begins before that ──► it sends the history as it was
```

What the SDK sends is taken from its own requests, by a hook of its HTTP client: instructions, tools and the
conversation's name stand in them. Worst case: a summary that comes too late, and is dropped.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

Item = dict[str, Any]
SUMMARIZE = "Summarize this conversation in a few sentences."
MOST_ITEMS = 8
"""A history of more items is compacted, but for its last turn."""


class CompactedSession:
    """Items of one conversation, in memory, as the SDK's `Session` asks for them. One event loop owns it."""

    session_settings = None

    def __init__(
        self,
        session_id: str,
        compact: Callable[[list[Item]], Awaitable[list[Item]]],
        most_items: int = MOST_ITEMS,
    ) -> None:
        """`compact` makes fewer items of those, and tells the server what will be sent."""
        self.session_id = session_id
        self._compact, self._most_items = compact, most_items
        self._items: list[Item] = []
        self._task: asyncio.Task[None] | None = None

    async def get_items(self, limit: int | None = None) -> list[Item]:
        """The history, or its last items."""
        return list(self._items if limit is None else self._items[-limit:])

    async def add_items(self, items: list[Item]) -> None:
        """A turn has these items."""
        self._items = [*self._items, *items]

    async def pop_item(self) -> Item | None:
        """Take the last one back."""
        if not self._items:
            return None
        last, self._items = self._items[-1], self._items[:-1]
        return last

    async def clear_session(self) -> None:
        """Forget all."""
        self._items = []

    def turn_ended(self) -> None:
        """Compact a long history in the background."""
        if len(self._items) > self._most_items and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._compacted(self._items))

    async def settled(self) -> None:
        """Wait for what runs in the background. Raises what that raised."""
        if self._task is not None:
            await self._task

    async def _compacted(self, items: list[Item]) -> None:
        shorter = await self._compact(items)
        # A turn that came meanwhile was sent with the history as it was, and goes on with it.
        if self._items is items:
            self._items = shorter


class Compactor:
    """Summarizes histories by the model, and tells its server what the agent will send next."""

    def __init__(self, base_url: str, model: str, *, api_key: str = "none", **settings: Any) -> None:
        """`settings`: fields of each request that the SDK does not know, beside the conversation's name."""
        self.bodies: dict[str, Item] = {}
        """The last request of each conversation."""
        http = DefaultAsyncHttpxClient(event_hooks={"request": [self._note]}, timeout=600)
        self.client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http)
        self._model, self._settings = model, settings

    def agent(self, session_id: str, **fields: Any) -> Agent[None]:
        """An agent whose requests name the conversation."""
        named = ModelSettings(temperature=0, extra_body={"session_id": session_id, **self._settings})
        model = OpenAIResponsesModel(self._model, self.client)
        return Agent(name="assistant", model=model, model_settings=named, **fields)

    def session(self, session_id: str, most_items: int = MOST_ITEMS) -> CompactedSession:
        """Where the SDK keeps the conversation's items."""

        async def compact(items: list[Item]) -> list[Item]:
            begin = max(i for i, item in enumerate(items) if item.get("role") == "user")
            older, recent = items[:begin], items[begin:]
            asked: list[Any] = [*older, {"role": "user", "content": SUMMARIZE}]
            # Nobody goes on with a summary: nothing is computed behind it.
            over = {"kv_transfer_params": {"ends": True}}
            said = await self.client.responses.create(
                model=self._model, input=asked, temperature=0, extra_body=self._settings | over
            )
            shorter = [{"role": "user", "content": f"What was said before: {said.output_text}"}, *recent]
            body = {**self.bodies[session_id], "input": shorter, "stream": False}
            await self.client.post("/ctxcache/next", cast_to=object, body=body)
            return shorter

        return CompactedSession(session_id, compact, most_items)

    async def _note(self, request: Any) -> None:
        if request.url.path.endswith("/responses"):
            body = json.loads(request.content)
            # A summary names no conversation.
            if body.get("session_id"):
                self.bodies[body["session_id"]] = body


async def talk(base_url: str, model: str) -> None:
    """A conversation by standard input and output."""
    compactor = Compactor(base_url, model)
    agent, session = compactor.agent("alice", instructions="You are helpful."), compactor.session("alice")
    for line in sys.stdin:
        # Traces would go to OpenAI.
        done = await Runner.run(agent, line, session=session, run_config=RunConfig(tracing_disabled=True))
        sys.stdout.write(f"{done.final_output}\n")
        session.turn_ended()
        # The loop of a real application runs on while its user reads.
        await session.settled()


if __name__ == "__main__":
    asyncio.run(talk(*sys.argv[1:3]))
