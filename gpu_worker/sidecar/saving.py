"""Saving: rows that an engine has put into its save area, appended to a session of the store.

Runs in a thread of its own. Rows go from the engine's memory right into the store's. Worst case: a save that
the store refuses, of which nothing is visible.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ctxcache.client import Client
from ctxcache.client.convert import stream_from_wire
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.errors import InvalidArgument, SessionNotFound, WriteOffsetMismatch
from ctxcache.format.streams import Stream
from gpu_worker.sidecar.attachment import Attachment
from gpu_worker.v1 import worker_pb2


def save(client: Client, attachment: Attachment, request: worker_pb2.SaveRequest) -> SessionInfo:
    """Append the rows; the session as it is then. Raises InvalidArgument and what appending raises."""
    rows = _rows(attachment, request)
    session = _open(client, attachment, request, list(rows))
    return client.sessions.open(session, attachment.model.own).append(
        rows, durability=Durability(request.durability)
    )


def _rows(attachment: Attachment, request: worker_pb2.SaveRequest) -> Mapping[Stream, npt.NDArray[np.uint8]]:
    streams = [stream_from_wire(each.stream) for each in request.streams]
    if len(set(streams)) < len(streams) or not streams:
        raise InvalidArgument(field="streams", problem="none, or one is named twice")
    specs = attachment.model.own.specs(streams)
    found = {}
    for stream, each in zip(streams, request.streams, strict=True):
        size_bytes = request.token_count * specs[stream].row_bytes
        data = attachment.rows_in_save_area(stream, each.offset_bytes, size_bytes)
        found[stream] = data.numpy().reshape(request.token_count, specs[stream].row_bytes)
    return found


def _open(
    client: Client, attachment: Attachment, request: worker_pb2.SaveRequest, layout: list[Stream]
) -> SessionInfo:
    own = attachment.model.own
    try:
        session = client.sessions.get(request.session)
    except SessionNotFound:
        if request.write_offset:
            raise
        session_id = request.session.removeprefix("sessions/")
        session = client.sessions.create(own, id=session_id, layout=layout).info
    own.check(session.name, session.model_fingerprint)
    if session.token_count != request.write_offset:
        raise WriteOffsetMismatch(
            session=session.name, token_count=session.token_count, write_offset=request.write_offset
        )
    return session
