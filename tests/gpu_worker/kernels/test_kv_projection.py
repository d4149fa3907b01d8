"""Hidden states to pages.

The fused kernel against its reference, and the reference against an engine's own layer.
"""

import dataclasses
from collections.abc import Callable

import layers
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from gpu_worker.kernels.kv_projection import fused, reference
from gpu_worker.kernels.kv_projection.reference import LayerWeights
from gpu_worker.kernels.operands import (
    NO_NORM,
    Norm,
    NormKind,
    Pages,
    Pairing,
    ProjectionWeights,
    Rotation,
    Rows,
)

Kernel = Callable[[Rows, LayerWeights, Rotation | None, Pages], None]
HEADS = {"whole": (2, 16, 8), "partial": (2, 24, 6), "odd": (1, 17, 4), "wide": (2, 80, 40)}


def _compare(
    kind: NormKind,
    dtype: torch.dtype,
    *,
    heads: str = "whole",
    pairing: Pairing = Pairing.HALVES,
    bits: int = 0,
    token_count: int = 37,
    size: int = 96,
    has_head_norm: bool = False,
) -> None:
    count, head_size, pair_count = HEADS[heads]
    layer = layers.layer_of(
        kind, dtype, size=size, heads=(count, head_size), value_heads=(3, 20), has_head_norm=has_head_norm
    )
    hidden = layers.rows_of(3 * layers.normal(token_count, size) + 5, bits, dtype)
    rotation = layers.rotation_of(token_count, pair_count, pairing)
    expected = layers.poisoned(token_count, (count, head_size), (3, 20), dtype)
    found = layers.like(expected)
    reference.kv_projection(hidden, layer, rotation, expected)
    fused.kv_projection(hidden, layer, rotation, found)
    layers.assert_same(found, expected)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in NormKind),
        (NormKind.RMS, torch.bfloat16),
        (NormKind.LAYER, torch.float16),
    ],
    ids=str,
)
def test_every_norm_and_every_type(kind: NormKind, dtype: torch.dtype) -> None:
    """No norm, RMS and layer norm; fp32, bf16 and fp16. Norms are computed in fp32 whatever the type is."""
    _compare(kind, dtype)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pairing", Pairing, ids=lambda pairing: pairing.name.lower())
def test_every_pairing_at_every_head_size(heads: str, pairing: Pairing) -> None:
    """Whole and partial rotation, odd head sizes and such as are no power of two."""
    _compare(NormKind.RMS, torch.float32, heads=heads, pairing=pairing)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", NormKind, ids=lambda kind: kind.name.lower())
def test_quantized_hidden_states(bits: int, kind: NormKind) -> None:
    """8 and 4 bits are made wide inside the kernel."""
    _compare(kind, torch.float32, bits=bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [2, 62, 100, 130])
def test_quantized_rows_that_fill_no_group(bits: int, size: int) -> None:
    """Outliers in a last group that is not full, in fewer elements than outliers, and in rows of zeros."""
    layer = layers.layer_of(NormKind.RMS, torch.float32, size=size, heads=(2, 16), value_heads=(3, 20))
    rows = layers.normal(20, size)
    rows[:, -1], rows[3, 0], rows[5] = 23_737, -900, 0.0
    hidden = layers.rows_of(rows, bits, torch.float32)
    expected = layers.poisoned(20, (2, 16), (3, 20), torch.float32)
    found = layers.like(expected)
    reference.kv_projection(hidden, layer, None, expected)
    fused.kv_projection(hidden, layer, None, found)
    layers.assert_same(found, expected)


@pytest.mark.parametrize(("token_count", "size"), [(1, 96), (64, 64), (65, 100), (37, 32)])
def test_sizes_that_fill_no_block(token_count: int, size: int) -> None:
    """One token, a block, a block and one more; hidden sizes beside the block's."""
    _compare(NormKind.LAYER, torch.float32, token_count=token_count, size=size)


@pytest.mark.parametrize(("token_count", "piece_tokens"), [(5, 1), (37, 16), (37, 36), (37, 37), (37, 38)])
@pytest.mark.parametrize("bits", [0, 8])
def test_a_product_in_pieces(
    token_count: int, piece_tokens: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token each, the last piece shorter, whole or all there is: each token's own position and slot."""
    columns = sum(count * size for count, size in ((2, 16), (3, 20)))
    monkeypatch.setattr(fused, "PIECE_BYTES", piece_tokens * columns * 4 + 3)
    _compare(NormKind.RMS, torch.float32, bits=bits, token_count=token_count)


def test_a_norm_per_head() -> None:
    """K is normed per head between projection and rotation."""
    _compare(NormKind.RMS, torch.float32, has_head_norm=True)


def test_a_large_mean_does_not_drown_the_spread() -> None:
    """A mean of 500 spreads costs some last places, not the result."""
    layer = layers.layer_of(NormKind.LAYER, torch.float32, size=96, heads=(2, 16), value_heads=(3, 20))
    hidden = 500 + layers.normal(20, 96)
    expected = layers.poisoned(20, (2, 16), (3, 20), torch.float32)
    found = layers.like(expected)
    reference.kv_projection(hidden, layer, None, expected)
    fused.kv_projection(hidden, layer, None, found)
    for one, other in ((found.keys, expected.keys), (found.values, expected.values)):
        assert torch.allclose(one.nan_to_num(), other.nan_to_num(), atol=2e-3)


def test_outliers_of_the_residual_stream_overflow_nothing_in_fp16() -> None:
    """Outliers of real models in single dimensions stay within fp16."""
    layer = layers.layer_of(NormKind.RMS, torch.float16, size=96, heads=(2, 16), value_heads=(3, 20))
    hidden = layers.normal(20, 96)
    hidden[:, 7] = 23_737
    expected = layers.poisoned(20, (2, 16), (3, 20), torch.float16)
    found = layers.like(expected)
    reference.kv_projection(hidden.half(), layer, None, expected)
    fused.kv_projection(hidden.half(), layer, None, found)
    layers.assert_same(found, expected)


def test_no_token_is_no_work() -> None:
    """An empty batch writes nothing."""
    layer = layers.layer_of(NormKind.RMS, torch.float32, size=96, heads=(2, 16), value_heads=(3, 20))
    pages = layers.poisoned(0, (2, 16), (3, 20), torch.float32)
    fused.kv_projection(layers.normal(0, 96), layer, None, pages)
    assert torch.isnan(pages.keys).all()


def test_a_position_off_by_one_is_seen() -> None:
    """The control: what these tests compare differs where a kernel is wrong by as little as that."""
    layer = layers.layer_of(NormKind.RMS, torch.bfloat16, size=96, heads=(2, 16), value_heads=(3, 20))
    hidden = layers.normal(20, 96).bfloat16()
    expected = layers.poisoned(20, (2, 16), (3, 20), torch.bfloat16)
    found = layers.like(expected)
    reference.kv_projection(hidden, layer, layers.rotation_of(20, 8, Pairing.HALVES, first=3), expected)
    fused.kv_projection(hidden, layer, layers.rotation_of(20, 8, Pairing.HALVES, first=4), found)
    with pytest.raises(AssertionError):
        layers.assert_same(found, expected)


@pytest.mark.parametrize("kernel", [reference.kv_projection, fused.kv_projection], ids=["reference", "fused"])
def test_operands_that_do_not_belong_together_are_refused(kernel: Kernel) -> None:
    """With a sentence, and before anything is written."""
    layer = layers.layer_of(NormKind.RMS, torch.float32, size=96, heads=(2, 16), value_heads=(3, 20))
    pages = layers.poisoned(20, (2, 16), (3, 20), torch.float32)
    with pytest.raises(ValueError, match="hidden states of 95"):
        kernel(layers.normal(20, 95), layer, None, pages)
    with pytest.raises(ValueError, match="19 rows, 20 slots"):
        kernel(layers.normal(19, 96), layer, None, pages)
    with pytest.raises(ValueError, match="2 heads of 16"):
        kernel(layers.normal(20, 96), layer, None, Pages(pages.values, pages.values, pages.slots))
    with pytest.raises(ValueError, match="18 of 16 dimensions"):
        kernel(layers.normal(20, 96), layer, layers.rotation_of(20, 9, Pairing.HALVES), pages)
    assert torch.isnan(pages.keys).all()


@pytest.mark.parametrize("kernel", [reference.kv_projection, fused.kv_projection], ids=["reference", "fused"])
def test_a_llama_layers_own_cache(kernel: Kernel) -> None:
    """A layer's input gives what transformers itself caches of the layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).train(mode=False)
    model.to(torch.device(layers.DEVICE))
    block = model.model.layers[1]
    attention, norm = block.self_attn, block.input_layernorm
    layer = LayerWeights(
        Norm(NormKind.RMS, norm.variance_epsilon, norm.weight.detach()),
        ProjectionWeights(attention.k_proj.weight.detach(), 2),
        ProjectionWeights(attention.v_proj.weight.detach(), 2),
    )
    ids = torch.arange(30, device=layers.DEVICE).unsqueeze(0)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=True)
        cos, sin = model.model.rotary_emb(out.hidden_states[1], ids)
    half = cos.shape[-1] // 2
    pages = layers.poisoned(30, (2, 16), (2, 16), torch.float32)
    slots = torch.arange(30, device=layers.DEVICE)
    kernel(
        out.hidden_states[1][0],
        layer,
        Rotation(cos[0, :, :half], sin[0, :, :half]),
        dataclasses.replace(pages, slots=slots),
    )
    cached = out.past_key_values.layers[1]
    assert torch.allclose(pages.keys.flatten(0, 1)[:30], cached.keys[0].transpose(0, 1), atol=2e-6)
    assert torch.allclose(pages.values.flatten(0, 1)[:30], cached.values[0].transpose(0, 1), atol=2e-6)


def test_an_opt_layers_own_cache() -> None:
    """The same with layer norm, biases and learned positions."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=50,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        max_position_embeddings=64,
    )
    model = OPTForCausalLM(config).train(mode=False)
    model.to(torch.device(layers.DEVICE))
    block = model.model.decoder.layers[1]
    attention, norm = block.self_attn, block.self_attn_layer_norm
    layer = LayerWeights(
        Norm(NormKind.LAYER, norm.eps, norm.weight.detach(), norm.bias.detach()),
        ProjectionWeights(attention.k_proj.weight.detach(), 4, attention.k_proj.bias.detach()),
        ProjectionWeights(attention.v_proj.weight.detach(), 4, attention.v_proj.bias.detach()),
    )
    ids = torch.arange(30, device=layers.DEVICE).unsqueeze(0)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=True)
    pages = layers.poisoned(30, (4, 16), (4, 16), torch.float32)
    pages = dataclasses.replace(pages, slots=torch.arange(30, device=layers.DEVICE))
    fused.kv_projection(out.hidden_states[1][0], layer, None, pages)
    cached = out.past_key_values.layers[1]
    assert torch.allclose(pages.keys.flatten(0, 1)[:30], cached.keys[0].transpose(0, 1), atol=2e-6)
    assert torch.allclose(pages.values.flatten(0, 1)[:30], cached.values[0].transpose(0, 1), atol=2e-6)


def test_a_projection_alone() -> None:
    """Without norm, bias and rotation a unit matrix copies."""
    layer = LayerWeights(
        NO_NORM,
        ProjectionWeights(torch.eye(32, device=layers.DEVICE), 2),
        ProjectionWeights(2 * torch.eye(32, device=layers.DEVICE), 2),
    )
    pages = layers.poisoned(2, (2, 16), (2, 16), torch.float32)
    hidden = layers.normal(2, 32)
    fused.kv_projection(hidden, layer, None, pages)
    assert torch.allclose(pages.keys.flatten(0, 1)[pages.slots].flatten(1), hidden)
    assert torch.allclose(pages.values.flatten(0, 1)[pages.slots].flatten(1), 2 * hidden)
