"""The client's plain types: each stands for its message, whole, and nothing of the wire is part of one."""

import random
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest
from google.protobuf.message import Message

from ctxcache.client import messages, types
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import DType, StateKind, StreamRange
from ctxcache.v1 import model_pb2, session_pb2

CASES = [
    pytest.param(
        get_type_hints(write)["return"],
        getattr(messages, write.__name__.replace("write", "read")),
        write,
        id=kind.__name__,
    )
    for kind, write in messages.WRITERS.items()
]
"""Each message, how it becomes its plain type, and how that becomes a message again."""
UNKNOWN = 77
"""A number that no enumeration of this version has."""


def fill(message: Message, draw: random.Random) -> Message:
    """Give every field a value, some of them the defaults; repeated ones have two."""
    for field in message.DESCRIPTOR.fields:
        held: Any = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            held.update({f"key{number}": "text" for number in range(draw.randrange(3))})
        elif field.message_type is not None:
            for part in [held.add(), held.add()] if field.is_repeated else [held]:
                part.SetInParent()
                if field.message_type.full_name.startswith("google.protobuf"):
                    part.seconds, part.nanos = draw.randrange(1, 10**9), draw.randrange(10**9)
                else:
                    fill(part, draw)
        elif field.is_repeated:
            held.extend([_value(field, draw), _value(field, draw)])
        elif draw.random() < 0.8:
            setattr(message, field.name, _value(field, draw))
    return message


def _value(field: Any, draw: random.Random) -> Any:
    if field.enum_type is not None:
        return draw.choice([*(value.number for value in field.enum_type.values), UNKNOWN])
    by_type = {field.TYPE_STRING: "text", field.TYPE_BYTES: b"bytes", field.TYPE_BOOL: True}
    return by_type.get(field.type, draw.randrange(1, 1000))


@pytest.mark.parametrize(("message", "read", "write"), CASES)
def test_a_message_comes_back_as_it_was(message: type[Message], read: Any, write: Any) -> None:
    """No field is lost or changed on the way to the plain type and back, whatever the server's version."""
    draw = random.Random(message.__name__)
    for sent in [fill(message(), draw) for _ in range(20)]:
        assert write(read(sent)) == sent
    # A model's streams are always set: they become an empty message of their own.
    unset = read(message())
    assert read(write(unset)) == unset


@pytest.mark.parametrize(("message", "read", "write"), CASES)
def test_plain_types_are_frozen_and_hold_no_message(message: type[Message], read: Any, write: Any) -> None:
    """A fact can be kept, compared and hashed: whatever is in it is plain, too."""
    plain = read(fill(message(), random.Random(1)))
    hash(plain)
    for part in _parts(plain):
        assert not isinstance(part, Message)
        assert type(part).__module__.partition(".")[0] in {"builtins", "ctxcache"}


def _parts(plain: Any) -> list[Any]:
    if is_dataclass(plain):
        return [plain, *(part for one in fields(plain) for part in _parts(getattr(plain, one.name)))]
    return [part for one in plain for part in _parts(one)] if isinstance(plain, tuple) else [plain]


def test_what_only_a_newer_server_knows_is_kept_and_not_used() -> None:
    """An unknown outcome has a number and no meaning.

    An unknown kind is refused where its streams are asked for.
    """
    assert types.HintOutcome(UNKNOWN) == UNKNOWN
    assert types.HintOutcome(UNKNOWN) not in list(types.HintOutcome)
    session = messages.read_session_info(
        session_pb2.Session(layout=[model_pb2.StreamRange(kind=UNKNOWN, layer_end=1)])  # type: ignore[arg-type]
    )
    with pytest.raises(InvalidArgument):
        session.streams()
    model = messages.read_model_info(model_pb2.Model(name="models/m", dtype=UNKNOWN))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        _ = model.spec


def test_streams_are_named_by_what_they_hold() -> None:
    """Each constructor names its kind, and a session lists streams in storage order."""
    session = types.SessionInfo(layout=(StreamRange(StateKind.KV, 0, 2), StreamRange(StateKind.HIDDEN, 0, 1)))

    assert session.streams() == [types.hidden(0), types.kv(0), types.kv(1)]
    assert types.latent(3).kind is StateKind.LATENT
    assert types.StoredStreams().dtype is DType.PACKED
