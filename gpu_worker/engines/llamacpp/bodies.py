"""Bodies of llama.cpp's API: read once and strictly, so that llama.cpp gets what was looked at here.

Two readers of one text may differ, in keys that come twice or in encodings. So whoever passes a body on
writes it anew from what was read. docs/llamacpp.md has the table of fields.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any, NoReturn

SESSION_HEADER = "X-Session-ID"
MOST_DEPTH = 100
"""Lists and objects within each other. llama.cpp walks them by calls, whose memory ends."""
GRAMMARS = ("grammar", "pattern")
"""Fields of texts whose groups llama.cpp walks so as well."""
_GROUPS = re.compile(r"[()]")
_LITERALS = re.compile(r'\\.|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
"""What stands for itself, in a grammar and in a regular expression."""
WITHOUT_SESSION = ("n", "n_cmpl")
"""Fields that ask for several replies to one prompt."""
# Rows of a prompt depend on its tokens and on the loaded model. Whatever else a field would make them depend
# on is refused: a state would be found again by a request that asks for other rows.
_NOT_GIVEN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id_slot": (lambda value: value == -1, "slots are chosen by sessions"),
    "lora": (lambda value: value in (None, []), "LoRA adapters cannot be given: restart with a merged model"),
    "image_data": (lambda value: value in (None, []), "images cannot be given"),
    "n_cache_reuse": (
        lambda value: value in (None, 0),
        "rows of another context would be reused, and kept as this one's",
    ),
}
"""Fields that are refused: which values change nothing, and why others do."""


_INFILL, _TOP_K = ("infill", "i"), ("top_k", "k")
"""Samplers by name, and by the letter in a text of letters."""
INFILL_TOKENS = 1000
"""Tokens that the infill sampler may compare, each with each other."""


class Refused(Exception):
    """A request that is answered here, with a status and a sentence."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


def read_body(body: bytes) -> Any:
    """The value that a body of JSON encodes. Raises Refused."""
    try:
        read = json.loads(body.decode("utf-8-sig"), parse_constant=_no_number, parse_float=_number)
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise _bad(f"the body is nested more than {MOST_DEPTH} deep") from None
    except ValueError as error:
        raise _bad(f"the body is not JSON: {error}") from None
    _check_depth(read)
    return read


def check_fields(request: dict[str, Any]) -> None:
    """Raise Refused for a field on which the rows of a prompt would depend."""
    for name, (is_nothing, problem) in _NOT_GIVEN.items():
        if name in request and not is_nothing(request[name]):
            raise _bad(f"{name}: {problem}")
    _check_samplers(request)


def _check_samplers(request: dict[str, Any]) -> None:
    # The infill sampler compares all pairs of tokens. A whole vocabulary takes minutes, and all slots wait.
    names = request.get("samplers")
    samplers = list(names) if isinstance(names, str | list) else []
    infill = next((i for i, sampler in enumerate(samplers) if sampler in _INFILL), None)
    if infill is None:
        return
    kept = request.get("top_k", 40)
    is_cut = any(sampler in _TOP_K for sampler in samplers[:infill])
    if not (is_cut and isinstance(kept, int) and 0 < kept <= INFILL_TOKENS):
        raise _bad(f"samplers: infill needs top_k before it, with top_k from 1 to {INFILL_TOKENS}")


def is_several(request: dict[str, Any]) -> bool:
    """Whether it asks for several replies, which run in slots that llama.cpp chooses."""
    if any(request.get(name, 1) != 1 for name in WITHOUT_SESSION):
        return True
    prompt = request.get("prompt")
    return isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)


def session_of(request: dict[str, Any], headers: Sequence[str]) -> str | None:
    """The name of its conversation, taken out of the body; None where it names none. Raises Refused."""
    if len(set(headers)) > 1:
        raise _bad(f"{SESSION_HEADER}: {len(headers)} names of one request")
    given = request.pop("session_id", None)
    # A header's bytes are read as Latin-1: one name must be the same in header and body.
    named = headers[0].encode("latin-1").decode(errors="surrogateescape") if headers else None
    if given is not None and named is not None and given != named:
        raise _bad(f"session_id: {given!a}, but {SESSION_HEADER}: {named!a}")
    session = named if given is None else given
    if session is None:
        return None
    if not isinstance(session, str) or not session:
        raise _bad("session_id: a string of one character or more")
    return session


def _check_depth(read: object) -> None:
    level: list[tuple[str, Any]] = [("", read)]
    for _ in range(MOST_DEPTH):
        level = [item for _, holder in level for item in _items(holder)]
        for name, value in level:
            if name in GRAMMARS and isinstance(value, str):
                _check_groups(name, value)
        if not level:
            return
    raise _bad(f"the body is nested more than {MOST_DEPTH} deep")


def _items(holder: object) -> Iterable[tuple[str, Any]]:
    if isinstance(holder, dict):
        return holder.items()
    return (("", value) for value in holder) if isinstance(holder, list) else ()


def _check_groups(name: str, text: str) -> None:
    depth = 0
    for bracket in _GROUPS.findall(_LITERALS.sub("", text)):
        depth += 1 if bracket == "(" else -1
        if depth > MOST_DEPTH:
            raise _bad(f"{name}: groups are nested more than {MOST_DEPTH} deep")


def _number(text: str) -> float:
    number = float(text)
    # It would be written as a word that is no JSON.
    if math.isinf(number):
        raise ValueError(f"{text[:32]} is beyond what floats hold")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _bad(problem: str) -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, problem)
