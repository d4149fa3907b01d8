"""What no honest caller sends, and some of what it does: for what a request may bring to an adapter.

Pure but for the random numbers it is given. A short run is part of `make engines`; a long one is
`CTXCACHE_FUZZ=50000 make engines ARGS="-k fuzz --timeout 7200"`.
"""

import json
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

COUNT = int(os.environ.get("CTXCACHE_FUZZ", "1500"))
"""Requests of each fuzz."""
TEXTS = (
    "",
    " ",
    "a",
    "alice@example.com",
    "a/b/../c",
    "sessions/../x",
    "a\0b",
    "a\r\nX-A: b",
    "Привет",
    "\u202eabc",
    "a\u0301",
    "\ufeff",
    "\ud800",
    "a\udfffb",
    "\U0001f4a5" * 50,
    "%s%n%x",
    "<__media__>",
    "<|im_end|>",
    "x" * 300,
    "sha256:" + "0" * 64,
    "a.rank1",
    "../../etc/passwd",
    "$(reboot)",
    "{{ 1/0 }}",
)
LONG = 100_000
"""Characters of a long text."""
NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 63, 64, 127, 128, 255, 256, 4096),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1e-320, 1e15, 8.64e13, 1e300, -1e300),
)
WORDS = (
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"-1e999",
        b"9" * 5000,
        b"0x1",
        b"01",
        b"'a'",
        b"undefined",
    ),
    *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff"', b'"\xc0\xaf"', b'"\\x"', b'"\x01"', b'"open', b""),
)
"""Words in the place of a value, most of which are no JSON."""
DEPTHS = (1, 3, 30, 99, 101, 900, 5000)


class Hostile:
    """Draws texts, numbers, values of JSON, and bodies."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def text(self) -> str:
        """A text."""
        kind = self.draw.random()
        if kind < 0.01:
            return self.draw.choice("a( \u0416\U0001f4a5") * LONG
        if kind < 0.75:
            return self.draw.choice(TEXTS)
        return "".join(chr(self.draw.randrange(0x110000)) for _ in range(self.draw.randrange(12)))

    def value(self, depth: int = 0) -> Any:
        """A value of JSON, or one that JSON cannot write."""
        kind = self.draw.randrange(7 if depth < 4 else 5)
        if kind == 0:
            return self.draw.choice((None, True, False))
        if kind in (1, 2):
            return self.draw.choice(NUMBERS)
        if kind in (3, 4):
            return self.text()
        if kind == 5:
            return [self.value(depth + 1) for _ in range(self.draw.randrange(4))]
        return {self.text(): self.value(depth + 1) for _ in range(self.draw.randrange(4))}

    def deep(self) -> bytes:
        """Lists or objects within each other."""
        depth = self.draw.choice(DEPTHS)
        begin, end = self.draw.choice(
            ((b"[", b"]"), (b'{"a":', b"}"), (b'{"items":', b"}"), (b'[{"anyOf":', b"}]"))
        )
        return begin * depth + b"1" + end * depth

    def body(
        self,
        plausible: Mapping[str, Sequence[Any]],
        fields: Sequence[str],
        told: Mapping[str, Sequence[bytes]],
    ) -> bytes:
        """A body of `plausible` fields, with values that mean something, and of some of `fields`.

        `told`: bodies have these more often than others, with values that are known to be dangerous.
        """
        pairs = [(name, _json(self.draw.choice(values))) for name, values in plausible.items()]
        for _ in range(self.draw.randrange(4)):
            name = self.draw.choice(fields) if self.draw.random() < 0.9 else self.text()
            kind = self.draw.random()
            value = (
                self.draw.choice(WORDS) if kind < 0.1 else self.deep() if kind < 0.2 else _json(self.value())
            )
            pairs.append((name, value))
        if told and self.draw.random() < 0.05:
            name = self.draw.choice(list(told))
            pairs.append((name, self.draw.choice(told[name])))
        # A key may come twice.
        body = b"{" + b", ".join(_json(name) + b": " + value for name, value in pairs) + b"}"
        kind = self.draw.random()
        if kind < 0.05:
            return self.mutated(body)
        if kind < 0.07:
            return body.decode(errors="replace").encode(self.draw.choice(("utf-16", "utf-32", "utf-8-sig")))
        return self.draw.choice((self.deep(), _json(self.value()), b"", b"\0")) if kind < 0.1 else body

    def mutated(self, data: bytes) -> bytes:
        """The same with bytes changed, taken away or put in."""
        changed = bytearray(data)
        for _ in range(self.draw.randrange(1, 5)):
            at = self.draw.randrange(len(changed) + 1)
            changed[at : at + self.draw.randrange(3)] = self.draw.randbytes(self.draw.randrange(3))
        return bytes(changed)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
