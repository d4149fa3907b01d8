"""ModelService."""

from collections.abc import Generator

from ctxcache.cache import Cache
from ctxcache.cache.models import Registered
from ctxcache.service import convert, validate
from ctxcache.service.answers import Page
from ctxcache.service.rpc import Context
from ctxcache.service.tenant import tenant_of
from ctxcache.service.turns import Slice, Turns
from ctxcache.v1 import model_pb2, model_pb2_grpc


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """See proto/ctxcache/v1/model.proto."""

    def __init__(self, cache: Cache, turns: Turns) -> None:
        """`turns`: in which large messages are read and made."""
        self._models = cache.models
        self._turns = turns

    async def RegisterModel(  # noqa: N802
        self, request: model_pb2.RegisterModelRequest, context: Context
    ) -> model_pb2.Model:
        """See the proto."""
        spec = await Slice(self._turns).work(convert.model_spec(request.model))
        probe = convert.model_probe(request.model)
        return await self._message(await self._models.register(tenant_of(context), spec, probe))

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.Model:  # noqa: N802
        """See the proto."""
        return await self._message(self._models.get(tenant_of(context), validate.model_id(request.name)))

    async def ListModels(  # type: ignore[override]  # noqa: N802  # it is encoded already
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> bytes:
        """See the proto."""
        page, part = Page(request.page_size), Slice(self._turns)
        after = validate.page_token(request.page_token)
        for record in self._models.list(tenant_of(context), after=after, limit=page.limit + 1):
            listed = model_pb2.ListModelsResponse()
            await part.work(_filling(listed.models.add(), record, has_probe=False))
            if not page.takes(record.spec.model_id, listed):
                break
        page.add(model_pb2.ListModelsResponse(next_page_token=page.next_page_token))
        return page.encoded()

    async def _message(self, record: Registered) -> model_pb2.Model:
        message = model_pb2.Model()
        await Slice(self._turns).work(_filling(message, record))
        return message


def _filling(
    message: model_pb2.Model, record: Registered, *, has_probe: bool = True
) -> Generator[None, None, None]:
    probe = record.probe if has_probe else None
    return convert.fill_model(message, record.spec, record.fingerprint, record.create_time_ns, probe)
