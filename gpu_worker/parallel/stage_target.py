"""Stage targets: the cache of a pipeline stage, which has some of the model's layers.

Layers of other stages have nothing to restore here. Worst case: a part of a layer of another stage, an IndexError.
"""

from gpu_worker.parallel.share import Share
from gpu_worker.pipeline.target import Room, Target


class StageTarget(Target):
    """The model's layers, of which `own` has those of the share."""

    def __init__(self, own: Target, share: Share, layer_count: int) -> None:
        self._own, self._share = own, share
        self.token_count, self.layer_count, self.is_by_layer = own.token_count, layer_count, own.is_by_layer

    def first_token(self, layer: int) -> int:
        """See Target."""
        own = self._index(layer)
        return 0 if own is None else self._own.first_token(own)

    def room(self, layer: int, begin: int, end: int) -> Room:
        """See Target."""
        own = self._index(layer)
        if own is None:
            raise IndexError(layer)
        return self._own.room(own, begin, end)

    def finish(self, layer: int) -> None:
        """See Target."""
        own = self._index(layer)
        if own is not None:
            self._own.finish(own)

    def announced(self, layer: int) -> None:
        """See Target."""
        own = self._index(layer)
        if own is not None:
            self._own.announced(own)

    def failed(self) -> None:
        """See Target."""
        self._own.failed()

    def _index(self, layer: int) -> int | None:
        share = self._share
        return layer - share.first_layer if share.first_layer <= layer < share.end_layer else None
