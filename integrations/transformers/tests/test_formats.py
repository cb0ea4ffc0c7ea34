"""Caches in other formats, against eager attention over keys and values rounded like theirs."""

import clattn
import pytest
import torch
from clattn_transformers import PagedCache
from test_generate import MODELS, make_model, prompts
from test_layers import MODELS as OF_LAYERS
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

SCALE = 0.05  # of caches with one for all numbers


def int8(rows, scale=SCALE):
    return (rows / scale).round().clamp(-127, 127) * scale


def most_of(rows):
    """The largest magnitude of each row, or what divides a row of padding, which is 0."""
    return rows.abs().amax(-1, keepdim=True).clamp(min=1e-20)


def int8_per_row(rows):
    return int8(rows, most_of(rows) / 127)


def fp8_per_row(rows):
    scale = most_of(rows) / 448
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def uint4_per_row(rows):
    least, most = rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0)
    scale = (most - least).clamp(min=1e-20) / 15
    zero = (-least / scale).round()
    return ((rows / scale + zero).round().clamp(0, 15) - zero) * scale


#: What a format makes of rows [..., head_size] in f32.
FORMATS = {
    "int8": int8,
    "int8_per_token_head": int8_per_row,
    "fp8_per_token_head": fp8_per_row,
    "uint4_per_token_head": uint4_per_row,
}


def one_layer():
    """Its keys and values follow from tokens alone, so that both runs round the same numbers."""
    name, fields = MODELS["Llama"]
    return make_model("Llama", {"Llama": (name, fields | {"num_hidden_layers": 1})})


def generate(model, implementation, cache, inputs):
    model.set_attn_implementation(implementation)
    return model.generate(
        **inputs, past_key_values=cache, max_new_tokens=20, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_and_logits_of_rounded_keys_and_values(name):
    """Their codes are equal, so that sums in f32 alone differ, as without rounding."""

    def rounded(module, query, key, value, *args, **kwargs):
        key, value = FORMATS[name](key), FORMATS[name](value)
        return eager_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("rounded", rounded)
    AttentionMaskInterface.register("rounded", eager_mask)
    # One format for prompts, too: which kernels read a format is the library's business.
    inputs = prompts(50, 7, 33) if name == "int8_per_token_head" else prompts(1, 1)
    model = one_layer()
    want = generate(model, "rounded", None, inputs)
    cache = PagedCache(model, num_blocks=20, kv_cache_dtype=name)
    if name == "int8":
        cache.session.load_kv_scales(0, k_scale=SCALE, v_scale=SCALE)
    got = generate(model, "clattn", cache, inputs)
    torch.testing.assert_close(
        torch.stack(got.logits), torch.stack(want.logits), atol=1e-4, rtol=1e-4
    )
    assert got.sequences.tolist() == want.sequences.tolist()
    plain = generate(model, "eager", None, inputs)
    change = (torch.stack(plain.logits)[:2] - torch.stack(want.logits)[:2]).abs().max()
    assert change > 1e-3, "the format changes nothing, so that the comparison says little"


def test_formats_that_are_refused():
    model = one_layer()
    with pytest.raises(clattn.InvalidArgument, match="'nvfp4' is not one of auto, .*int8_per_tok"):
        PagedCache(model, num_blocks=8, kv_cache_dtype="nvfp4")
    with pytest.raises(clattn.Unsupported, match="int4_per_token_head .*rotated"):
        PagedCache(model, num_blocks=8, kv_cache_dtype="int4_per_token_head")
    with pytest.raises(clattn.InvalidArgument, match="int8 cache has no scales, .*load_kv_scales"):
        cache = PagedCache(model, num_blocks=8, kv_cache_dtype="int8")
        generate(model, "clattn", cache, prompts(1))
    mimo = make_model("MiMo-V2-Flash", OF_LAYERS)
    with pytest.raises(clattn.Unsupported, match="int8_per_token_head with head_size_v 128"):
        PagedCache(mimo, num_blocks=8, kv_cache_dtype="int8_per_token_head")
