"""What an engine lets the planner do."""

from dataclasses import dataclass

from ctxcache.format.streams import StateKind

SPLIT_TOKENS = 64
"""Splits fall between the store's segments."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's abilities.

    `can_recompute`: it offers its first layers to be run by themselves. `starts_by_layer`: it begins
    with new tokens when layer 0 is restored, and takes each later layer as it comes; otherwise it
    starts when all are there. `can_split`: a layer's tokens may come back by two methods.
    `split_count`: most splits of a layer that are looked at. `lossy_kinds`: packed kinds that the caller takes,
    from `loss.allowed_loss`; none unless said so.
    """

    can_recompute: bool = True
    starts_by_layer: bool = False
    can_split: bool = False
    split_count: int = 7
    lossy_kinds: frozenset[StateKind] = frozenset()
