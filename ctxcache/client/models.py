"""Calls about models, as methods. Knows nothing of sessions. Worst case: one deadline per page."""

from collections.abc import Iterator

from ctxcache.client.convert import model_to_wire
from ctxcache.client.wire import Wire
from ctxcache.format.model import ModelSpec
from ctxcache.v1 import model_pb2


class ModelCalls:
    """The rpcs of ModelService."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def register_model(self, spec: ModelSpec) -> model_pb2.Model:
        """Register a model, or return it as it is registered already. Raises ModelFingerprintMismatch."""
        request = model_pb2.RegisterModelRequest(model=model_to_wire(spec))
        return self._wire.call(self._wire.models.RegisterModel, request)

    def get_model(self, name: str) -> model_pb2.Model:
        """Return the model `models/{model_id}`. Raises ModelNotFound."""
        return self._wire.call(self._wire.models.GetModel, model_pb2.GetModelRequest(name=name))

    def list_models(self, *, page_size: int = 0) -> Iterator[model_pb2.Model]:
        """Iterate over all models by name, asking for a page when one is used up."""
        request = model_pb2.ListModelsRequest(page_size=page_size)
        while True:
            page = self._wire.call(self._wire.models.ListModels, request)
            yield from page.models
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
