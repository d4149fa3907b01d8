"""Conversations told by messages: rendered, answered and computed ahead by an engine that knows a tokenizer.

Every reply is that of the same model without a cache, to the prompt that the template makes of the messages.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer, save_llama
from documents import ROOT, aimed_at, blocks
from server_process import ServerProcess
from test_chat_templates import CALL, FIRST, NEXT, RESULT, SHAPES
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ctxcache.client import Client
from gpu_worker.engines.ahead import Ahead
from gpu_worker.engines.next_prompts import UsualWays, possible_nexts
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_chat import Chat, ChatTurn
from gpu_worker.families.generation import continue_greedy
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan

WAIT_S = 60.0
REPLY_TOKENS = 40
# Strips thoughts before the last message of a user, and says the effort level at the begin.
EFFORT = "{{ 'effort: ' + (effort or 'low') + '\n' }}" + SHAPES["chatml"].template
Message = dict[str, Any]


@cache
def reference() -> PreTrainedModel:
    """The engine's model once more, of which no engine knows: it answers beside passes ahead."""
    with TemporaryDirectory() as directory:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(save_llama(Path(directory)))
        return model


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A model whose tokens are bytes."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        save_llama(tmp_path_factory.mktemp("bytewise"))
    )
    return model


@pytest.fixture
def engine(client: Client, bytewise: PreTrainedModel) -> Iterator[TransformersEngine]:
    """An engine on a store that has nothing."""
    for session in client.sessions.list():
        client.sessions.open(session.name).delete()
    own = model_spec(bytewise, model_id="bytewise")
    plan = RestorePlan.uniform(Method.KV, own.layer_count)
    with TransformersEngine(bytewise, client, own, plan) as made:
        yield made


def _thinks(text: str) -> Message:
    """The first half of what a model said is its thought: another one would say where that ends."""
    return {"reasoning_content": text[: len(text) // 2], "content": text[len(text) // 2 :]}


def _asked(chat: Chat, session_id: str, messages: list[Message], **template: Any) -> ChatTurn:
    """A turn whose reply is right; the messages have it from here on."""
    tokenizer: Any = chat._tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    done = chat.turn(
        session_id, messages, max_new_tokens=REPLY_TOKENS, template=template or None, eos_token_ids=()
    )
    assert done.turn.token_ids == _fresh(prompt)
    messages.append(done.message)
    return done


def _fresh(prompt: Sequence[int]) -> list[int]:
    kept = DynamicCache(config=reference().config)
    return continue_greedy(reference(), kept, prompt, max_new_tokens=REPLY_TOKENS, eos_token_ids=()).token_ids


def _told(engine: TransformersEngine, template: str, **settings: Any) -> Chat:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Chat(engine, tokenizer, **settings)


def test_a_turn_computes_its_new_message_alone(engine: TransformersEngine, session_id: str) -> None:
    """Nobody offers anything: the chat knows what the template will strip."""
    messages: list[Message] = [dict(message) for message in FIRST]
    with _told(engine, SHAPES["chatml"].template, parse=_thinks) as chat:
        for text in ("And tomorrow?", "And on Friday? I leave early."):
            first = _asked(chat, session_id, messages)
            assert first.message["role"] == "assistant"
            assert chat.ahead.wait(WAIT_S)
            messages.append({"role": "user", "content": text})
        last = _asked(chat, session_id, messages).turn
    new = "And on Friday? I leave early.<|im_end|>\n<|im_start|>assistant\n"
    assert last.prefilled_token_count == len(new)
    assert last.ahead_token_count > 0


def test_tools_answer_behind_calls(engine: TransformersEngine, session_id: str) -> None:
    """What a template makes of a call is computed while the tool works; so is what is behind the answer."""
    messages: list[Message] = [dict(message) for message in FIRST]

    def calls(text: str) -> Message:
        return {"content": "", "reasoning_content": text, "tool_calls": [{**CALL, "id": "c1"}]}

    with _told(engine, SHAPES["chatml"].template, parse=calls) as chat:
        _asked(chat, session_id, messages)
        assert chat.ahead.wait(WAIT_S)
        messages.append({"role": "tool", "tool_call_id": "c1", "content": RESULT})
        turn = _asked(chat, session_id, messages).turn
    # The call as the template writes it is computed; the model itself said bytes that were none.
    new = f"{RESULT}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert turn.prefilled_token_count == len(new)


def test_the_usual_effort_is_computed_and_the_other_is_kept(
    engine: TransformersEngine, session_id: str
) -> None:
    """One question at a high effort: the next is rendered at the low one, and the high one is found again."""
    messages: list[Message] = [dict(message) for message in FIRST]
    with _told(engine, EFFORT, parse=_thinks) as chat:
        for effort in ("low", "low", "high"):
            _asked(chat, session_id, messages, effort=effort)
            assert chat.ahead.wait(WAIT_S)
            messages.append(dict(NEXT))
        turn = _asked(chat, session_id, messages, effort="low").turn
        assert turn.prefilled_token_count < 2 * len(NEXT["content"]) + 40
        assert chat.ahead.wait(WAIT_S)
        messages.append(dict(NEXT))
        turn = _asked(chat, session_id, messages, effort="high").turn
    # The rendering at the high effort ends where that question was asked.
    assert turn.reused_token_count > 200


def test_what_an_agent_prunes_is_offered_by_messages(engine: TransformersEngine, session_id: str) -> None:
    """The client says what it will send, and finds it; the last message may be another one."""
    messages: list[Message] = [dict(FIRST[0]), {"role": "user", "content": "x" * 300}]
    with _told(engine, SHAPES["chatml"].template) as chat:
        _asked(chat, session_id, messages)
        pruned: list[Message] = [messages[0], {"role": "user", "content": "what was said, in short"}]
        chat.offer(session_id, pruned)
        assert chat.ahead.wait(WAIT_S)
        turn = _asked(chat, session_id, pruned).turn
    assert turn.prefilled_token_count == 1


def test_a_template_that_refuses_the_next_message_costs_no_reply(
    engine: TransformersEngine, session_id: str
) -> None:
    """The reply is given; nothing is computed ahead."""
    template = (
        "{%- if messages | length > 2 -%}{{ raise_exception('no more') }}{%- endif -%}"
        "{%- for m in messages -%}{{ m.content }}{%- endfor -%}"
    )
    with _told(engine, template) as chat:
        _asked(chat, session_id, [dict(message) for message in FIRST])
        assert chat.ahead.wait(WAIT_S)
        assert not chat.ahead.outcomes


def test_a_conversation_that_outgrows_the_context_is_answered(
    client: Client, bytewise: PreTrainedModel, session_id: str
) -> None:
    """Its oldest tokens are dropped by the engine; what is longer than the context is not offered."""
    own = model_spec(bytewise, model_id="bytewise")
    plan = RestorePlan.uniform(Method.KV, own.layer_count)
    messages: list[Message] = [dict(message) for message in FIRST]
    with (
        TransformersEngine(bytewise, client, own, plan, window=300) as engine,
        _told(engine, SHAPES["chatml"].template, parse=_thinks) as chat,
    ):
        for _ in range(3):
            done = chat.turn(session_id, messages, max_new_tokens=REPLY_TOKENS, eos_token_ids=())
            assert len(done.turn.token_ids) == REPLY_TOKENS
            assert chat.ahead.wait(WAIT_S)
            messages += [done.message, dict(NEXT)]
        assert done.turn.dropped_token_count
        assert set(chat.ahead.outcomes) <= {"in place"}


def test_an_ahead_of_other_settings_is_its_maker_s(engine: TransformersEngine, session_id: str) -> None:
    """It goes on when the chat is closed."""
    with Ahead(engine, share=1.0) as ahead:
        with _told(engine, SHAPES["chatml"].template, parse=_thinks, ahead=ahead) as chat:
            _asked(chat, session_id, [dict(message) for message in FIRST])
            assert chat.ahead is ahead
        assert ahead.wait(WAIT_S)
        assert ahead.outcomes == {"in place": 1}


def test_the_page_s_block_runs(server: ServerProcess, bytewise: PreTrainedModel, session_id: str) -> None:
    """The block of docs/edits.md, as it stands, twice."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SHAPES["chatml"].template
    names: dict[str, Any] = {
        "model": bytewise,
        "tokenizer": tokenizer,
        "plan": RestorePlan.uniform(Method.KV, bytewise.config.num_hidden_layers),
        "messages": [dict(message) for message in FIRST],
    }
    source = aimed_at(blocks(ROOT / "docs" / "edits.md", "python")[0], server.target)
    code = compile(source.replace('"alice"', f'"{session_id}"'), "docs/edits.md", "exec")
    exec(code, names)  # noqa: S102  the project's own document
    names["messages"].append(dict(NEXT))
    exec(code, names)  # noqa: S102
    assert names["reply"].turn.reused_token_count > 0
    assert [message["role"] for message in names["messages"]][2:] == ["assistant", "user", "assistant"]


def test_whoever_is_to_write_next_writes_in_two_ways() -> None:
    """A user behind an answer, each tool behind its call."""
    assert possible_nexts({"role": "assistant", "content": "x"}) == (
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "b"}],
    )
    first, second = possible_nexts({"tool_calls": [{"id": "1"}, {"id": "2"}, {}]})
    assert [message.get("tool_call_id") for message in first] == ["1", "2", None]
    assert {message["content"] for message in second} == {"b"}


def test_the_usual_way_is_the_commonest_of_late() -> None:
    """Of equals the latest; conversations do not know each other, and old habits are forgotten."""
    ways = UsualWays[str]()
    assert [ways.asked("a", way) for way in "llhlhhhh"] == ["l", "l", "l", "l", "l", "h", "h", "h"]
    assert ways.asked("b", "x") == "x"
