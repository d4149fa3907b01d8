"""The whole demo: each model, one after the other, with a store of its own.

Knows the parts and their order, not how anything is shown. Worst case: an error of a part, after
everything that was started is ended.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ctxcache.errors import PositionsNotRelocatable
from lab.demo.conversation import Conversation, Script, WindowRun, require_relocatable, script_for
from lab.demo.embedded_store import EmbeddedStore, embedded_store
from lab.demo.history import MARGIN_TOKENS, HistoryRun, check_lengths
from lab.demo.results import ModelResult
from lab.demo.subject import Subject
from lab.demo.view import View


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run. With `history`, time is measured instead of a conversation held."""

    turn_count: int
    opening_tokens: int | None
    turn_tokens: int
    reply_tokens: int
    window: int | None
    history: tuple[int, ...]
    repeat_count: int
    data_directory: Path | None


def run_model(subject: Subject, options: Options, view: View) -> ModelResult:
    """Run everything on one model. Raises CacheError."""
    result = _described(subject)
    view.say(f"\n{_introduction(result, subject)}")
    if options.history:
        _measure(subject, options, view, result)
    else:
        _converse(subject, options, view, result)
    return result


def _converse(subject: Subject, options: Options, view: View, result: ModelResult) -> None:
    script = script_for(
        subject,
        turn_count=options.turn_count,
        opening_tokens=options.opening_tokens,
        turn_tokens=options.turn_tokens,
        reply_tokens=options.reply_tokens,
    )
    if options.window is not None:
        require_relocatable(subject)
    texts = script.texts(subject)
    with _store(subject, options, view, script.token_count, result) as store:
        conversation = Conversation(subject, store, view, result)
        conversation.hold(script, texts[:-1])
        try:
            require_relocatable(subject)
        except PositionsNotRelocatable as error:
            result.window_refusal = str(error)
            view.say(f"\nNo turn over the context window: {error}")
            return
        _overflow(conversation, script, texts[-1], options.window, WindowRun(subject, store, view), result)


def _overflow(
    conversation: Conversation,
    script: Script,
    text: str,
    window: int | None,
    run: WindowRun,
    result: ModelResult,
) -> None:
    # As large as the conversation is long: then one more turn is too much.
    size = window or len(conversation.reference.token_ids)
    new_ids = conversation.reference.new_ids(text)
    result.windows = run.turn(conversation.replays, text, new_ids, script.reply_tokens, window=size)


def _measure(subject: Subject, options: Options, view: View, result: ModelResult) -> None:
    lengths = sorted(set(options.history))
    check_lengths(subject, lengths)
    # Beside the longest history there is one measured turn at a time.
    with _store(subject, options, view, lengths[-1] + 2 * MARGIN_TOKENS, result) as store:
        run = HistoryRun(subject, store, view, lengths)
        result.stored = run.build()
        result.history = run.measure(options.repeat_count)


@contextmanager
def _store(
    subject: Subject, options: Options, view: View, token_count: int, result: ModelResult
) -> Iterator[EmbeddedStore]:
    size_bytes = subject.size_bytes(token_count, subject.methods)
    directory = options.data_directory and options.data_directory / subject.model_id
    view.doing("an embedded store is started")
    with embedded_store(size_bytes, directory) as store:
        view.say(
            f"store: pid {store.ready.pid} at {store.ready.target}, {size_bytes >> 20} MiB of DRAM and of SSD"
            f" ({store.ready.ssd_io_mode} I/O)"
        )
        result.ssd_io_mode = store.ready.ssd_io_mode
        yield store
        view.doing("the embedded store is ended")


def _described(subject: Subject) -> ModelResult:
    spec = subject.spec
    return ModelResult(
        title=subject.title,
        path=str(subject.path),
        architecture=spec.architecture,
        layer_count=spec.layer_count,
        hidden_size=spec.hidden_size,
        head_count=subject.head_count,
        kv_head_count=spec.kv_head_count,
        head_size=spec.head_size,
        parameter_count=sum(parameter.numel() for parameter in subject.model.parameters()),
    )


def _introduction(result: ModelResult, subject: Subject) -> str:
    _, state, hidden = (subject.bytes_per_token(method) for method in subject.methods)
    return (
        f"{result.title}: {result.parameter_count / 1e6:.0f}M parameters, {result.layer_count} layers,"
        f" {result.head_count} heads, {result.kv_head_count} KV heads, fp32 on CPU\n"
        f"one token is {state:,} B of KV, or {hidden:,} B of hidden states ({hidden / state:.2f} of it)"
    )
