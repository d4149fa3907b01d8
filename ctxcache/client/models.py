"""The calls about registered models.

Knows nothing of sessions. Worst case: one deadline per page.
"""

from collections.abc import Iterator

from ctxcache.client.convert import model_to_wire, probe_from_wire
from ctxcache.client.messages import read_forgotten, read_model_info
from ctxcache.client.types import CallerModel, Forgotten, ModelInfo
from ctxcache.client.wire import Wire
from ctxcache.errors import ModelFingerprintMismatch, ModelProbeMismatch
from ctxcache.format.model import ModelProbe, ModelSpec
from ctxcache.v1 import model_pb2


class ModelCalls:
    """The rpcs of ModelService."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def register(self, spec: ModelSpec, probe: ModelProbe | None = None) -> CallerModel:
        """Register a model, or find it registered already. The answer names it in calls that move rows.

        `probe`: the model's values for a few tokens. The store keeps the first probe, and compares all others
        with it. Raises ModelFingerprintMismatch where another model has its id, ModelProbeMismatch.
        """
        own = CallerModel(spec)
        request = model_pb2.RegisterModelRequest(model=model_to_wire(spec, probe))
        registered = self._wire.call(self._wire.models.RegisterModel, request)
        # The model is compared as this process describes it: a server of another version may read it
        # otherwise.
        if registered.fingerprint != own.fingerprint:
            raise ModelFingerprintMismatch(
                f"{registered.name} is another model to {self._wire.target} than to this client",
                model=registered.name,
                actual=registered.fingerprint.hex(),
                expected=own.fingerprint.hex(),
            )
        kept = probe_from_wire(registered)
        if probe is not None and kept is not None:
            _compare(registered.name, probe, kept)
        return own

    def get(self, name: str) -> ModelInfo:
        """Return the model `models/{model_id}`. Raises ModelNotFound."""
        request = model_pb2.GetModelRequest(name=name)
        return read_model_info(self._wire.call(self._wire.models.GetModel, request))

    def forget(self, name: str, weights: str, *, is_trial: bool = False) -> Forgotten:
        """Forget sessions and blocks of a version of the weights of `models/{model_id}`, and its models.

        `weights`: the version as the engine was told it, or a whole digest. `is_trial` only says what would
        go. Raises ModelNotFound, InvalidArgument, WriteInProgress, TierFailure.
        """
        request = model_pb2.ForgetModelRequest(name=name, weights=weights, dry_run=is_trial)
        return read_forgotten(self._wire.call(self._wire.models.ForgetModel, request))

    def list(self, *, page_size: int = 0) -> Iterator[ModelInfo]:
        """Iterate over all models by name, asking for a page when one is used up."""
        request = model_pb2.ListModelsRequest(page_size=page_size)
        while True:
            page = self._wire.call(self._wire.models.ListModels, request)
            for model in page.models:
                yield read_model_info(model)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


def _compare(name: str, probe: ModelProbe, kept: ModelProbe) -> None:
    difference = probe.difference(kept)
    if difference is None:
        raise ModelProbeMismatch(
            model=name, problem="its probe is of other tokens, or of other values of a pass"
        )
    if difference.measured > difference.allowed:
        measured, allowed = f"{difference.measured:.2g}", f"{difference.allowed:g}"
        problem = f"group {difference.group} of its probe lies {measured} apart, {allowed} is allowed"
        raise ModelProbeMismatch(
            model=name, problem=problem, group=difference.group, measured=measured, allowed=allowed
        )
