"""How a server's process may end where something was refused to it: with a sentence, a reason and a code.

Worst case: one that does not end, which is a problem like a wrong code.
"""

import json
import subprocess

from tests.server_process import ServerDidNotStart, ServerProcess

START_CODES = {
    7: "CAPACITY_EXCEEDED",
    9: "DATA_DIRECTORY_UNUSABLE",
    12: "ADDRESS_UNUSABLE",
    13: "TIER_FAILURE",
}
"""Exit codes that a fault of a system call may end a start with. Damage it is not, so 8 is none of them."""


def stop(server: ServerProcess, problems: list[str], *, is_faulty: bool) -> None:
    """Let it end in order; `is_faulty`: a fault may keep it from ending well, with a sentence."""
    try:
        code = server.terminate()
    except subprocess.TimeoutExpired:
        problems.append("it does not end after SIGTERM")
        return
    if code and not (is_faulty and code in START_CODES):
        problems.append(f"its exit code is {code}: {last_line(server.stderr)}")
    if "Traceback" in server.stderr:
        problems.append(f"a traceback: {last_line(server.stderr)}")


def check_refusal(error: ServerDidNotStart, problems: list[str]) -> None:
    """A start that was refused says why in one document with its reason, and ends with that reason's code."""
    last = last_line(error.stderr)
    reason = START_CODES.get(error.returncode or 0)
    if error.returncode is None:
        problems.append("it neither starts nor ends")
    elif reason is None or _told(last) != (reason, error.returncode) or "Traceback" in error.stderr:
        problems.append(f"it does not start, with exit code {error.returncode}: {last}")


def _told(line: str) -> tuple[str, int]:
    """Reason and exit code of the document that a refused start ends with.

    No reason where a sentence is missing.
    """
    try:
        told = json.loads(line)["error"]
        return (str(told["reason"]) if told["message"] else "", int(told["exit_code"]))
    except (ValueError, KeyError, TypeError):
        return "", 0


def last_line(text: str) -> str:
    """The last line of a text; empty for none."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
