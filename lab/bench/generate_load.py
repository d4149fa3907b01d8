"""Writes a trace for `ctxcache simulate`: `python -m lab.bench.generate_load OUT --think 300 --rate 0.5`.

Sessions begin as a Poisson process. One in `p1` has one turn, the others 1 + ceil(lognormal), at most 40;
each has a factor of length, each turn a lognormal input and output of it. A turn comes one think time after
the last came. The two profiles are those of ../shared/data/sharegptlike_profiles.json: CachedAttention's and
HCache's ShareGPT. Same arguments, same bytes. Memory: a number of bytes per turn, as they are sorted by
arrival.
"""

import argparse
import gzip
import io
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

MOST_TURNS = 40
HEADER = "session_id,turn,arrival_ms,new_input_tokens,output_tokens,history_tokens\n"
Row = tuple[int, int, int, int, int, int]
"""arrival_ms, session, turn, input, output and history tokens."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Lengths in tokens are means; sigmas are of logarithms. `scale` is the mean of a session's factor."""

    single_turn_share: float
    turns_mu: float
    turns_sigma: float
    input_sigma: float
    output_sigma: float
    session_sigma: float
    scale: float
    input_tokens: float = 66.8
    output_tokens: float = 358.8


PROFILES = {
    "ca": Profile(0.27, 1.2439, 1.1, 1.4, 0.75, 0.7, 1.7595),
    "hcache": Profile(0.1, 1.7236, 0.8, 1.4, 0.75, 0.4, 1.0),
}


@dataclass(frozen=True, slots=True)
class Pace:
    """`think_sigma` 0: every think time is the mean; else lognormal with that mean."""

    session_count: int
    sessions_per_s: float
    think_s: float
    think_sigma: float


def rows(profile: Profile, pace: Pace, seed: int) -> list[Row]:
    """Return every turn, sorted by arrival."""
    chance = random.Random(seed)  # noqa: S311  a load, no secret
    made: list[Row] = []
    begin_s = 0.0
    for session in range(pace.session_count):
        begin_s += chance.expovariate(pace.sessions_per_s)
        made.extend(_session(profile, pace, chance, session, begin_s))
    return sorted(made)


def _session(
    profile: Profile, pace: Pace, chance: random.Random, session: int, begin_s: float
) -> Iterator[Row]:
    turn_count = 1
    if chance.random() >= profile.single_turn_share:
        more = math.ceil(chance.lognormvariate(profile.turns_mu, profile.turns_sigma))
        turn_count = min(1 + more, MOST_TURNS)
    factor = profile.scale * _around_one(chance, profile.session_sigma)
    arrival_s, history_tokens = begin_s, 0
    for turn in range(1, turn_count + 1):
        input_tokens = _tokens(factor * profile.input_tokens * _around_one(chance, profile.input_sigma))
        output_tokens = _tokens(factor * profile.output_tokens * _around_one(chance, profile.output_sigma))
        yield round(arrival_s * 1000), session, turn, input_tokens, output_tokens, history_tokens
        history_tokens += input_tokens + output_tokens
        arrival_s += pace.think_s * _around_one(chance, pace.think_sigma)


def _around_one(chance: random.Random, sigma: float) -> float:
    """Lognormal with mean 1."""
    return chance.lognormvariate(-sigma * sigma / 2, sigma)


def _tokens(length: float) -> int:
    return max(round(length), 1)


def write(path: Path, turns: list[Row]) -> None:
    """Write them as `ctxcache simulate` reads them, gzipped where the name ends in .gz."""
    text = io.StringIO()
    text.write(HEADER)
    for arrival_ms, session, turn, input_tokens, output_tokens, history_tokens in turns:
        text.write(f"{session},{turn},{arrival_ms},{input_tokens},{output_tokens},{history_tokens}\n")
    encoded = text.getvalue().encode()
    path.write_bytes(gzip.compress(encoded, mtime=0) if path.suffix == ".gz" else encoded)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def main() -> None:
    """Read the arguments, write the trace."""
    parser = argparse.ArgumentParser(description="Write a trace of sessions for `ctxcache simulate`.")
    parser.add_argument("path", type=Path, help="where to; .gz gzips")
    parser.add_argument(
        "--profile", choices=PROFILES, default="ca", help="whose lengths and turns (default: ca)"
    )
    parser.add_argument("--sessions", type=int, default=9000, help="how many sessions (default: 9000)")
    parser.add_argument(
        "--rate", type=_positive, default=1.0, help="sessions beginning a second (default: 1.0)"
    )
    parser.add_argument(
        "--think", type=_positive, default=30.0, help="mean seconds from turn to turn (default: 30)"
    )
    parser.add_argument(
        "--think-sigma", type=float, default=0.0, help="its spread, of logarithms (default: 0)"
    )
    parser.add_argument(
        "--lengths-times", type=_positive, default=1.0, help="lengthen every turn so (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    profile = PROFILES[given.profile]
    profile = replace(profile, scale=profile.scale * given.lengths_times)
    pace = Pace(given.sessions, given.rate, given.think, given.think_sigma)
    write(given.path, rows(profile, pace, given.seed))


if __name__ == "__main__":
    main()
