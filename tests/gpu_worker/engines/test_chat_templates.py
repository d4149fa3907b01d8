"""Chat templates that strip thoughts, each in its way: a turn computes the new message and nothing before.

The templates have the shapes of those that models come with: where a thought stands, when it goes, what
stays in its place, what ends a message, and what a prompt for a reply begins with. None is a model's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer, save_llama
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ctxcache.client import Client
from gpu_worker.engines.next_prompts import next_history
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.families.generation import continue_greedy
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan

THOUGHT, ANSWER = (
    "They want the weather of Oslo, which the tool has told.",
    "It rains in Oslo, and will all day.",
)
CALLING = "Only the tool knows the weather."
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
RESULT = '{"sky": "rain", "degrees": 9, "wind": "northwest", "until": "midnight"}'
FIRST = [
    {"role": "system", "content": "You are a helpful assistant who knows a tool for the weather."},
    {"role": "user", "content": "What is the weather like in Oslo today? I have no coat."},
]
NEXT = {"role": "user", "content": "And tomorrow? I leave early."}
REPLY_TOKENS = 6
# Any: what templates take.
Message = dict[str, Any]

# Where the last message of a user is, and the last reply that calls no tool.
LAST_USER = (
    "{%- set at = namespace(user=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set at.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
LAST_REPLY = (
    "{%- set at = namespace(reply=-1) -%}{%- for m in messages -%}"
    "{%- if m.role == 'assistant' and not m.tool_calls -%}"
    "{%- set at.reply = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
EACH = "{%- for m in messages -%}{%- set t = m.reasoning_content or '' -%}{%- set i = loop.index0 -%}"
OVER = "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}"
CALLS = "{%- for c in m.tool_calls or [] -%}"


@dataclass(frozen=True)
class Shape:
    """A template, and what its model says: `said` takes a thought and an answer.

    `is_in_content`: clients send thoughts back within the content. `has_tools`: the template knows tools.
    `is_kept`: no thought is ever stripped.
    """

    template: str
    said: str
    is_in_content: str = ""
    has_tools: bool = True
    is_kept: bool = False

    def reply(self, **fields: Any) -> Message:
        """The message of a reply, as clients send it back."""
        message = {"role": "assistant", "content": ANSWER, **fields}
        if self.is_in_content:
            thought = message.pop("reasoning_content")
            message["content"] = self.is_in_content.format(t=thought, a=message["content"])
        return message


SHAPES = {
    # In the manner of Qwen3: thoughts go before the last message of a user, results are messages of a user.
    "chatml": Shape(
        LAST_USER + EACH + "{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' }}"
        "{%- if i > at.user and t -%}{{ '<think>\n' + t + '\n</think>\n\n' }}{%- endif -%}{{ m.content }}"
        + CALLS + "{{ '\n<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{%- endfor -%}"
        "{{ '<|im_end|>\n' }}"
        "{%- elif m.role == 'tool' -%}"
        "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
        "{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        + OVER + "{{ '<|im_start|>assistant\n' }}{%- endif -%}",
        "<think>\n{t}\n</think>\n\n{a}<|im_end|>",
    ),
    # The same with thinking off: the prompt for a reply has an empty thought, and the history has none.
    "chatml, no thoughts": Shape(
        EACH + "{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}"
        "{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        + OVER + "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif -%}",
        "{a}<|im_end|>",
        has_tools=False,
    ),
    # DeepSeek-R1: the prompt opens the thought, and what is before its end is cut off everywhere.
    "opened thought": Shape(
        EACH + "{%- if m.role == 'assistant' -%}"
        "{{ '<|Assistant|>' + m.content.split('</think>')[-1].lstrip('\n') + '<|end_of_sentence|>' }}"
        "{%- elif m.role == 'user' -%}{{ '<|User|>' + m.content }}{%- else -%}{{ m.content }}"
        + OVER + "{{ '<|Assistant|><think>\n' }}{%- endif -%}",
        "{t}\n</think>\n\n{a}<|end_of_sentence|>",
        is_in_content="{t}\n</think>\n\n{a}",
        has_tools=False,
    ),
    # DeepSeek-V3.1: the end of the thought stays.
    "closed thought": Shape(
        LAST_USER + EACH + "{%- if m.role == 'assistant' -%}{{ '<|Assistant|>' }}"
        "{%- if i > at.user -%}{{ '<think>' + t + '</think>' }}{%- else -%}{{ '</think>' }}{%- endif -%}"
        "{{ m.content }}"
        + CALLS + "{{ '<|tool_call|>' + c.function | tojson }}{%- endfor -%}{{ '<|end_of_sentence|>' }}"
        "{%- elif m.role == 'tool' -%}{{ '<|tool_output|>' + m.content }}"
        "{%- elif m.role == 'user' -%}{{ '<|User|>' + m.content }}{%- else -%}{{ m.content }}"
        + OVER + "{{ '<|Assistant|><think>' }}{%- endif -%}",
        "{t}</think>{a}<|end_of_sentence|>",
    ),
    # GLM: an empty thought takes its place, and a reply ends with the beginning of the next message.
    "emptied thought": Shape(
        LAST_USER + EACH + "{%- if m.role == 'assistant' -%}{{ '<|assistant|>\n<think>' }}"
        "{%- if i > at.user -%}{{ t }}{%- endif -%}{{ '</think>\n' + m.content }}"
        + CALLS + "{{ '\n<tool_call>' + c.function | tojson + '</tool_call>' }}{%- endfor -%}"
        "{%- elif m.role == 'tool' -%}"
        "{{ '<|observation|>\n<tool_response>' + m.content + '</tool_response>' }}"
        "{%- else -%}{{ '<|' + m.role + '|>\n' + m.content }}"
        + OVER + "{{ '<|assistant|>' }}{%- endif -%}",
        "\n<think>{t}</think>\n{a}<|user|>",
    ),
    # MiniMax: thoughts stay behind the last message of a user, and the prompt opens the thought.
    "interleaved": Shape(
        LAST_USER + EACH + "{%- if m.role == 'assistant' -%}{{ ']~b]ai\n' }}"
        "{%- if i > at.user and t -%}{{ '<think>\n' + t + '\n</think>\n\n' }}{%- endif -%}{{ m.content }}"
        + CALLS + "{{ '\n<invoke>' + c.function | tojson + '</invoke>' }}{%- endfor -%}{{ '[e~[\n' }}"
        "{%- elif m.role == 'tool' -%}{{ ']~b]tool\n<response>' + m.content + '</response>[e~[\n' }}"
        "{%- else -%}{{ ']~b]' + m.role + '\n' + m.content + '[e~[\n' }}"
        + OVER + "{{ ']~b]ai\n<think>\n' }}{%- endif -%}",
        "{t}\n</think>\n\n{a}[e~[",
    ),
    # Kimi: thoughts stay behind the last reply that calls no tool, whoever writes behind it.
    "by the last reply": Shape(
        LAST_REPLY + EACH + "{%- if m.role == 'assistant' -%}"
        "{{ '<|im_assistant|>assistant<|im_middle|><think>' }}"
        "{%- if i > at.reply or (i == at.reply and loop.last) -%}{{ t }}{%- endif -%}"
        "{{ '</think>' + m.content }}"
        + CALLS + "{{ '<|tool_call|>' + c.function | tojson }}{%- endfor -%}{{ '<|im_end|>' }}"
        "{%- elif m.role == 'tool' -%}{{ '<|im_system|>tool<|im_middle|>' + m.content + '<|im_end|>' }}"
        "{%- else -%}{{ '<|im_user|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}"
        + OVER + "{{ '<|im_assistant|>assistant<|im_middle|>' }}{%- endif -%}",
        "<think>{t}</think>{a}<|im_end|>",
    ),
    # gpt-oss: thoughts are messages of a channel, and the reply's end is another token in the history.
    "channels": Shape(
        LAST_REPLY + EACH + "{%- if m.role == 'assistant' -%}"
        "{%- if i > at.reply and t -%}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + t + '<|end|>' }}{%- endif -%}"
        + CALLS + "{{ '<|start|>assistant to=' + c.function.name + '<|channel|>commentary<|message|>' }}"
        "{{ c.function.arguments | tojson + '<|call|>' }}{%- endfor -%}"
        "{%- if m.content -%}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif -%}"
        "{%- elif m.role == 'tool' -%}"
        "{{ '<|start|>weather to=assistant<|message|>' + m.content + '<|end|>' }}"
        "{%- else -%}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
        + OVER + "{{ '<|start|>assistant' }}{%- endif -%}",
        "<|channel|>analysis<|message|>{t}<|end|><|start|>assistant<|channel|>final<|message|>{a}<|return|>",
    ),
    # Hunyuan: the marks around the answer go as well.
    "marked answer": Shape(
        EACH + "{%- if m.role == 'assistant' -%}{{ '<|hy_Assistant|>' + m.content + '<|eos|>' }}"
        "{%- elif m.role == 'user' -%}{{ '<|hy_User|>' + m.content }}{%- else -%}{{ m.content + '<|sep|>' }}"
        + OVER + "{{ '<|hy_Assistant|>' }}{%- endif -%}",
        "<think>\n{t}\n</think>\n<answer>\n{a}\n</answer><|eos|>",
        has_tools=False,
    ),
    # Nemotron: thoughts come back within the content, and the template cuts them out of it.
    "within the content": Shape(
        LAST_USER + EACH + "{{ '<|header|>' + m.role + '<|end_header|>\n\n' }}"
        "{%- if m.role == 'assistant' -%}"
        "{%- if i < at.user -%}{{ m.content.split('</think>')[-1] | trim }}{%- else -%}{{ m.content }}"
        "{%- endif -%}"
        + CALLS + "{{ '<TOOLCALL>' + c.function | tojson + '</TOOLCALL>' }}{%- endfor -%}{{ '<|eot|>' }}"
        "{%- else -%}{{ m.content + '<|eot|>' }}"
        + OVER + "{{ '<|header|>assistant<|end_header|>\n\n' }}{%- endif -%}",
        "<think>\n{t}\n</think>\n\n{a}<|eot|>",
        is_in_content="<think>\n{t}\n</think>\n\n{a}",
    ),
    # Magistral: every thought stays.
    "kept": Shape(
        EACH + "{%- if m.role == 'assistant' -%}{{ '[THINK]' + t + '[/THINK]' + m.content }}"
        + CALLS + "{{ '[TOOL_CALLS]' + c.function | tojson }}{%- endfor -%}{{ '</s>' }}"
        "{%- elif m.role == 'tool' -%}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
        "{%- elif m.role == 'user' -%}{{ '[INST]' + m.content + '[/INST]' }}"
        "{%- else -%}{{ '[SYSTEM]' + m.content + '[/SYSTEM]' }}" + OVER + "{%- endif -%}",
        "[THINK]{t}[/THINK]{a}</s>",
        is_kept=True,
    ),
    # Command: the thought and the marks around the answer are turns of their own.
    "marked thought": Shape(
        LAST_USER + EACH + "{{ '<|TURN|><|' + m.role | upper + '|>' }}{%- if m.role == 'assistant' -%}"
        "{%- if i > at.user and t -%}{{ '<|THINKING|>' + t + '<|END_THINKING|>' }}{%- endif -%}"
        + CALLS + "{{ '<|ACTION|>' + c.function | tojson + '<|END_ACTION|>' }}{%- endfor -%}"
        "{%- if m.content -%}{{ '<|RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{%- endif -%}"
        "{{ '<|END_TURN|>' }}"
        "{%- else -%}{{ m.content + '<|END_TURN|>' }}" + OVER + "{{ '<|TURN|><|ASSISTANT|>' }}{%- endif -%}",
        "<|THINKING|>{t}<|END_THINKING|><|RESPONSE|>{a}<|END_RESPONSE|><|END_TURN|>",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A model whose tokens are bytes."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        save_llama(tmp_path_factory.mktemp("bytewise"))
    )
    return model


@pytest.fixture(autouse=True)
def _nothing_is_there(client: Client) -> None:
    """What another test left would be found by its tokens."""
    for session in client.sessions.list():
        client.sessions.open(session.name).delete()


class Conversation:
    """A conversation by a template, of which an engine is told prompts and replies."""

    def __init__(self, engine: TransformersEngine, session_id: str, shape: Shape) -> None:
        self._engine, self._session_id, self._shape = engine, session_id, shape
        self._tokenizer = byte_tokenizer()
        self.messages: list[Message] = [dict(message) for message in FIRST]
        self.known: list[int] = []
        """What the session has, as far as the caller knows."""

    def render(self, messages: Sequence[Any], *, is_prompt: bool = True) -> list[int]:
        """Token ids of messages."""
        text = self._tokenizer.apply_chat_template(
            list(messages),
            chat_template=self._shape.template,
            add_generation_prompt=is_prompt,
            tokenize=False,
        )
        return self.ids(str(text))

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(list(ids)))

    def turn(self, count: int = REPLY_TOKENS) -> tuple[Turn, list[int]]:
        """Ask for a reply to the messages; what was asked."""
        prompt = self.render(self.messages)
        turn = self._engine.turn(
            self._session_id, prompt[-1:], history=prompt[:-1], max_new_tokens=count, eos_token_ids=()
        )
        assert self._engine.wait(self._session_id) is None
        return turn, prompt

    def say(self, text: list[int], prompt: list[int]) -> None:
        """The model says this in reply to the prompt."""
        self._engine.turn(self._session_id, text, history=prompt, max_new_tokens=0)
        assert self._engine.wait(self._session_id) is None


@pytest.mark.parametrize(
    ("name", "has_chain"),
    [(name, has_chain) for name in SHAPES for has_chain in (False, True)[: 1 + SHAPES[name].has_tools]],
)
def test_a_turn_computes_the_new_message_alone(
    client: Client, session_id: str, bytewise: PreTrainedModel, name: str, *, has_chain: bool
) -> None:
    """The thought was stripped in the pause. Within a chain of tools nothing is, nor computed again."""
    shape = SHAPES[name]
    own = model_spec(bytewise, model_id="bytewise")
    plan = RestorePlan.uniform(Method.KV, own.layer_count)
    with TransformersEngine(bytewise, client, own, plan) as engine:
        chat = Conversation(engine, session_id, shape)
        _, prompt = chat.turn(0)
        if has_chain:
            call = shape.reply(reasoning_content=CALLING, content="", tool_calls=[CALL])
            rendered = chat.render([*chat.messages, call], is_prompt=False)
            assert rendered[: len(prompt)] == prompt
            chat.say(rendered[len(prompt) :], prompt)
            chat.messages += [call, {"role": "tool", "content": RESULT}]
            turn, prompt = chat.turn(0)
            assert turn.reused_token_count == len(rendered)
            assert RESULT in chat.text(prompt[turn.reused_token_count :])
        said = chat.ids(shape.said.format(t=THOUGHT, a=ANSWER))
        chat.say(said, prompt)
        chat.messages.append(shape.reply(reasoning_content=THOUGHT))
        known = next_history(chat.render, chat.messages)
        done = engine.rerendered(session_id, known)
        assert done.is_in_place
        chat.messages.append(NEXT)
        turn, prompt = chat.turn()

    computed = chat.text(prompt[turn.reused_token_count :])
    assert computed.startswith(NEXT["content"])
    assert THOUGHT not in chat.text(prompt) or shape.is_kept
    assert turn.miss_reason == ""
    kept = DynamicCache(config=bytewise.config)
    fresh = continue_greedy(bytewise, kept, prompt, max_new_tokens=REPLY_TOKENS, eos_token_ids=())
    assert turn.token_ids == fresh.token_ids


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.is_kept])
def test_without_a_pass_what_is_behind_the_thought_is_computed(
    client: Client, session_id: str, bytewise: PreTrainedModel, name: str
) -> None:
    """So the pass is what spares it."""
    shape = SHAPES[name]
    own = model_spec(bytewise, model_id="bytewise")
    with TransformersEngine(bytewise, client, own, RestorePlan.uniform(Method.KV, own.layer_count)) as engine:
        chat = Conversation(engine, session_id, shape)
        _, prompt = chat.turn(0)
        chat.say(chat.ids(shape.said.format(t=THOUGHT, a=ANSWER)), prompt)
        chat.messages += [shape.reply(reasoning_content=THOUGHT), NEXT]
        turn, prompt = chat.turn(0)
    assert ANSWER in chat.text(prompt[turn.reused_token_count :])
