"""How far hints of one kind can be believed: how many of the last ones came true. Pure."""

MEMORY = 256
PRIOR = 8.0


class Trust:
    """A share in [0, 1] that starts near 1; a liar is found out within some dozen hints."""

    def __init__(self) -> None:
        self._made, self._broken = PRIOR, 0.0

    @property
    def share(self) -> float:
        """The share of late hints that came true."""
        return max(1 - self._broken / self._made, 0.0)

    def made(self) -> None:
        """A hint was given, or was seen to come true."""
        self._made += 1
        if self._made > MEMORY:
            self._made, self._broken = self._made / 2, self._broken / 2

    def broke(self) -> None:
        """One that counts as made did not come true."""
        self._broken += 1
