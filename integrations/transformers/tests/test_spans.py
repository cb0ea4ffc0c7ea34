"""Tokens that see one another, by CLAttn's spans, against transformers' eager attention in f32."""

import clattn
import pytest
import torch
import transformers
from clattn_transformers import PagedCache
from test_generate import SHAPE, WINDOW, prompts
from transformers.masking_utils import create_causal_mask

IMAGE = 255  # the token id of every token of an image
PICTURE = {"image_size": 28, "patch_size": 7}
VISION = PICTURE | {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vision_use_head": False,
}
LAYERS = WINDOW | {"num_hidden_layers": 4}


def gemma_3():
    """Sliding layers, whose window cuts images, and full ones."""
    text = SHAPE | LAYERS | {"sliding_window_pattern": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_id=IMAGE,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def pali_gemma(text):
    config = transformers.PaliGemmaConfig(
        text_config=SHAPE | text, vision_config=VISION, image_token_id=IMAGE, projection_dim=64,
        hidden_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config)


def gemma_4():
    """Its full layers are causal."""
    text = SHAPE | LAYERS | {
        "global_head_dim": 32, "use_bidirectional_attention": "vision",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 7,
    }  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE,
        video_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Gemma4ForConditionalGeneration(config)


MODELS = {
    "Gemma 3": gemma_3,
    "Gemma 4": gemma_4,
    "PaliGemma": lambda: pali_gemma({"model_type": "gemma"}),
    # Prefixes are whole in front of its window, too.
    "PaliGemma 2": lambda: pali_gemma(LAYERS | {"model_type": "gemma2"}),
}


def make_model(name):
    torch.manual_seed(5)
    model = MODELS[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" not in parameter_name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(params=MODELS)
def model(request):
    return make_model(request.param)


@pytest.fixture
def gemma():
    return make_model("Gemma 3")


def images(inputs, *spans, name="token_type_ids"):
    """The inputs with token types that say where images (of PaliGemma: what follows them) are."""
    types = torch.zeros_like(inputs["input_ids"])
    for row, first, end in spans:
        types[row, first:end] = 1
    return inputs | {name: types}


def types_of(model):
    return "mm_token_type_ids" if model.config.model_type == "gemma4" else "token_type_ids"


def batch(model):
    """Rows of 60, 37 (padded on the left), 1 and 45 tokens, with images of all kinds."""
    inputs = prompts(60, 37, 1, 45)
    if model.config.model_type == "paligemma":  # 0 is the prefix
        return images(inputs, (0, 50, 60), (1, 35, 60), (2, 59, 60), (3, 0, 60))
    return images(
        inputs,
        (0, 0, 4), (0, 9, 44), (0, 45, 60),  # at both ends, longer than the window
        (1, 23, 31), (1, 40, 41), (1, 50, 58),  # behind padding, of one token
        name=types_of(model),
    )  # fmt: skip


@torch.no_grad()
def both(model, run):
    """What run(cache) gives by eager attention, and by ours."""
    model.set_attn_implementation({"text_config": "eager"})
    want = run(None)
    model.set_attn_implementation({"text_config": "clattn"})
    return want, run(PagedCache(model, num_blocks=100))


def assert_close(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def assert_equal_prompts(model, inputs):
    want, got = both(model, lambda cache: model(**inputs, past_key_values=cache).logits)
    rows = inputs["attention_mask"].bool()
    assert_close(got[rows], want[rows])
    return want


def assert_equal_decodes(model, inputs):
    def generate(cache):
        return model.generate(
            **inputs, past_key_values=cache, max_new_tokens=12, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip

    want, got = both(model, generate)
    assert_close(torch.stack(got.logits), torch.stack(want.logits))
    assert got.sequences.tolist() == want.sequences.tolist()


def test_prompts_and_decodes(model):
    inputs = batch(model)
    prompt = assert_equal_prompts(model, inputs)
    assert_equal_decodes(model, inputs)
    types = inputs[types_of(model)]
    without = types.clone().fill_(int(model.config.model_type == "paligemma"))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        causal = model(**inputs | {types_of(model): without}).logits
    assert (causal - prompt).abs().max() > 0.1, "images change nothing, so that this says little"


def test_padding_on_the_right(gemma):
    inputs = prompts(40, 11, padding="right")
    assert_equal_prompts(gemma, images(inputs, (0, 3, 33), (1, 0, 5), (1, 6, 9)))


def test_token_types_without_images(gemma):
    inputs = images(prompts(40, 7))
    assert_equal_prompts(gemma, inputs)
    assert_equal_decodes(gemma, inputs)


def test_a_picture(gemma):
    """Of two rows, one picture each, as the model's own vision layers see it."""
    inputs = prompts(40, 40)
    inputs["input_ids"][inputs["input_ids"] == IMAGE] = 1
    inputs["input_ids"][0, 2:6] = inputs["input_ids"][1, 30:34] = IMAGE
    inputs = images(inputs, (0, 2, 6), (1, 30, 34))
    size = PICTURE["image_size"]
    inputs["pixel_values"] = torch.randn(2, 3, size, size)
    assert_equal_prompts(gemma, inputs)
    assert_equal_decodes(gemma, inputs)


@torch.no_grad()
def test_a_conversation_with_another_image(gemma):
    """Token types of all tokens so far tell of the image in the second turn."""
    inputs = images(prompts(60), (0, 4, 14), (0, 42, 52))
    gemma.set_attn_implementation({"text_config": "eager"})
    want = gemma(**inputs).logits
    gemma.set_attn_implementation({"text_config": "clattn"})
    cache = PagedCache(gemma, num_blocks=8)
    got = []
    for first, end in [(0, 40), (40, 60)]:
        part = {name: tensor[:, :end] for name, tensor in inputs.items()}
        part["input_ids"] = part["input_ids"][:, first:]
        got.append(gemma(**part, past_key_values=cache).logits)
    assert_close(torch.cat(got, 1), want)


@torch.no_grad()
def test_masks_of_other_kinds_are_refused(gemma):
    gemma.set_attn_implementation({"text_config": "clattn"})
    cache = PagedCache(gemma, num_blocks=8)
    config = gemma.config.text_config

    def ask(seen):
        embeddings = torch.zeros(1, 9, 64)
        return create_causal_mask(config, embeddings, None, cache, or_mask_function=seen)

    def two_ahead(batch, head, row, key):
        return key == row + 2

    def two_images_as_one(batch, head, row, key):
        parts = torch.tensor([0, 0, -1, -1, 0, 0, -1, -1, -1])
        return (parts[row] == parts[key]) & (parts[row] == 0)

    for seen in (two_ahead, two_images_as_one):
        with pytest.raises(clattn.Unsupported, match="mask: .* legal: causal, with spans"):
            ask(seen)


@torch.no_grad()
def test_a_mask_of_another_window_is_refused(gemma):
    cache = PagedCache(gemma, num_blocks=8)
    gemma.set_attn_implementation({"text_config": "clattn"})
    gemma.config.text_config.sliding_window = 8
    with pytest.raises(clattn.Unsupported, match=r"mask: .*8, 'clip_left'.* legal in layer 0: "):
        gemma(**images(prompts(40), (0, 3, 20)), past_key_values=cache)
