"""Messages as JSON: the proto's own field names, every field always there.

int64 is a number, an enum its name, bytes are hexadecimal, times and durations as protobuf's own
JSON writes them (`2030-01-31T12:00:00Z`, `3600s`); a message or optional field that is unset is null.
"""

from typing import Any, TypeAlias

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"


def to_plain(message: Message) -> dict[str, Plain]:
    """Return the message as what `json.dumps` takes."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


# Any: protobuf has two classes of descriptors, and which one it is depends on how it was built.
def _field(message: Message, field: Any) -> Plain:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_value(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: object, field: Any) -> Plain:
    match value:
        case Timestamp() | Duration():
            return value.ToJsonString()
        case Message():
            return to_plain(value)
        case bytes():
            return value.hex()
        case int() if field.enum_type is not None:
            known = field.enum_type.values_by_number.get(value)
            return known.name if known else value
        case bool() | int() | float() | str():
            return value
    raise TypeError(f"{field.full_name} is a {type(value).__name__}")
