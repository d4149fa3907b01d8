"""The policies that a server can place by, and in a few words what leaves first.

The one list that settings, --help, the status page and tests read. A leaf, because every command imports the
settings.
"""

from typing import Literal, get_args

PolicyName = Literal["lru", "fifo", "t-lru", "look-ahead", "value"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
WORDS: dict[str, str] = {
    "lru": "the least recently used leaves first",
    "fifo": "what came first leaves first",
    "t-lru": "what is soon computed again leaves first, then the least recently used",
    "look-ahead": "sessions of waiting jobs stay, and of others the least recently used leaves first",
    "value": "sessions leave first whose expected return is worth least for their bytes",
}
