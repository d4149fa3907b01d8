"""`ctxcache trace`: record what a live store is asked, without content, and make a trace of it.

Thin: `ctxcache.recordings` has the files and the counts. The lab adds `replay`. Worst case: the file's device
is full, or the server goes away. Calls that were recorded up to then stay, and the file says that it is not
whole.
"""

import json
import sys
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from ctxcache.cli.call import CliCall, CtrlC, online
from ctxcache.cli.documents import Plain, examples
from ctxcache.cli.units import counted, human_duration, parse_span, parsed
from ctxcache.errors import Unavailable
from ctxcache.recordings import RecordedFile, created, write
from ctxcache.simulate.recorded import contents
from ctxcache.simulate.trace import Trace

app = typer.Typer()
traces = typer.Typer(no_args_is_help=True, help="Record what a store is asked, and ask it of another.")
app.add_typer(traces, name="trace")
FileArgument = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A recording, .gz too.", show_default=False),
]
NewFileArgument = Annotated[
    Path,
    typer.Argument(metavar="NEW", help="A file that is made; gzipped if it ends in .gz.", show_default=False),
]


@traces.command(
    "record",
    epilog=examples("ctxcache trace record hour.jsonl.gz --duration 1h"),
)
@online
def record(
    call: CliCall,
    file: NewFileArgument,
    duration: Annotated[
        str, typer.Option("--duration", metavar="TIME", help="Until then, or Ctrl-C.")
    ] = "1h",
) -> None:
    """Record what the server is asked, without content: no token, no row, no name.

    Calls that are read too slowly are lost, counted, and noted in the file; the server never waits.
    """
    span = parsed(parse_span, duration, "--duration")
    written = RecordedFile()
    _check_name(file)
    with call.client() as client, closing(client.admin.record(span)) as parts:
        # A recording that was refused leaves no file.
        first = next(parts, None)
        if first is None:
            raise Unavailable(target=call.target, problem="ended the recording before its first part")
        # The server agrees first, then the file is made. Ctrl-C ends the recording and not the command.
        with created(file) as lines, CtrlC() as ctrl_c:
            for written in write(chain((first,), parts), lines):
                _report(written)
                if ctrl_c.was_pressed:
                    break
    facts: dict[str, Plain] = {
        "file": str(file),
        "calls": written.call_count,
        "lost_calls": written.lost_count,
        "elapsed_s": round(written.elapsed_s, 3),
    }
    lost = f", {written.lost_count} lost" if written.lost_count else ""
    call.show_facts(
        facts, f"{file}: {counted(written.call_count, 'call')} in {human_duration(written.elapsed_s)}{lost}"
    )


@traces.command("convert", epilog=examples("ctxcache trace convert calls.jsonl turns.jsonl"))
@online
def convert(call: CliCall, file: FileArgument, trace: NewFileArgument) -> None:
    """Make a trace for `ctxcache simulate` out of a recording, which takes recordings, too.

    It says with which options simulate has that store's sizes.
    """
    _check_name(trace)
    recording, turn_count = contents(file), 0
    with created(trace) as lines:
        for turn in Trace(file):
            turn_count += 1
            values = {
                "session_id": turn.session.decode(),
                "arrival_ms": round(turn.arrival_s * 1000, 3),
                "new_input_tokens": turn.input_tokens,
                "output_tokens": turn.output_tokens,
                "history_tokens": turn.history_tokens,
                "turn": turn.number,
            }
            lines.write(json.dumps(values, separators=(",", ":")) + "\n")
    options = recording.simulate_options()
    facts: dict[str, Plain] = {
        "file": str(trace),
        "turns": turn_count,
        "lost_calls": recording.lost_count,
        "simulate": list(options),
    }
    call.show_facts(
        facts, f"{trace}: {counted(turn_count, 'turn')}\nctxcache simulate {trace} {' '.join(options)}"
    )


def _check_name(path: Path) -> None:
    """Readers tell the format from the name."""
    if not path.name.removesuffix(".gz").endswith((".jsonl", ".json")):
        raise typer.BadParameter(f"{path}: its name does not end in .jsonl or .jsonl.gz", param_hint="NEW")


def _report(written: RecordedFile) -> None:
    """Tell a person who waits at a terminal."""
    if sys.stderr.isatty():
        lost = f", {written.lost_count} lost" if written.lost_count else ""
        calls = counted(written.call_count, "call")
        line = f"{human_duration(written.elapsed_s)}: {calls}{lost}; Ctrl-C ends it"
        sys.stderr.write(f"\r\x1b[K{line}\r")
        sys.stderr.flush()
