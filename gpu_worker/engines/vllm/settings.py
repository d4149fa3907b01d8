"""What a user may set, which engines are served, and the link to the store that both sides make of it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ctxcache.client import CallerModel, Client, connect
from ctxcache.client.types import Durability
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.checkpoint import DescribedModel, describe_directory
from gpu_worker.engines.link import StoreLink

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Refused(ValueError):
    """This engine's configuration cannot be served; the message says which part of it, and what would do."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """What `kv_connector_extra_config` may say. Raises Refused for a key that is not one of these."""

    target: str = "127.0.0.1:7420"
    token_file: str | None = None
    model_id: str = ""
    durability: str = "disk"
    prefixes: bool = True
    """Whether a request may begin with what other sessions have, and one that names no session is saved."""
    unnamed_ttl_s: float = 3600.0
    lookup_timeout_s: float = 1.0
    restore_timeout_s: float = 5.0

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "ConnectorSettings":
        """The settings that a configuration gives."""
        known = cls.__dataclass_fields__
        for name in extra:
            if name not in known:
                raise Refused(f"kv_connector_extra_config.{name}: not one of {', '.join(known)}")
        settings = cls(**extra)
        if settings.durability.upper() not in Durability.__members__:
            names = ", ".join(name.lower() for name in Durability.__members__)
            problem = f"{settings.durability!r} is not one of {names}"
            raise Refused(f"kv_connector_extra_config.durability: {problem}")
        return settings


def check_engine(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Raise Refused for an engine whose rows would not be right, or would not be seen."""
    if not config.model_config.enforce_eager:
        raise Refused("K and V before positions are seen in eager mode only: start vLLM with --enforce-eager")
    if config.parallel_config.world_size > 1:
        raise Refused("tensor and pipeline parallelism are not supported: one worker has all rows")
    if config.speculative_config is not None:
        raise Refused("speculative decoding is not supported: rows of refused drafts would be saved")
    if len(kv_cache_config.kv_cache_groups) > 1:
        raise Refused("models with several groups of K/V caches are not supported")


@functools.lru_cache(maxsize=1)
def _described(directory: str, model_id: str, dtype: torch.dtype) -> DescribedModel:
    return describe_directory(directory, model_id=model_id, dtype=dtype)


def link_for(config: "VllmConfig", settings: ConnectorSettings, *, timeout_s: float) -> StoreLink:
    """A link to the store for the engine's model."""
    model = config.model_config

    def open_client() -> Client:
        return connect(settings.target, token_file=settings.token_file, timeout_s=timeout_s)

    def register(client: Client) -> CallerModel:
        described = _described(model.model, settings.model_id, model.dtype)
        return client.models.register(described.spec, described.probe)

    return StoreLink(open_client, register)


def kv_streams(model: CallerModel) -> list[Stream]:
    """The streams that this engine saves: K and V before positions of each layer, in layer order."""
    return [spec.stream for spec in model.spec.streams if spec.stream.kind is StateKind.KV]
