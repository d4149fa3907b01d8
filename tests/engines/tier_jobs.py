"""Jobs of vLLM's tiers as a test makes them, under the names that the installed vLLM has for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.tiering import base


def job_of(number: int, keys: Sequence[bytes], chunks: Sequence[int], context: Any, *, is_load: bool) -> Any:
    """A job that moves these chunks of host memory."""
    # Renamed from JobMetadata.
    kind = getattr(base, "TransferJob", None) or base.JobMetadata
    return kind(number, keys, np.array(chunks), is_promotion=is_load, req_context=context)
