"""The policy that docs/placement.md shows, taken from there."""

import re
from pathlib import Path

from ctxcache.core.placement.policy import Capacities, Ranked

DOCUMENT = Path(__file__).parents[2] / "docs/placement.md"


def documented_policy(_: Capacities) -> Ranked:
    """Make one, as `policies.RANKED` would."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, type[Ranked]] = {}
    exec(compile(source, str(DOCUMENT), "exec"), names)  # noqa: S102  the project's own document
    return names["LargestFirst"]()
