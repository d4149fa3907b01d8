"""What a request says: its conversation's name, its salt, its hints, its hand-over. Read once, as it arrives.

Callers write it, over the network too, and vLLM checks little of it: any field may have any content. An error
out of a connector's call would end the engine for everybody, so this module is the door: behind it there is
what was read here, and nothing of a request's own words. Worst case: a request goes without the store.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from ctxcache.client.types import HintAction
from ctxcache.format.ids import Labels, checked_labels
from gpu_worker.engines.names import session_id
from gpu_worker.engines.vllm import handover
from gpu_worker.engines.vllm.handover import HOST_LIMIT, HandOver
from gpu_worker.engines.vllm.hints import HintTeller, hints_of
from gpu_worker.engines.vllm.settings import labels_of
from gpu_worker.engines.vllm.versions import session_id_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.ctxcache")


@dataclass(frozen=True, slots=True)
class Said:
    """A request's words."""

    session_name: str
    """Empty where it names no conversation."""
    salt: bytes
    """Empty where the request has none: it shares with others that have none."""
    labels: Labels
    """What its session gets where the request makes it."""
    hints: tuple[HintAction, ...]
    """Those about its own conversation name no session."""
    handed: HandOver | None
    """Where another engine put the rows of its prompt."""
    is_prefill: bool
    """Whether another engine will go on with it."""
    source: str
    """The host that a router names for more of its prompt; empty for none."""


def read(request: "Request", teller: HintTeller, labels: Labels = (), target: str = "") -> Said | None:
    """What a request says; None for one that is to go without the store. Raises nothing.

    `labels`: of every session, beside its own. `target`: the store's address.
    """
    try:
        check_parameters(request)
        return Said(
            _session_of(request),
            _salt_of(request),
            _labels_of(request, labels),
            tuple(hints_of(request, teller)),
            _handed_of(request, target),
            is_prefill=bool((request.kv_transfer_params or {}).get("do_remote_decode")),
            source=_source_of(request),
        )
    except Exception as error:  # noqa: BLE001  of whatever content, and however deep
        logger.warning("a request goes without the store, since its words are not understood: %.200r", error)
        return None


def check_parameters(request: "Request") -> None:
    """Take out `kv_transfer_params` that are no mapping: vLLM's scheduler, too, would fail at them."""
    given: Any = request.kv_transfer_params
    # Over HTTP they come as `vllm_xargs.kv_transfer_params`, which vLLM does not check.
    if given is not None and not isinstance(given, dict):
        logger.warning("kv_transfer_params: a %s is no mapping, and is left alone", type(given).__name__)
        request.kv_transfer_params = None


def _session_of(request: "Request") -> str:
    named: Any = session_id_of(request) or (request.kv_transfer_params or {}).get("session_id")
    if isinstance(named, int) and not isinstance(named, bool):
        named = str(named)
    if named is not None and not isinstance(named, str):
        logger.warning("session_id: a %s is no name, and is left alone", type(named).__name__)
        return ""
    return f"sessions/{session_id(named)}" if named else ""


def _handed_of(request: "Request", target: str) -> HandOver | None:
    """The hand-over; one that is none costs a computed prompt, and no more."""
    try:
        return handover.read(request.kv_transfer_params or {}, target)
    except ValueError as error:
        logger.warning("a hand-over is left alone: %.200s", error)
        return None


def _source_of(request: "Request") -> str:
    """`remote_kv_source` as llm-d's sidecar writes it; one that is none costs a computed prompt."""
    said: Any = (request.kv_transfer_params or {}).get("remote_kv_source")
    if said is None:
        return ""
    host = said.get("remote_host") if isinstance(said, dict) else None
    if not isinstance(host, str) or not 0 < len(host) <= HOST_LIMIT:
        logger.warning("remote_kv_source has no remote_host, and is left alone: %.80r", said)
        return ""
    # The port is that of another connector: a store is known by its host.
    return host


def _labels_of(request: "Request", labels: Labels) -> Labels:
    """Labels, which are not left alone where they are none: nobody would find the session by them later."""
    own = labels_of((request.kv_transfer_params or {}).get("labels") or {})
    return checked_labels({**dict(labels), **dict(own)}.items())


def _salt_of(request: "Request") -> bytes:
    """A digest of vLLM's `cache_salt`, which may be of any length."""
    if not request.cache_salt:
        return b""
    return hashlib.sha256(request.cache_salt.encode(errors="surrogatepass")).digest()
