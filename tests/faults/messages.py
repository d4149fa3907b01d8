"""Messages that no honest client sends, and some that it does: what the fuzzer throws at every rpc.

Built from the contract's own descriptors, so that a new rpc or field is covered the day it appears.
Pure but for the random numbers it is given.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

MAX_DEPTH = 6
HOSTILE_TEXTS: tuple[str, ...] = (
    "",
    "/",
    "sessions/",
    "models/",
    "sessions/..",
    "sessions/../../etc/passwd",
    "sessions/a/b",
    "sessions/.a",
    "sessions/a\0b",
    "sessions/a\n",
    "sessions/%00",
    "sessions/%2e%2e%2f",
    "sessions/\u0430",
    "models/\u0430bc",
    "sessions/\u202eabc",
    "sessions/a\u0301",
    "sessions/\u1e9e",
    "sessions/\uff41",
    "sessions/" + "x" * 128,
    "sessions/" + "x" * 129,
    "models/" + "y" * 129,
    "SESSIONS/a",
    " sessions/a",
    "sessions/a ",
    "sessions//a",
    "after:",
    "after:\0",
    "after:zzz",
    "$(reboot)",
    "'; drop table sessions; --",
    "{}",
    "%s%n",
    "\ufeff",
    "\U0001f4a5" * 50,
    "z" * 100_000,
)
HOSTILE_NAME_BYTES = (3 << 20, 10 << 20)
"""Sizes of names below and beyond what one message may have."""
INTEGERS: tuple[int, ...] = (
    0,
    1,
    2,
    -1,
    3,
    63,
    64,
    65,
    127,
    128,
    1000,
    1001,
    1 << 20,
    2**31 - 1,
    -(2**31),
    2**32,
    2**63 - 1,
    -(2**63),
)
_SIGNED_32 = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_ENUM)
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)


@dataclass(frozen=True, slots=True)
class Plausible:
    """Values that mean something to the server under test: they get a message past the first check."""

    sessions: Sequence[str]
    models: Sequence[str]
    fingerprints: Sequence[bytes]


class MessageMaker:
    """Draws messages of any type, each field unset, plausible or hostile."""

    def __init__(self, draw: random.Random, plausible: Plausible) -> None:
        self._draw = draw
        self._plausible = plausible

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """One message of that type."""
        made = GetMessageClass(descriptor)()
        # Only the last member of a oneof that is set stays: the others would be drawn for nothing.
        fields = [field for field in descriptor.fields if field.containing_oneof is None]
        fields += [self._draw.choice(oneof.fields) for oneof in descriptor.oneofs]
        self._draw.shuffle(fields)
        for field in fields:
            if self._draw.random() < (0.75 if depth < MAX_DEPTH else 0):
                self._fill(made, field, depth)
        return made

    def encoded(self, descriptor: Descriptor) -> bytes:
        """One message as bytes, now and then damaged on its way, so that it may not even parse."""
        raw = self.message(descriptor).SerializeToString()
        return mutate(self._draw, raw) if self._draw.random() < 0.15 else raw

    def _fill(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        if field.is_repeated:
            count = self._draw.choice((0, 1, 1, 2, 3, 3 if depth else 1500))
            target = getattr(made, field.name)
            for _ in range(count):
                self._append(target, field, depth)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            getattr(made, field.name).CopyFrom(self.message(_type_of(field), depth + 1))
        else:
            setattr(made, field.name, self._scalar(field))

    def _append(self, target: Any, field: FieldDescriptor, depth: int) -> None:
        if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            target.append(self._scalar(field))
        elif (kind := _type_of(field)).GetOptions().map_entry:
            key, value = (self._scalar(kind.fields_by_name[name]) for name in ("key", "value"))
            target[key] = value
        elif depth < MAX_DEPTH:
            target.add().CopyFrom(self.message(_type_of(field), depth + 1))

    def _scalar(self, field: FieldDescriptor) -> object:
        makers: dict[int, Callable[[FieldDescriptor], object]] = {
            FieldDescriptor.CPPTYPE_STRING: self._text,
            FieldDescriptor.CPPTYPE_BOOL: lambda _: self._draw.random() < 0.5,
            FieldDescriptor.CPPTYPE_DOUBLE: lambda _: self._draw.choice((0.0, -1.0, 1e308, float("nan"))),
            FieldDescriptor.CPPTYPE_FLOAT: lambda _: self._draw.choice((0.0, -1.0, float("inf"))),
        }
        return makers.get(field.cpp_type, self._integer)(field)

    def _text(self, field: FieldDescriptor) -> str | bytes:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes(field)
        if self._draw.random() < 0.25:
            return self._draw.choice(HOSTILE_TEXTS)
        if field.name == "session_id":
            return self._draw.choice(self._plausible.sessions).removeprefix("sessions/")
        is_model = field.name == "model" or "Model" in field.full_name
        return self._draw.choice(self._plausible.models if is_model else self._plausible.sessions)

    def _bytes(self, field: FieldDescriptor) -> bytes:
        if "fingerprint" in field.name and self._draw.random() < 0.8:
            return self._draw.choice(self._plausible.fingerprints)
        return self._draw.randbytes(self._draw.choice((0, 1, 16, 32, 33, 256, 4096, 70_000)))

    def _integer(self, field: FieldDescriptor) -> int:
        if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            number = int(self._draw.choice((0, 1, 2, 3, 4, 99, -1)))
        else:
            number = self._draw.choice(INTEGERS) if self._draw.random() < 0.4 else self._draw.randrange(300)
        if field.cpp_type in _UNSIGNED:
            return abs(number) % (1 << (32 if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32 else 64))
        return _clip(number, 31 if field.cpp_type in _SIGNED_32 else 63)


def hostile_texts(descriptor: Descriptor) -> Iterator[Message]:
    """One message for every text field and every hostile text, nothing else in it."""
    texts = [*HOSTILE_TEXTS, *("sessions/" + "n" * size for size in HOSTILE_NAME_BYTES)]
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated:
            for text in texts:
                yield GetMessageClass(descriptor)(**{field.name: text})


def mutate(draw: random.Random, raw: bytes) -> bytes:
    """Flip, cut, double or invent a few bytes."""
    data = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        what = draw.randrange(5)
        if what == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif what == 1:
            del data[at:]
        elif what == 2:
            data[at:at] = draw.randbytes(draw.randint(1, 12))
        elif what == 3:
            data[at:at] = data[: draw.randrange(64)]
        else:
            # A length that promises more than there is.
            data[at:at] = bytes((draw.choice((0x0A, 0x12, 0x1A)), 0xFF, 0xFF, 0xFF, 0x7F))
    return bytes(data)


def _clip(number: int, bits: int) -> int:
    limit = int(2**bits)
    return max(min(number, limit - 1), -limit)


def _type_of(field: FieldDescriptor) -> Descriptor:
    if field.message_type is None:
        raise TypeError(f"{field.full_name} is no message")
    return field.message_type
