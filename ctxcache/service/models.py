"""ModelService."""

from ctxcache.cache import Cache
from ctxcache.service import convert, validate
from ctxcache.service.rpc import Context
from ctxcache.service.tenant import tenant_of
from ctxcache.v1 import model_pb2, model_pb2_grpc


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """See proto/ctxcache/v1/model.proto."""

    def __init__(self, cache: Cache) -> None:
        self._models = cache.models

    async def RegisterModel(  # noqa: N802
        self, request: model_pb2.RegisterModelRequest, context: Context
    ) -> model_pb2.Model:
        """See the proto."""
        spec = convert.model_spec(request.model)
        record = await self._models.register(tenant_of(context), spec)
        return convert.model_message(record.spec, record.create_time_ns)

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.Model:  # noqa: N802
        """See the proto."""
        record = self._models.get(tenant_of(context), validate.model_id(request.name))
        return convert.model_message(record.spec, record.create_time_ns)

    async def ListModels(  # noqa: N802
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        """See the proto."""
        limit = validate.page_size(request.page_size)
        after = validate.page_token(request.page_token)
        found = self._models.list(tenant_of(context), after=after, limit=limit + 1)
        return model_pb2.ListModelsResponse(
            models=[convert.model_message(record.spec, record.create_time_ns) for record in found[:limit]],
            next_page_token=validate.next_page_token([r.spec.model_id for r in found], limit),
        )
