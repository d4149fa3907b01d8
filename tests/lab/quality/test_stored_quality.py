"""The loss of a layout through a store: nothing without a loss, and less than a whole bit more with one."""

import torch
from tiny_models import VOCABULARY_SIZE, build

from ctxcache.client import Client
from ctxcache.format.packing import PACKINGS
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from lab.quality.divergence import stored


def test_exact_kinds_lose_nothing_and_packed_ones_take_less(client: Client) -> None:
    """K/V comes back as it was; 8 bits diverge by less than 4, and take more bytes."""
    model = build("llama", layer_count=3)
    spec = model_spec(model, model_id="quality", packed_kinds=PACKINGS)
    ids = torch.randint(VOCABULARY_SIZE, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    plans = [f"{kind}:0-2" for kind in ("kv", "hidden_int8", "hidden_int4")]

    found = stored(adapt(model), client, spec, plans, ids, context_count=70, repeat_count=1)

    exact, eight, four = (found[plan] for plan in plans)
    assert exact.divergence.kl_nats == 0 < eight.divergence.kl_nats < four.divergence.kl_nats
    assert [one.divergence.bytes_per_token for one in (exact, eight, four)] == [
        4 + 3 * 256,
        4 + 3 * 96,
        4 + 3 * 64,
    ]
    for one in found.values():
        assert one.slot_bytes_per_token > one.divergence.bytes_per_token
        assert round(one.slot_bytes_per_token * 70) % 4096 == 0
        assert min(one.pass_s, one.save_s, one.restore_s) > 0
