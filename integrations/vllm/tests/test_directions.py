"""Batches in which causality differs from request to request, against double precision."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clattn import reference
from vllm.v1.attention.backend import AttentionType

from clattn_vllm.backend import CLAttnImpl, CLAttnMetadataBuilder
from clattn_vllm.layer import Layer

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 64, 16
#: Query tokens and tokens in the cache with them.
REQUESTS = [(9, 9), (5, 21), (1, 12)]
LIMITS = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
    model_config=SimpleNamespace(max_model_len=128),
)


def layer_of(window):
    """What the plug-in reads of a layer of vLLM."""
    impl = SimpleNamespace(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, kv_cache_dtype="auto",
        scale=SIZE**-0.5, logits_soft_cap=0.0, sliding_window=window, alibi_slopes=None,
        sinks=None, attn_type=AttentionType.DECODER,
    )  # fmt: skip
    return SimpleNamespace(
        impl=impl, layer_name="layer", kv_sharing_target_layer_name=None,
        attn_type=AttentionType.DECODER, head_size_v=SIZE, head_size=SIZE,
        _k_scale_float=1.0, _v_scale_float=1.0,
    )  # fmt: skip


def builder_of(layer):
    builder = CLAttnMetadataBuilder.__new__(CLAttnMetadataBuilder)  # without a model of vLLM
    builder.served, builder.builders, builder.left_to_vllm = {}, {}, False
    builder.dtype, builder.block_size, builder.vllm_config = torch.float32, PAGE, LIMITS
    builder.is_encoder_only_attention = False
    builder._take(layer)
    return builder


@pytest.mark.parametrize("window", [-1, 6])
@pytest.mark.parametrize(
    "causal", [torch.tensor([True, False, False]), torch.tensor([False, True, True]), True, False]
)
def test_answers_are_those_of_the_rule(causal, window):
    random = np.random.default_rng(5)
    layer = layer_of(window)
    builder = builder_of(layer)
    tokens = sum(count for count, _ in REQUESTS)
    pages = torch.tensor([[3, 0], [1, 5], [2, 0]], dtype=torch.int32)
    # Of a page and head, vLLM's cache holds the keys of all tokens in front of their values.
    cache = torch.from_numpy(
        random.standard_normal((6, KV_HEADS, PAGE, 2 * SIZE)).astype(np.float32)
    )
    query = torch.from_numpy(random.standard_normal((tokens, HEADS, SIZE)).astype(np.float32))
    starts = torch.tensor([0, *np.cumsum([count for count, _ in REQUESTS])], dtype=torch.int32)
    slots = torch.full((tokens,), -1, dtype=torch.int64)  # all keys are in the cache
    common = SimpleNamespace(
        num_actual_tokens=tokens, num_reqs=len(REQUESTS), causal=causal, query_start_loc=starts,
        seq_lens=torch.tensor([length for _, length in REQUESTS], dtype=torch.int32),
        block_table_tensor=pages, slot_mapping=slots,
    )  # fmt: skip
    metadata = builder.build(0, common)
    assert metadata.directed == isinstance(causal, torch.Tensor)
    impl = CLAttnImpl.__new__(CLAttnImpl)
    impl.served = layer.impl.served
    output = torch.zeros_like(query)
    impl.forward(layer, query, None, None, cache, metadata, output)
    options = reference.Options(scale=SIZE**-0.5, sliding_window=max(window, 0))
    for row, (count, length) in enumerate(REQUESTS):
        halves = cache[pages[row].long()].view(-1, KV_HEADS, 2, PAGE, SIZE).double()
        key, value = (
            halves[:, :, side].transpose(1, 2).reshape(-1, KV_HEADS, SIZE)[:length].numpy()
            for side in (0, 1)
        )
        mine = slice(int(starts[row]), int(starts[row]) + count)
        looks = causal if isinstance(causal, bool) else bool(causal[row])
        wanted, _ = reference.attention(
            query[mine].double().numpy(), key, value, options, reference.Request(int(looks))
        )
        np.testing.assert_allclose(output[mine].numpy(), wanted, atol=2e-5)


def test_layers_that_meet_no_such_batch_compile_nothing_for_it():
    layer = layer_of(-1)
    builder = builder_of(layer)
    assert list(builder.builders) == [(0, False)]
    assert isinstance(layer.impl.served, Layer)
    assert not layer.impl.served.impl.config.use_directions
