"""Numbers and results as people read them. Pure."""

from gpu_worker.demo.results import ReferenceTurn, RestoredTurn, Source, WindowTurn
from gpu_worker.demo.subject import METHOD_TITLES
from gpu_worker.plan import Method


def duration(ns: float) -> str:
    """`41 ms` below a second, else `1.32 s`."""
    return f"{ns / 1e6:.0f} ms" if ns < 1e9 else f"{ns / 1e9:.2f} s"


def source_words(source: Source) -> str:
    """The tier's name."""
    return {Source.DRAM: "DRAM", Source.SSD: "SSD", Source.MIXED: "DRAM and SSD"}.get(source, "nowhere")


def reference_facts(turn: ReferenceTurn) -> str:
    """One line about the run that never drops its state."""
    return f"{turn.history_token_count:,} tokens kept in the engine; first token after {duration(turn.first_token_ns)}"


def restored_facts(turn: RestoredTurn) -> str:
    """One line: where the state came from, how fast, and whether the reply is the same."""
    if turn.problem:
        return turn.problem
    same = f"all {len(turn.token_ids)} tokens identical"
    return f"{_origin(turn)}; first token after {duration(turn.first_token_ns)}; {same}"


def window_facts(turn: WindowTurn) -> str:
    """One line about a turn that did not fit into the window."""
    return turn.problem or (
        f"dropped {turn.dropped_token_count:,} of {turn.history_token_count + turn.dropped_token_count:,} tokens,"
        f" restored {turn.reused_token_count:,} ({turn.sink_count} sinks among them) at new positions,"
        f" prefilled only the {turn.prefilled_token_count:,} new ones;"
        f" first token after {duration(turn.first_token_ns)}"
    )


def _origin(turn: RestoredTurn) -> str:
    count, took, source = turn.reused_token_count, duration(turn.restore_ns), source_words(turn.source)
    if turn.source is Source.NOWHERE:
        return f"{turn.prefilled_token_count:,} new tokens, nothing to restore"
    if turn.method is Method.TOKENS:
        return f"{count:,} tokens recomputed from token ids ({source}) in {took}"
    return f"{count:,} tokens restored from {source} ({METHOD_TITLES[turn.method]}) in {took}"
