"""The client's plain types: each stands for its message, whole, and nothing of the wire is part of one."""

import random
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from google.protobuf.message import Message

from ctxcache.client import convert, types
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import DType, StateKind, StreamRange
from ctxcache.v1 import model_pb2, session_pb2

PAIRS = sorted(convert._MESSAGES.items(), key=lambda pair: pair[0].__name__)
IDS = [kind.__name__ for kind, _ in PAIRS]
UNKNOWN = 77
"""A number that no enumeration of this version has."""


def fill(message: Message, draw: random.Random) -> Message:
    """Give every field a value, some of them the defaults; repeated ones have two."""
    for field in message.DESCRIPTOR.fields:
        held: Any = getattr(message, field.name)
        if field.message_type is not None:
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


@pytest.mark.parametrize(("kind", "message"), PAIRS, ids=IDS)
def test_a_message_comes_back_as_it_was(kind: type, message: type[Message]) -> None:
    """No field is lost or changed on the way to the plain type and back, whatever the server's version."""
    draw = random.Random(kind.__name__)
    for found in [message(), *(fill(message(), draw) for _ in range(20))]:
        assert convert.to_wire(convert.from_wire(kind, found)) == found


@pytest.mark.parametrize(("kind", "message"), PAIRS, ids=IDS)
def test_every_field_of_a_message_has_its_plain_one(kind: type, message: type[Message]) -> None:
    """A field that is added to the contract has to be added to the plain type."""
    names = {convert._wire_name(name) for name in convert._names(kind)}

    assert names == set(message.DESCRIPTOR.fields_by_name)


def test_plain_types_are_frozen_and_hold_no_message() -> None:
    """A fact can be kept, compared and hashed: whatever is in it is plain, too."""
    draw = random.Random(1)
    for kind, message in PAIRS:
        plain: Any = convert.from_wire(kind, fill(message(), draw))
        hash(plain)
        for part in _parts(plain):
            assert not isinstance(part, Message)
            assert type(part).__module__.partition(".")[0] in {"builtins", "ctxcache"}


def _parts(plain: Any) -> list[Any]:
    if is_dataclass(plain):
        return [plain, *(part for one in fields(plain) for part in _parts(getattr(plain, one.name)))]
    return [part for one in plain for part in _parts(one)] if isinstance(plain, tuple) else [plain]


def test_a_session_is_read_by_hand_as_field_by_field() -> None:
    """The quick way and the general one agree."""
    draw = random.Random(2)
    for _ in range(20):
        message = fill(session_pb2.Session(), draw)
        assert isinstance(message, session_pb2.Session)
        assert convert.session_from_wire(message) == convert.from_wire(types.SessionInfo, message)


def test_what_only_a_newer_server_knows_is_kept_and_not_used() -> None:
    """An unknown outcome has a number and no meaning.

    An unknown kind is refused where its streams are asked for.
    """
    assert types.HintOutcome(UNKNOWN) == UNKNOWN
    assert types.HintOutcome(UNKNOWN) not in list(types.HintOutcome)
    session = convert.session_from_wire(
        session_pb2.Session(layout=[model_pb2.StreamRange(kind=UNKNOWN, layer_end=1)])  # type: ignore[arg-type]
    )
    with pytest.raises(InvalidArgument):
        session.streams()
    model = convert.from_wire(types.ModelInfo, model_pb2.Model(name="models/m", dtype=UNKNOWN))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        _ = model.spec


def test_streams_are_named_by_what_they_hold() -> None:
    """Each constructor names its kind, and a session lists streams in storage order."""
    session = types.SessionInfo(layout=(StreamRange(StateKind.KV, 0, 2), StreamRange(StateKind.HIDDEN, 0, 1)))

    assert session.streams() == [types.hidden(0), types.kv(0), types.kv(1)]
    assert types.latent(3).kind is StateKind.LATENT
    assert types.StoredStreams().dtype is DType.PACKED
