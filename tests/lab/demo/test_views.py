"""The demo as a person sees it: redrawn on a terminal, line by line elsewhere."""

import io

from rich.console import Console

from lab.demo.machine import physical_core_count
from lab.demo.view import LineView, LiveView, View, duration, shortened

_TWO_CORES = "".join(f"physical id\t: 0\ncore id\t: {core}\n" for core in (0, 0, 1, 1))


def _act(view: View) -> None:
    view.doing("loading, 3 of 9 MB")
    view.doing("loading, 6 of 9 MB")
    view.say("a store is ready")
    view.begin_turn("turn 1", "What is\nthis?")
    view.begin_reply("pre-RoPE KV")
    view.doing("restoring")
    view.reply("It is\n[bold]markup[/bold]")
    view.end_reply("512 tokens restored from SSD", is_good=True)
    view.begin_reply("hidden states")
    view.reply("It is not")
    view.end_reply("token 2 differs", is_good=False)
    view.end_turn()


def test_lines_are_in_order_and_say_what_differs() -> None:
    """One line per event, a step's progress and a turn's steps apart; a difference is shouted."""
    stream = io.StringIO()

    _act(LineView(stream))

    assert stream.getvalue().splitlines() == [
        "... loading",
        "a store is ready",
        "",
        "turn 1",
        "  user            What is this?",
        "  pre-RoPE KV     It is [bold]markup[/bold]",
        "                  512 tokens restored from SSD",
        "  hidden states   It is not",
        "                  DIFFERENT: token 2 differs",
    ]


def test_a_terminal_keeps_whole_turns() -> None:
    """A turn that is over stays on the screen, with marks; a model's brackets are text."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)

    with LiveView(console) as view:
        _act(view)

    shown = stream.getvalue()
    assert "a store is ready" in shown
    assert "It is [bold]markup[/bold]" in shown
    assert "✓ 512 tokens restored from SSD" in shown
    assert "✗ token 2 differs" in shown


def test_long_texts_show_both_ends() -> None:
    """The question at the end of a quote is still there."""
    text = "The reference says " + "and so on " * 50 + "What is the main point?"

    short = shortened(text)

    assert short.startswith("The reference says")
    assert " [...] " in short
    assert short.endswith("What is the main point?")


def test_durations() -> None:
    """Milliseconds below a second."""
    assert (duration(41_400_000), duration(1_320_000_000)) == ("41 ms", "1.32 s")


def test_hyperthreads_are_not_cores() -> None:
    """Four logical processors on two cores are two, or as many as this process may use."""
    assert physical_core_count(_TWO_CORES) in (1, 2)
    assert physical_core_count("") >= 1
