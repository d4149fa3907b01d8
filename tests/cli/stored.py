"""Sessions for commands to work on: a small model, and sessions with tokens in them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

import ctxcache
from ctxcache.client import Client
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from tests.model_specs import small_model

HIDDEN = Stream(0, StateKind.HIDDEN)
ROW_BYTES = 32
TOKEN_COUNT = 100


def model_spec(model_id: str = "tiny") -> ModelSpec:
    """Describe a model of one layer whose state may be cut anywhere."""
    return small_model(
        StreamSpec(HIDDEN, ROW_BYTES, DType.FLOAT16),
        model_id=model_id,
        revision="1",
        hidden_size=16,
        head_size=16,
    )


@contextmanager
def connected(target: str) -> Iterator[Client]:
    """Open a client that needs no arena."""
    with ctxcache.connect(target, access="remote") as client:
        yield client


def store_session(
    target: str, session_id: str, *, token_count: int = TOKEN_COUNT, model_id: str = "tiny"
) -> str:
    """Create a session with tokens in it; return its name."""
    with connected(target) as client:
        model = client.models.register(model_spec(model_id))
        session = client.sessions.create(model, id=session_id, layout=[HIDDEN])
        if token_count:
            rows: dict[Stream, npt.NDArray[np.generic]] = {
                TOKENS: np.arange(token_count, dtype=np.int32).reshape(-1, 1),
                HIDDEN: np.zeros((token_count, ROW_BYTES), np.uint8),
            }
            session.append(rows)
    return session.name
