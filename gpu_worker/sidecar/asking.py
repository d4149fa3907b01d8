"""Engines' requests: read and checked against their attachment. Pure.

Worst case: a request that cannot be right, refused with the field that is wrong and nothing done.
"""

import re
from collections.abc import Sequence

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind
from gpu_worker.sidecar.attachment import Attachment
from gpu_worker.sidecar.restoring import RestoreOrder
from gpu_worker.v1 import worker_pb2

# Bounds on what one message may ask for: a plan, and arrays of slots, are made of these numbers.
TOKEN_LIMIT = 1 << 24
LENGTH_LIMIT = 1 << 16
LENGTHS_LIMIT = 8
_SESSION = re.compile(r"sessions/[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def restore(
    request: worker_pb2.RestoreRequest, attachment: Attachment, longest_s: float
) -> tuple[RestoreOrder, float]:
    """The restore that is asked for, and its seconds. Raises InvalidArgument."""
    _check_session(request.session)
    if not 1 <= len(request.restore_id) <= 128:
        raise InvalidArgument(field="restore_id", problem="has no 1 to 128 characters")
    if not 0 <= request.token_begin < request.token_end <= TOKEN_LIMIT:
        problem = f"[{request.token_begin}, {request.token_end}) is no token range"
        raise InvalidArgument(field="token_end", problem=problem)
    if request.new_token_count < 0:
        raise InvalidArgument(field="new_token_count", problem="is negative")
    # Before the session is looked at: a request that is wrong by itself costs the store nothing.
    attachment.layout.check_blocks(request.block_ids, request.token_end)
    if request.token_ids and len(request.token_ids) != request.token_end:
        problem = f"{len(request.token_ids)}, there are {request.token_end} tokens"
        raise InvalidArgument(field="token_ids", problem=problem)
    asked = RestoreOrder(
        restore_id=request.restore_id,
        session=request.session,
        begin=request.token_begin,
        end=request.token_end,
        block_ids=tuple(request.block_ids),
        token_ids=tuple(request.token_ids),
        generation=request.if_generation_match if request.HasField("if_generation_match") else None,
        new_tokens=request.new_token_count,
    )
    return asked, _timeout_s(request, longest_s)


def touched_blocks(asked: RestoreOrder, block_tokens: int) -> Sequence[int]:
    """The blocks that a restore writes to."""
    # token_begin = 20, blocks of 16: block 1 has tokens 16 to 31, and is written to from its row 4 on.
    #
    #     blocks   [ 0: untouched ][ 1 ........ ][ 2 ........ ]
    #     tokens   0               16   20        32
    return asked.block_ids[asked.begin // block_tokens :]


def check_save(request: worker_pb2.SaveRequest) -> None:
    """Raise InvalidArgument for what no session could take."""
    _check_session(request.session)
    if not 1 <= request.token_count <= TOKEN_LIMIT:
        raise InvalidArgument(field="token_count", problem=f"is not within [1, {TOKEN_LIMIT}]")
    if request.write_offset < 0:
        raise InvalidArgument(field="write_offset", problem="is negative")


def plan_kinds(request: worker_pb2.PlanRequest) -> list[StateKind]:
    """The kinds that a plan is to be made for. Raises InvalidArgument."""
    if not 1 <= request.token_count <= TOKEN_LIMIT or not 0 <= request.new_token_count <= TOKEN_LIMIT:
        raise InvalidArgument(field="token_count", problem=f"is not within [1, {TOKEN_LIMIT}]")
    known = {kind.value: kind for kind in StateKind}
    stray = [kind for kind in request.kinds if kind not in known]
    if stray:
        raise InvalidArgument(field="kinds", problem=f"{stray[0]} is not known")
    return [known[kind] for kind in request.kinds]


def lengths(request: worker_pb2.ProfileRequest) -> tuple[int, ...]:
    """Lengths to measure at, ascending. Raises InvalidArgument."""
    lengths = tuple(sorted(set(request.token_counts)))
    if len(lengths) > LENGTHS_LIMIT or any(not 1 <= length <= LENGTH_LIMIT for length in lengths):
        problem = f"more than {LENGTHS_LIMIT}, or one is not within [1, {LENGTH_LIMIT}]"
        raise InvalidArgument(field="token_counts", problem=problem)
    return lengths


def _timeout_s(request: worker_pb2.RestoreRequest, longest_s: float) -> float:
    if not request.HasField("timeout"):
        return longest_s
    timeout_s = request.timeout.seconds + request.timeout.nanos / 1e9
    if timeout_s <= 0:
        raise InvalidArgument(field="timeout", problem="is not more than 0")
    return min(timeout_s, longest_s)


def _check_session(name: str) -> None:
    if not _SESSION.fullmatch(name):
        raise InvalidArgument(field="session", problem=f"{name[:160]!r} is no name of a session")
