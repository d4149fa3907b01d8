"""The hand-over of a prompt: one engine computes it, another one goes on from its end.

    proxy ── prompt, do_remote_decode ──► prefill engine ── rows ──► store
          ◄── 1 token, kv_transfer_params ──┘                          │
          ── prompt, kv_transfer_params ──► decode engine ◄── rows ────┘

What the first engine answers with goes unread through vLLM's and others' proxies. Callers may write anything
there: the decoder takes from the session what has the tokens of its own prompt, and nothing else.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ctxcache.format.ids import SESSION_ID

# The parameters of a reply, with NixlConnector's names first, which proxies look at:
#
#     do_remote_prefill, do_remote_decode, remote_engine_id, remote_request_id, remote_num_tokens
#     ctxcache@127.0.0.1:7420 = {session_name, token_count, rank_count, engine_host}
#
# Behind MultiConnector only the second line: two connectors with one key would end vLLM's engine, and the
# store's address is in the key since an engine may have several stores.
KEY = "ctxcache@"
# Blocks are saved whole. The last one of a prompt that is handed over is saved as it is, and its tokens that
# are not there have an id that no token has:
#
#     prompt of 70 tokens, blocks of 32     0 .. 31   32 .. 63   64 .. 69, 26 times NO_TOKEN
#     whoever saves more of it              keeps the first two blocks, and saves the third anew
NO_TOKEN = -1
HOST_LIMIT = 255


class HandOver(NamedTuple):
    """Where the rows of a prompt are, or will be within moments."""

    session_name: str
    token_count: int
    """Tokens of the prompt that its session will have."""
    rank_count: int
    """Ranks of the engine that computed it: the session of each has its part."""
    engine_host: str = ""
    """The host of that engine, by which a fleet's stores know the one beside it."""

    def parameters(self, target: str) -> dict[str, Any]:
        """As `kv_transfer_params` say it, of the store at `target`."""
        return {f"{KEY}{target}": self._asdict()}


def read(parameters: Mapping[str, Any], target: str) -> HandOver | None:
    """The hand-over that a request brings for the store at `target`; None where it brings none.

    Engines may call one store by different names: where there is one hand-over, it is that. Raises ValueError
    for one that nobody can have made.
    """
    brought = {key: value for key, value in parameters.items() if str(key).startswith(KEY)}
    said = brought.get(KEY + target) or (next(iter(brought.values())) if len(brought) == 1 else None)
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise ValueError(f"{KEY}{target}: a {type(said).__name__} is no mapping")  # noqa: TRY004
    name, counts = said.get("session_name"), (said.get("token_count"), said.get("rank_count"))
    if not isinstance(name, str) or not SESSION_ID.fullmatch(name.removeprefix("sessions/")):
        raise ValueError(f"{KEY}{target}: session_name is {str(name)[:80]!r}")
    # A truth value is a number to Python, and none to anybody else.
    token_count, rank_count = (count if type(count) is int else 0 for count in counts)
    if token_count < 1 or rank_count < 1:
        raise ValueError(f"{KEY}{target}: token_count and rank_count are {str(counts)[:80]}")
    host = said.get("engine_host", "")
    if not isinstance(host, str) or len(host) > HOST_LIMIT:
        raise ValueError(f"{KEY}{target}: engine_host is {str(host)[:80]!r}")
    return HandOver(name, token_count, rank_count, host)
