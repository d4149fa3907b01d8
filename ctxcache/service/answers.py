"""Answers of many entries, encoded an entry at a time: so that none takes the event loop for long, or grows too large.

To encode 3 MiB of small messages at once takes a dozen milliseconds; put together they cost a copy. Knows no
cache. Worst case: one entry that is larger than an answer may be goes alone.
"""

from google.protobuf.message import Message

from ctxcache.errors import InvalidArgument

PAGE_SIZE = 50
PAGE_SIZE_LIMIT = 1000
ANSWER_LIMIT_BYTES = 3 << 20
"""The most that an answer has: stock clients take 4 MiB."""
PAGE_LIMIT_BYTES = 1 << 20
"""The most that a page of a list has: gRPC takes a millisecond of the event loop to send so much."""
LENGTH_DELIMITED = 2
"""How protobuf says that a field has its length before it."""


def entry(field: int, encoded: bytes) -> bytes:
    """A message that has this one as an entry of a field, whose number is below 16."""
    size, length = bytearray(), len(encoded)
    while length >= 0x80:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    return bytes((field << 3 | LENGTH_DELIMITED,)) + bytes(size) + encoded


class Answer:
    """One answer in the making."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size_bytes = 0

    def add(self, part: Message) -> None:
        """More of it: an answer that has one entry, or nothing but what is said once."""
        self.add_encoded(part.SerializeToString())

    def add_encoded(self, part: bytes) -> None:
        """As `add`, already encoded."""
        self._parts.append(part)
        self.size_bytes += len(part)

    def encoded(self) -> bytes:
        """All of it: encoded messages one after the other are the message that has the entries of them all."""
        return b"".join(self._parts)


class Page(Answer):
    """A page of a list: so many entries at most, and so many bytes."""

    def __init__(self, size: int) -> None:
        """`size` as it was asked for. Raises InvalidArgument."""
        super().__init__()
        if size < 0:
            raise InvalidArgument(field="page_size", problem="is negative")
        self.limit = min(size or PAGE_SIZE, PAGE_SIZE_LIMIT)
        self._last_id = ""
        self.next_page_token = ""
        """The token for what follows; empty while everything was taken."""

    def takes(self, listed_id: str, part: Message) -> bool:
        """Add an answer that has one entry; False, and the page is over, where it belongs to the next one."""
        return self.takes_encoded(listed_id, part.SerializeToString())

    def takes_encoded(self, listed_id: str, encoded: bytes) -> bool:
        """As `takes`, already encoded."""
        is_full = len(self._parts) == self.limit or self.size_bytes + len(encoded) > PAGE_LIMIT_BYTES
        if self._parts and is_full:
            self.next_page_token = f"after:{self._last_id}"
            return False
        self.add_encoded(encoded)
        self._last_id = listed_id
        return True
