"""How events are logged: a name and `key=value`, as a line for people or as one of JSON. Leaf.

Every event of ours is logged with a template `name key=%s key=%d`, so that its fields are known here and need
not be parsed out of text; a test looks at every call. A library's text is the field `message`.
"""

import json
import logging
import re
import time
from datetime import UTC, datetime
from typing import TextIO

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
TEMPLATE = re.compile(r"[a-z][a-z0-9_]*(?: [a-z_]+=%(?:\.\d+)?[a-z])*")
LIBRARIES = ("asyncio", "grpc")
REPEATED = frozenset({"bulk_accept_failed error=%s"})
"""Our own events that one fault logs again and again."""
REPEAT_INTERVAL_S = 10.0
LINES_LIMIT = 256
LINE_CHARACTERS = 80
_KEY = re.compile(r" ([a-z_]+)=%")


class JsonLines(logging.Formatter):
    """One object per line.

    It has `time` (UTC, RFC 3339), `level`, `logger`, `event` or `message`, the event's fields, `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **_said(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str)


class Repeats(logging.Filter):
    """Lets a line of a library through once per interval, and then says how often it came besides.

    A refusal of the system, an `accept` without descriptors above all, is logged again and again. Owned by
    whoever logs: a count that two threads change at once is off by one. Memory: an entry per template, at
    most LINES_LIMIT.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        if not record.name.startswith(LIBRARIES) and str(record.msg) not in REPEATED:
            return True
        # All at once: what was told is told once more, and the memory stays bounded.
        if len(self._told) >= LINES_LIMIT:
            self._told.clear()
        line = record.name, str(record.msg)[:LINE_CHARACTERS]
        not_before_s, count = self._told.get(line, (0.0, 0))
        now_s = time.monotonic()
        if now_s < not_before_s:
            self._told[line] = not_before_s, count + 1
            return False
        self._told[line] = now_s + REPEAT_INTERVAL_S, 0
        if count:
            # `msg` and `args` are replaced together: with the count in the text the template has no fields
            # any more.
            record.msg, record.args = f"{record.getMessage()} (and {count} times more)", ()
        return True


def log_to(stream: TextIO, *, level: str, is_json: bool) -> logging.Handler:
    """Log to a stream what is at least as severe as `level`; returns what does so."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(Repeats())
    handler.setFormatter(JsonLines() if is_json else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    return handler


def _said(record: logging.LogRecord) -> dict[str, object]:
    values = record.args if isinstance(record.args, tuple) else ()
    if not isinstance(record.msg, str) or not TEMPLATE.fullmatch(record.msg):
        return {"message": record.getMessage()}
    # A field that has the name of one that each line has gets a tail, so that neither hides the other.
    fields = {
        f"{key}_" if key in _TAKEN else key: _plain(value)
        for key, value in zip(_KEY.findall(record.msg), values, strict=True)
    }
    return {"event": record.msg.partition(" ")[0], **fields}


_TAKEN = frozenset({"time", "level", "logger", "event", "message", "traceback"})


def _plain(value: object) -> object:
    """A number as it is, anything else as text. JSON values, in the audit log, stay as they are."""
    if isinstance(value, int | float):
        return value
    text = str(value)
    try:
        return json.loads(text) if text.startswith(('"', "{")) else text
    except ValueError:
        return text
