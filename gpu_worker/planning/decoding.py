"""How a decoding step brings back keys and values that do not fit the device (KVPR).

At each step and layer, tokens [0, l) come back from their layer inputs, which are copied and projected, and
the rest as K and V, which are only copied. The copying stream runs ahead of the computing one:

    copy      [inputs][K and V  ][inputs][K and V  ]
    compute           [project ]        [rest][project ]        [rest]

`closed_split` is KVPR's answer for one layer by itself, with nothing under way in the layers beside it;
`searched_split` looks at the pipeline of all layers. Pure. Worst case: rates that are wrong for this machine,
a step that takes longer than a better split would; never other tokens.
"""

from dataclasses import dataclass

from ctxcache.errors import InvalidArgument
from gpu_worker.planning.baselines import kvpr_split
from gpu_worker.planning.block import NOTHING, START, StreamBlock, step
from gpu_worker.planning.holding import SPLIT_TOKENS
from gpu_worker.planning.profile import NO_LIMIT


@dataclass(frozen=True, slots=True)
class DecodeRates:
    """The times of one layer on a machine. Seconds; per token, but for `layer_s`.

    `activation_s` and `kv_s` copy a token's layer input, and its K and V; `recompute_s` projects one;
    `attention_s` is attention over one; `layer_s` is the rest of the layer, for the tokens of the step.
    """

    activation_s: float
    kv_s: float
    recompute_s: float
    attention_s: float = 0.0
    layer_s: float = 0.0

    def __post_init__(self) -> None:
        positive = (self.activation_s, self.kv_s, self.recompute_s)
        others = (self.attention_s, self.layer_s)
        if not all(0 < each < NO_LIMIT for each in positive) or not all(
            0 <= each < NO_LIMIT for each in others
        ):
            raise InvalidArgument(field="rates", problem=f"{self} has a rate that is none")


def step_s(rates: DecodeRates, token_count: int, split: int, layer_count: int) -> float:
    """Seconds of one step of `layer_count` layers over `token_count` tokens, `split` of them projected."""
    # The layers' blocks are equal, so that n of them are a
    # power: doubled in turn, in the logarithm of n steps.
    block = _layer(rates, token_count, split)
    whole, power = NOTHING, block
    while layer_count:
        if layer_count & 1:
            whole = whole.then(power)
        power, layer_count = power.then(power), layer_count >> 1
    return whole.after(START)[2]


def closed_split(rates: DecodeRates, token_count: int) -> int:
    """KVPR's equation 10, with activations that are transferred. Source: KVPR, ACL 2025, section 3.2."""
    return kvpr_split(
        token_count,
        activation_s=rates.activation_s,
        recompute_s=rates.recompute_s,
        kv_s=rates.kv_s,
    )


def searched_split(rates: DecodeRates, token_count: int, layer_count: int) -> int:
    """The split by which all layers are through first: none, all, the closed form's, or between segments."""
    # The closed form's answer is among them: the search is never worse.
    cuts: set[int] = {0, token_count, closed_split(rates, token_count), *range(0, token_count, SPLIT_TOKENS)}
    # The smaller split wins among equal times: it projects less.
    _, split = min((step_s(rates, token_count, cut, layer_count), cut) for cut in cuts)
    return split


def _layer(rates: DecodeRates, token_count: int, split: int) -> StreamBlock:
    # One layer at one step, l = split of T tokens, in seconds:
    #
    #     copy      [l * activation ][(T - l) * kv ]      ahead of the computing stream
    #     compute                   [l * recompute]  [layer + T * attention]     behind the last copy
    inputs = step(copy_s=split * rates.activation_s, compute_s=split * rates.recompute_s)
    rest_s = rates.layer_s + token_count * rates.attention_s
    return inputs.then(step(copy_s=(token_count - split) * rates.kv_s, compute_s=rest_s))
