"""The store's ids for the conversations that callers of engines name.

Callers name conversations as they like: by an e-mail address, a sentence, a path, in any script. The store's
ids have a small alphabet. A name within it is its own id; any other is known by its digest:

    alice                  alice
    alice@example.com      sha256:1e1b4b...    64 hex digits
    "", None               no name: the caller's request names no conversation
"""

import hashlib
import re

from ctxcache.errors import InvalidArgument
from ctxcache.format.ids import SESSION_ID

# Two names never have one id, for what is made here is told by its beginning and its end, and a name that
# has such a beginning or end is known by its digest, too:
#
#     name      alice          alice.rank1        sha256:0f3a...
#     id        alice          sha256:5b1c...     sha256:77e0...
#     rank 1    alice.rank1    sha256:5b1c....rank1
DIGEST = "sha256:"
_OURS = re.compile(r"\.rank[0-9]+")


def session_id(name: str) -> str:
    """The id of the session of the conversation that a caller names so. Raises InvalidArgument for none.

    To be asked of a caller's name, once: the id of an id may be another one.
    """
    if not name:
        raise InvalidArgument(field="session_id", problem="an empty name is no conversation's")
    is_ours = name.startswith(DIGEST) or _OURS.fullmatch(name[name.rfind(".") :])
    return name if SESSION_ID.fullmatch(name) and not is_ours else _digest(name)


def part_of(id_: str, rank: int) -> str:
    """The id of the session that has a rank's part of the session of this id."""
    part = f"{id_}.rank{rank}"
    return part if SESSION_ID.fullmatch(part) else f"{_digest(id_)}.rank{rank}"


def _digest(name: str) -> str:
    # Of code points as they are: names that look alike are different callers' names. A lone surrogate is no
    # character, and a name may have it nevertheless.
    return DIGEST + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
