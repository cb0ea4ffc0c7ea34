"""Layers of unequal shapes, and with shared keys, against eager attention in f32."""

import clattn
import pytest
import torch
from clattn_transformers import PagedCache
from test_generate import (
    WINDOW,
    assert_equal_logits,
    assert_equal_tokens,
    make_model,
    prompts,
)

#: The last two layers read the keys and values of the first two.
SHARED = WINDOW | {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 256,
}
#: Full layers have larger heads, and no weights for values.
GEMMA_4 = SHARED | {"head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True}
#: Of true size, and with fewer heads for keys in the full layer.
LARGE_GEMMA_4 = GEMMA_4 | {
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
}
#: Sliding layers have sinks and more heads for keys. The sizes of heads are the true ones.
MIMO = WINDOW | {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
}
MODELS = {
    "Gemma 3n": ("Gemma3nTextConfig", SHARED | {"intermediate_size": [128] * 4}),
    "Gemma 4": ("Gemma4TextConfig", GEMMA_4),
    "MiMo-V2-Flash": ("MiMoV2FlashConfig", MIMO | {"head_dim": 192, "v_head_dim": 128}),
    "Gemma 4 of true size": ("Gemma4TextConfig", LARGE_GEMMA_4),
}


@pytest.fixture(params=["Gemma 4", "MiMo-V2-Flash"])
def model(request):
    return make_model(request.param, MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch(name):
    assert_equal_tokens(make_model(name, MODELS), prompts(50, 7, 1, 33), max_new_tokens=16)


def test_a_prompt_in_chunks(model):
    assert_equal_tokens(model, prompts(61, 18), prefill_chunk_size=16, max_new_tokens=16)


def test_logits_of_padding_on_the_right(model):
    assert_equal_logits(model, prompts(40, 11, padding="right"))


@torch.no_grad()
def test_keys_of_another_layer_are_refused():
    model = make_model("Gemma 4", MODELS)
    model.set_attn_implementation("clattn")
    cache = PagedCache(model, num_blocks=8)
    model.model.layers[3].self_attn.layer_type = "sliding_attention"
    with pytest.raises(clattn.Unsupported, match="layer 3: keys of layer 0, legal: of 1"):
        model(**prompts(8), past_key_values=cache)


def test_values_wider_than_keys_are_refused():
    wide = {"MiMo": ("MiMoV2FlashConfig", MIMO | {"head_dim": 16, "v_head_dim": 24})}
    with pytest.raises(clattn.Unsupported, match="head_size_v"):
        PagedCache(make_model("MiMo", wide), num_blocks=8)
