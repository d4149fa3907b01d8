"""The divergence harness: nothing stored is no divergence, and fewer bits are more."""

import torch
from tiny_models import VOCABULARY_SIZE, build

from ctxcache.format.streams import StateKind
from gpu_worker.model.proof import adapt
from lab.quality.divergence import Form, divergences, few_bits, half


def test_fewer_bits_diverge_more_and_take_less() -> None:
    """Exactly kept, in 16 bits, in 8 and in 4; hidden states and K/V."""
    adapter = adapt(build("llama", layer_count=3))
    ids = torch.randint(VOCABULARY_SIZE, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    for kind in (StateKind.HIDDEN, StateKind.KV):
        forms = [
            Form("as it is", kind, lambda rows: (rows, rows.nbytes)),
            Form("16", kind, half(torch.bfloat16)),
            Form("8", kind, few_bits(8, 32, 0)),
            Form("4", kind, few_bits(4, 32, 0)),
        ]
        found = divergences(adapter, ids, forms, context_count=40)
        assert found["kept"].kl_nats == 0
        assert found["kept"].agreement == 1
        assert found["as it is"].kl_nats < 1e-9
        assert found["as it is"].kl_nats < found["8"].kl_nats < found["4"].kl_nats
        assert found["16"].kl_nats < found["4"].kl_nats
        sizes = [found[form.title].bytes_per_token for form in forms]
        assert sizes[0] == 2 * sizes[1]
        assert sizes[1] / sizes[2] == 64 / 36
        assert sizes[1] / sizes[3] == 64 / 20
