"""The register: small objects that all hosts see, changed by compare-and-swap and in no other way.

`storage/register.py` has it in buckets and, for the stores of one machine, in a directory.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

OBJECT_LIMIT_BYTES = 1 << 18
"""More than any object of a fleet has."""


class Refused(Exception):
    """The condition of a change did not hold, as far as the register says: nothing was changed."""


class NoAnswer(Exception):
    """Nothing was heard in time: a change may have been made, or may yet be made."""


class Entry(NamedTuple):
    """An object as it was read. Equal tags mean equal bytes."""

    body: bytes
    tag: str


class Register(Protocol):
    """The calls of a register. Every one of them may raise NoAnswer."""

    async def get(self, path: str) -> Entry | None:
        """The object; None where there is none. One longer than `OBJECT_LIMIT_BYTES` counts as empty."""

    async def create(self, path: str, body: bytes) -> str:
        """Make an object that is not there, and return its tag. Raises Refused."""

    async def replace(self, path: str, body: bytes, tag: str) -> str:
        """Put other bytes in the place of those that have this tag, and return theirs. Raises Refused."""

    async def remove(self, path: str) -> None:
        """Remove an object that nobody else changes, if it is there."""

    def paths(self, folder: str) -> AsyncIterator[str]:
        """The paths below a folder, `a/b/`, in no order."""


TRIES = 3
"""How often a change without an answer is asked for again."""


# No answer is neither yes nor no. The bytes of a change have a nonce of their own, so that what is read back
# tells the three cases apart, and the same change may be asked for again:
#
#     our bytes are there            it was made, whatever was answered
#     what was there before          not made, and it may still be on its way: the same bytes once more
#     other bytes                    another one was made, and ours never will be
async def put(register: Register, path: str, body: bytes, before: Entry | None) -> Entry | None:
    """Change an object from `before`, None for none, to `body`.

    Returns what is there then: our own bytes where the change was made. Raises NoAnswer.
    """
    for _ in range(TRIES):
        try:
            if before is None:
                return Entry(body, await register.create(path, body))
            return Entry(body, await register.replace(path, body, before.tag))
        except Refused:
            # A refusal is looked at, too: some buckets refuse a change that an earlier try has made.
            is_final = True
        except NoAnswer:
            is_final = False
        found = await register.get(path)
        if is_final or (found and found.tag) != (before and before.tag):
            return found
    raise NoAnswer(f"{path} takes no change")
