"""Enumerations of the wire, which a newer server may have more members of."""

import enum
from typing import Self


class OpenEnum(enum.IntEnum):
    """An enumeration of the wire.

    A value that only a newer server knows becomes a member without a meaning.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_, member._value_ = f"UNKNOWN_{value}", value
        return member
