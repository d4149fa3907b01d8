"""An agent of OpenAI's Agents SDK that compacts in the background, on a real vLLM and a real store.

Run by `make engines`. What the agent sends behind a compaction was computed when it told so; its replies are
those that the server computes from nothing.
"""

import asyncio
import json
from collections.abc import Iterator

import pytest
from agents import RunConfig, Runner

from lab.engines.compacting_agent import Compactor
from lab.engines.vllm_server import NAME, VllmServer
from tests.engines.vllm_ahead_parsed import (
    ANSWER,
    BLOCK,
    MARKS,
    USED,
    Fields,
    passes,
    posted,
    save_model,
    store,
    wait_for_a_pass,
)
from tests.server_process import ServerProcess

__all__ = ["store"]


@pytest.fixture(scope="module")
def server(store: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server with the middleware."""
    place = tmp_path_factory.mktemp("server")
    save_model(place / "tiny")
    settings = {"target": store.target, "model_id": "agents", "timeout_s": 60}
    transfer = {
        "kv_connector": "CtxcacheConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings,
    }  # fmt: skip
    options = (
        *("--no-enable-prefix-caching", "--enable-prompt-tokens-details", "--max-model-len", "2048"),
        *("--chat-template", str(place / "tiny" / "template.jinja"), "--reasoning-parser", "deepseek_r1"),
        *("--structured-outputs-config", json.dumps({"enable_in_reasoning": True})),
        *("--middleware", "ctxcache.engines.vllm.AheadMiddleware"),
    )
    with VllmServer(place / "tiny", place / "log", transfer, *options) as running:
        running.wait_for(USED)
        yield running


def test_a_compacted_history_is_computed_before_it_is_sent(server: VllmServer) -> None:
    """The turn behind a compaction computes its own message; the history grows no more."""
    asyncio.run(_talk(server))


async def _talk(server: VllmServer) -> None:
    form: Fields = {"structured_outputs": {"regex": ANSWER}, "logit_bias": MARKS}
    compactor = Compactor(f"http://127.0.0.1:{server.port}/v1", NAME, **form)
    agent = compactor.agent("agent", instructions="Be brief, and say nothing that was not asked for.")
    session = compactor.session("agent", most_items=5)
    lengths = []
    for number in range(4):
        message = f"And what of number {number}?"
        before = passes(server)
        quiet = RunConfig(tracing_disabled=True)
        done = await Runner.run(agent, message, session=session, run_config=quiet)
        (response,) = done.raw_responses
        lengths.append(response.usage.input_tokens)
        if number:
            cached = response.usage.input_tokens_details.cached_tokens
            assert cached >= response.usage.input_tokens - len(message) - 2 * BLOCK
        fresh = compactor.bodies["agent"] | {"cache_salt": f"s{number}", "session_id": f"fresh-{number}"}
        fresh |= {"kv_transfer_params": {"ends": True}}
        right = json.loads(posted(server, "/v1/responses", fresh))
        (spoken,) = (item for item in right["output"] if item["type"] == "message")
        assert done.final_output == spoken["content"][0]["text"]
        wait_for_a_pass(server, before)
        before = passes(server)
        session.turn_ended()
        await session.settled()
        if len(await session.get_items()) < 3 * (number + 1):
            wait_for_a_pass(server, before)
    # Each turn without a compaction is longer than the one before.
    assert lengths[3] == lengths[2] < lengths[1] + 2 * (lengths[1] - lengths[0])
