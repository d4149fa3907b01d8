"""The names of the policies that a server can place by: the one list that settings, --help and tests read.

A leaf, because every command imports the settings.
"""

from typing import Literal, get_args

PolicyName = Literal["lru", "fifo", "t-lru", "look-ahead", "value"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
