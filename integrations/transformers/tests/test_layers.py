"""Layers of unequal shapes, shared keys and gated delta nets, against eager attention in f32."""

import pickle

import clattn
import pytest
import torch
from clattn_transformers import PagedCache
from test_generate import (
    WINDOW,
    assert_equal_logits,
    assert_equal_tokens,
    generate,
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
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
NEXT = HYBRID | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MODELS = {
    "Gemma 3n": ("Gemma3nTextConfig", SHARED | {"intermediate_size": [128] * 4}),
    "Gemma 4": ("Gemma4TextConfig", GEMMA_4),
    "MiMo-V2-Flash": ("MiMoV2FlashConfig", MIMO | {"head_dim": 192, "v_head_dim": 128}),
    "Qwen3-Next": ("Qwen3NextConfig", NEXT),
    "Qwen 3.5": ("Qwen3_5TextConfig", HYBRID),
    "Qwen 3.5 MoE": ("Qwen3_5MoeTextConfig", NEXT),
}


@pytest.fixture(params=["Gemma 4", "MiMo-V2-Flash", "Qwen 3.5"])
def model(request):
    return make_model(request.param, MODELS)


@pytest.fixture
def qwen():
    return make_model("Qwen 3.5", MODELS)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Gemma 3n"])
def test_a_padded_batch(name):
    assert_equal_tokens(make_model(name, MODELS), prompts(50, 7, 1, 33), max_new_tokens=16)


@pytest.mark.parametrize("name", ["Gemma 3n", "MiMo-V2-Flash", "Qwen 3.5"])
def test_a_prompt_in_chunks(name):
    options = {"prefill_chunk_size": 16, "max_new_tokens": 16}
    assert_equal_tokens(make_model(name, MODELS), prompts(61, 18), **options)


def test_logits_of_padding_on_the_right(model):
    assert_equal_logits(model, prompts(40, 11, padding="right"))


def test_logits_of_gemma_4s_own_heads():
    model = make_model("Gemma 4", {"Gemma 4": ("Gemma4TextConfig", LARGE_GEMMA_4)})
    assert_equal_logits(model, prompts(40, 11))


def test_beams_share_states(qwen):
    assert_equal_tokens(qwen, prompts(20, 9), num_beams=3, max_new_tokens=12)


def test_the_model_computes_as_before_without_the_cache(qwen):
    before = generate(qwen, "eager", prompts(20), max_new_tokens=4)
    cache = PagedCache(qwen, num_blocks=8)
    assert generate(qwen, "eager", prompts(20), max_new_tokens=4).tolist() == before.tolist()
    for _ in range(2):
        got = generate(qwen, "clattn", prompts(20), cache, max_new_tokens=4)
        assert got.tolist() == before.tolist()
        assert cache.session.state_slots.num_used == 1
        cache.reset()
        assert cache.session.state_slots.num_used == 0


@torch.no_grad()
def test_what_replaced_a_layers_forward_is_kept(qwen):
    """As by hooks of those who spread models over devices."""
    nets = [net for net in qwen.modules() if type(net).__name__.endswith("GatedDeltaNet")]
    called = []
    before = nets[0].forward
    nets[0].forward = lambda *args, **options: called.append(0) or before(*args, **options)
    for _ in range(2):
        PagedCache(qwen, num_blocks=8)
    qwen(**prompts(5), use_cache=False)
    assert called == [0]


@torch.no_grad()
def test_a_model_that_had_a_cache_can_be_pickled(qwen):
    PagedCache(qwen, num_blocks=8)
    copy = pickle.loads(pickle.dumps(qwen))
    logits = [model(**prompts(5), use_cache=False).logits for model in (qwen, copy)]
    assert logits[0].equal(logits[1])


@torch.no_grad()
def test_bf16_is_as_near_as_eager(qwen):
    """To f32, by at most twice eager's distance, which rounds at as many places."""
    inputs = prompts(12, 12)
    qwen.set_attn_implementation("eager")
    exact = qwen(**inputs).logits
    qwen.to(torch.bfloat16)
    eager = qwen(**inputs).logits
    qwen.set_attn_implementation("clattn")
    got = qwen(**inputs, past_key_values=PagedCache(qwen, num_blocks=20)).logits
    assert (got - exact).square().mean().sqrt() <= 2 * (eager - exact).square().mean().sqrt()


def test_what_recurrent_layers_refuse(qwen):
    cache = PagedCache(qwen, num_blocks=8, max_batch=2)
    with pytest.raises(clattn.InvalidArgument, match="batch: 3 rows, .*max_batch, 2"):
        generate(qwen, "clattn", prompts(8, 8, 8), cache)
    cache.reset()
    with pytest.raises(clattn.InvalidArgument, match="attn_implementation: eager, .*clattn"):
        generate(qwen, "eager", prompts(8), cache)
    cache.reset()
    qwen.set_attn_implementation("clattn")
    with pytest.raises(clattn.Unsupported, match="training"):
        qwen(**prompts(8), past_key_values=cache)
    # transformers gives recurrent layers no mask in steps of one token.
    one = {"input_ids": torch.ones(2, 1).long(), "attention_mask": torch.tensor([[1], [0]])}
    cache.reset()
    with torch.no_grad(), pytest.raises(clattn.Unsupported, match="layer 1: .* other padding"):
        qwen(**one, past_key_values=cache)
    qwen.model.layers[2].linear_attn.activation = "gelu"
    with pytest.raises(clattn.Unsupported, match="layer 2: hidden_act gelu, .*silu"):
        PagedCache(qwen, num_blocks=8)


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
