"""ModelService."""

from ctxcache.cache import Cache
from ctxcache.cache.models import Registered
from ctxcache.service import convert, validate
from ctxcache.service.callers import Context, current
from ctxcache.service.convert import TEXT_BYTES, Page, entry
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.v1 import model_pb2, model_pb2_grpc

MODELS_FIELD = model_pb2.ListModelsResponse.MODELS_FIELD_NUMBER
MESSAGES_LIMIT_BYTES = 16 << 20
"""Messages about models that are kept ready: a large one is a hundred KiB."""


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """See proto/ctxcache/v1/model.proto."""

    def __init__(self, cache: Cache, turns: Turns) -> None:
        """`turns`: in which large messages are read and made."""
        self._models, self._forgetting = cache.models, cache.forgetting
        self._turns = turns
        self._messages: dict[tuple[str, str], tuple[Registered, bytes]] = {}
        self._message_bytes = 0

    async def RegisterModel(  # type: ignore[override]  # it is encoded already
        self, request: model_pb2.RegisterModelRequest, context: Context
    ) -> bytes:
        """See the proto."""
        part = LoopSlice(self._turns)
        spec = await part.work(convert.model_spec(request.model))
        probe = convert.model_probe(request.model)
        return await self._answer(await self._models.register(current().tenant, spec, probe, pace=part))

    async def GetModel(  # type: ignore[override]  # it is encoded already
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> bytes:
        """See the proto."""
        return await self._answer(self._models.get(current().tenant, validate.model_id(request.name)))

    async def ForgetModel(
        self, request: model_pb2.ForgetModelRequest, context: Context
    ) -> model_pb2.ForgetModelResponse:
        """See the proto."""
        forgotten = await self._forgetting.forget(
            current().tenant,
            validate.model_id(request.name),
            validate.text(request.weights, TEXT_BYTES, "weights", is_required=True),
            is_trial=request.dry_run,
            pace=LoopSlice(self._turns),
        )
        return model_pb2.ForgetModelResponse(
            models=[f"models/{one}" for one in forgotten.model_ids],
            session_count=forgotten.session_count,
            token_count=forgotten.token_count,
            block_count=forgotten.block_count,
        )

    async def ListModels(  # type: ignore[override]  # it is encoded already
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> bytes:
        """See the proto."""
        page, part = Page(request.page_size), LoopSlice(self._turns)
        after = validate.page_token(request.page_token)
        for record in self._models.list(current().tenant, after=after, limit=page.limit + 1):
            listed = entry(MODELS_FIELD, await self._encoded(record, part))
            if not page.takes_encoded(record.spec.model_id, listed):
                break
            if part.is_over:
                await part.rest()
        page.add(model_pb2.ListModelsResponse(next_page_token=page.next_page_token))
        return page.encoded()

    async def _answer(self, record: Registered) -> bytes:
        encoded = await self._encoded(record, LoopSlice(self._turns))
        # Encoded parts of one message may follow each other: the probe is put behind, and is not kept.
        return encoded if record.probe is None else encoded + convert.encoded_probe(record.probe)

    async def _encoded(self, record: Registered, part: LoopSlice) -> bytes:
        """The message about a model, without its probe. It never changes, and takes milliseconds to make."""
        key = record.tenant, record.spec.model_id
        known, encoded = self._messages.get(key, (None, b""))
        # Another one may have its name by now.
        if known is not record:
            encoded = await part.work(convert.encoded_model(record))
            # All at once: which one will be asked for next is not known, and each is made again in
            # milliseconds.
            if self._message_bytes + len(encoded) > MESSAGES_LIMIT_BYTES:
                self._messages.clear()
                self._message_bytes = 0
            _, before = self._messages.pop(key, (None, b""))
            self._messages[key] = record, encoded
            self._message_bytes += len(encoded) - len(before)
        return encoded
