"""Options of rpcs in the protos."""

from collections.abc import Iterator

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import MethodOptions

PACKAGE = "ctxcache.v1"


def unchanging(service: str) -> Iterator[str]:
    """Names of the rpcs of a service of ours that change nothing. Its generated module has to be imported."""
    descriptor = descriptor_pool.Default().FindServiceByName(f"{PACKAGE}.{service}")
    for method in descriptor.methods:
        if method.GetOptions().idempotency_level == MethodOptions.NO_SIDE_EFFECTS:
            yield method.name
