"""Greedy generation in f32 by CLAttn against transformers' eager attention."""

import clattn
import pytest
import torch
import transformers
from clattn_transformers import PagedCache
from clattn_transformers.attention import attention

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # enough for tokens to vary
    "tie_word_embeddings": False,  # else the models of Gemma repeat their input
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 24}
MODELS = {
    "Llama": ("LlamaConfig", {}),
    "Qwen 3": ("Qwen3Config", {}),
    "Mistral": ("MistralConfig", WINDOW),
    "Gemma 2": ("Gemma2Config", WINDOW | {"attn_logit_softcapping": 5.0}),
    "Gemma 3": ("Gemma3TextConfig", WINDOW | {"sliding_window_pattern": 2}),
    "GPT-OSS": ("GptOssConfig", WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def make_model(name, models=MODELS):
    class_name, fields = models[name]
    torch.manual_seed(5)
    config = getattr(transformers, class_name)(**SHAPE | fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):  # 0 would hide a sink that is left out
            torch.nn.init.normal_(parameter, std=2.0)
        elif parameter_name.endswith(("dt_bias", "linear_attn.norm.weight")):  # so would 1
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model


@pytest.fixture(params=MODELS)
def model(request):
    return make_model(request.param)


@pytest.fixture
def llama():
    return make_model("Llama")


def prompts(*lengths, padding="left"):
    """Random prompts of these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(9)
    width = max(lengths)
    ids = torch.randint(1, SHAPE["vocab_size"], (len(lengths), width), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, width - length if padding == "left" else 0 :][:length] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, implementation, inputs, cache=None, **options):
    model.set_attn_implementation(implementation)
    options = {"max_new_tokens": 40, "do_sample": False} | options
    return model.generate(**inputs, past_key_values=cache, **options)


def assert_equal_tokens(model, inputs, cache=None, **options):
    want = generate(model, "eager", inputs, **options)
    cache = cache or PagedCache(model, num_blocks=200)
    got = generate(model, "clattn", inputs, cache, **options)
    assert got.tolist() == want.tolist()
    new = want[:, inputs["input_ids"].shape[1] :]
    assert len(new.unique()) > 8, "the model repeats itself, so that the comparison says little"
    return cache


def test_a_padded_batch(model):
    assert_equal_tokens(model, prompts(50, 7, 1, 33))


def test_a_prompt_without_a_mask(model):
    assert_equal_tokens(model, {"input_ids": prompts(45)["input_ids"]})


def test_a_prompt_in_chunks(model):
    assert_equal_tokens(model, prompts(61, 18), prefill_chunk_size=16)


def test_beams(llama):
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 30}
    cache = assert_equal_tokens(llama, prompts(20, 9), **options)
    held = set()
    for request in cache.requests:
        held |= set(cache.session.block_table(request))
    assert cache.session.num_free_blocks == 200 - len(held)


@torch.no_grad()
def assert_equal_logits(model, inputs):
    model.set_attn_implementation("eager")
    want = model(**inputs).logits
    model.set_attn_implementation("clattn")
    got = model(**inputs, past_key_values=PagedCache(model, num_blocks=20)).logits
    rows = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[rows], want[rows], atol=1e-4, rtol=1e-4)


def test_logits_of_padding_on_the_right(model):
    assert_equal_logits(model, prompts(40, 11, padding="right"))


def test_a_conversation_and_another_one(llama):
    cache = PagedCache(llama, num_blocks=16)
    for _ in range(3):
        first = generate(llama, "clattn", prompts(30, 12), cache, max_new_tokens=5)
        mask = torch.cat([prompts(30, 12)["attention_mask"], torch.ones(2, 8).long()], dim=1)
        more = torch.cat([first, torch.tensor([[7, 8, 9]] * 2)], dim=1)
        inputs = {"input_ids": more, "attention_mask": mask}
        got = generate(llama, "clattn", inputs, cache, max_new_tokens=9)
        assert got.tolist() == generate(llama, "eager", inputs, max_new_tokens=9).tolist()
        cache.reset()
        assert cache.session.num_free_blocks == 16 and cache.get_seq_length() == 0


def test_too_few_blocks(llama):
    with pytest.raises(clattn.OutOfBlocks):
        generate(llama, "clattn", prompts(50, 7), PagedCache(llama, num_blocks=4))


def test_another_cache_is_refused(llama):
    with pytest.raises(clattn.InvalidArgument, match="past_key_values.*legal: .*PagedCache"):
        generate(llama, "clattn", prompts(8))


def test_another_implementation_is_refused(llama):
    with pytest.raises(clattn.InvalidArgument, match="attn_implementation: eager, .*clattn"):
        generate(llama, "eager", prompts(8), PagedCache(llama, num_blocks=4))


def test_training_is_refused(llama):
    llama.set_attn_implementation("clattn")
    with pytest.raises(clattn.Unsupported, match="training"):
        llama(**prompts(8), past_key_values=PagedCache(llama, num_blocks=4))


@torch.no_grad()
def test_what_does_not_fit_is_refused(llama):
    llama.set_attn_implementation("clattn")
    cache = PagedCache(llama, num_blocks=8)
    llama(**prompts(8, 3), past_key_values=cache)
    ids = torch.ones(2, 1, dtype=torch.long)
    with pytest.raises(clattn.InvalidArgument, match=r"attention_mask: shape \[2, 1\], .*\[2, 9\]"):
        llama(input_ids=ids, attention_mask=ids, past_key_values=cache)
    cache.reset()
    full = {"input_ids": ids, "attention_mask": torch.zeros(2, 1, 1, 1)}
    with pytest.raises(clattn.InvalidArgument, match=r"attention_mask: shape \[2, 1, 1, 1\]"):
        llama(**full, past_key_values=cache)
    cache.reset()
    llama(**prompts(8, 3), past_key_values=cache)
    with pytest.raises(clattn.InvalidArgument, match="batch: 1 rows, legal: 2"):
        llama(input_ids=ids[:1], past_key_values=cache)
    with pytest.raises(clattn.Unsupported, match="crop"):
        cache.crop(-1)
    llama.model.layers[1].self_attn.scaling = 1.0
    cache.reset()
    with pytest.raises(clattn.Unsupported, match="layer 1: .*'scaling': 1.0"):
        llama(**prompts(8, 3), past_key_values=cache)


def test_keys_computed_from_the_caches_are_refused(llama):
    cache = PagedCache(llama, num_blocks=4)
    llama.set_attn_implementation("clattn")
    rows = torch.zeros(1, 2, 3, 32)
    keys, values = cache.update(rows, rows, 0)
    module = llama.model.layers[0].self_attn
    with pytest.raises(clattn.Unsupported, match="layer 0: keys computed from"):
        attention(module, torch.zeros(1, 4, 3, 32), keys + 0, values, None)


def test_models_that_are_not_served():
    config = transformers.BertConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1)
    with pytest.raises(clattn.Unsupported, match="causal False"):
        PagedCache(transformers.BertModel(config))
    config = transformers.Lfm2Config(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
        vocab_size=16, layer_types=["full_attention", "conv"], num_hidden_layers=2,
    )  # fmt: skip
    with pytest.raises(clattn.Unsupported, match="layer 1 of .*Lfm2ShortConv.* legal in every"):
        PagedCache(transformers.Lfm2ForCausalLM(config))
    config = transformers.DeepseekV3Config(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64,
        moe_intermediate_size=8, n_routed_experts=8, vocab_size=16, num_hidden_layers=1,
    )  # fmt: skip
    with pytest.raises(clattn.Unsupported, match="layer 0: DeepseekV3Attention has no head_dim"):
        PagedCache(transformers.DeepseekV3ForCausalLM(config))
