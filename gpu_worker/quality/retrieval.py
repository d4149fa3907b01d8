"""Retrieval under truncation: whether a model still finds what stands in the kept half of its context.

In the manner of LongEval's lines (CachedAttention, Table 2): names with numbers, a cut, and a question for each.
"""

import random
from collections.abc import Callable, Sequence

from gpu_worker.families import Adapter
from gpu_worker.quality.context import Context, Cut

Encode = Callable[[str], list[int]]
_NAMES = (
    "apple", "river", "candle", "garden", "silver", "window", "basket", "thunder", "pepper", "castle", "ribbon",
    "marble", "forest", "button", "anchor", "violin", "copper", "meadow", "pillow", "dragon",
)  # fmt: skip
DIGITS = 3


def accuracies(
    adapter: Adapter, filler: Sequence[int], encode: Encode, cuts: Sequence[Cut], *, window: int, sink_count: int,
    seed: int = 1, step: Callable[[Cut, int], None] = lambda _cut, _count: None,
) -> dict[Cut, float]:  # fmt: skip
    """The share of questions answered digit by digit, greedily, after the context was cut.

    The window is `filler` and then facts, which are in the half that stays. Raises ValueError for too little filler.
    """
    facts = _facts(seed)
    told = [token for name, number in facts for token in encode(_fact(name, number))]
    if len(told) > window // 2 - sink_count or len(filler) < window - len(told):
        raise ValueError(f"{len(told)} tokens of facts, {len(filler)} of filler, a window of {window}")
    begun = Context.empty(adapter, Cut.NONE, sink_count=sink_count)
    begun.feed([*filler[: window - len(told)], *told])
    found = {}
    for cut in cuts:
        context = begun.fork(cut)
        context.halve()
        right_count = 0
        for number, (name, expected) in enumerate(facts, 1):
            right_count += _answer(context.fork(), encode(_question(name)), encode(f" {expected}"))
            step(cut, number)
        found[cut] = right_count / len(facts)
    return found


def _answer(context: Context, question: Sequence[int], expected: Sequence[int]) -> bool:
    new = list(question)
    for token in expected:
        if int(context.feed(new)[-1].argmax()) != token:
            return False
        new = [token]
    return True


def _facts(seed: int) -> list[tuple[str, str]]:
    numbers = random.Random(seed)  # noqa: S311  a load, no secret
    return [(name, "".join(str(numbers.randrange(10)) for _ in range(DIGITS))) for name in _NAMES]


def _fact(name: str, number: str) -> str:
    return f" The code of the {name} is {number}.\n"


def _question(name: str) -> str:
    return f" Question: what is the code of the {name}? Answer: The code of the {name} is"
