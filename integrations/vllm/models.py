"""Small models with seeded random weights, so that nothing is downloaded, and what is asked."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 512
BATCHED_TOKENS = 256
NEW_TOKENS = 16
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,  # enough for tokens to vary
}
WINDOW = {"sliding_window": 64}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: As DeepSeek's own; vLLM 0.32's CPU kernel for plain rotary embeddings rotates other rows than
#: MLA's, which the batch decides.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
LATENT = SHAPE | {
    "rope_parameters": YARN,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 2,
}
CPU_MLA = {"block_size": 16, "attention_config": {"backend": "CPU_MLA"}}


#: In a drafter's weights, so small that some of its drafts are accepted.
NOISE = 0.005
#: Of the speculative_config of models whose next tokens are drafted.
DRAFTS = {"num_speculative_tokens": 3}


@dataclass(frozen=True)
class Model:
    """A class of transformers' configuration, its fields, and the engine's options."""

    config: str
    fields: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    #: Options of the engine that it is compared with, in f32, where those above would round.
    exact: dict[str, Any] = field(default_factory=dict)
    #: False: it is only compared by errors, because vLLM rounds differently or gives no tokens.
    tokens: bool = True
    #: The engine's speculative_config in runs with drafts; a drafter's folder comes in addition.
    drafts: dict[str, Any] = field(default_factory=dict)
    #: What Linux calls the instructions without which vLLM takes another backend.
    needs: str = ""
    #: vLLM neither cuts its prompts nor keeps their prefixes.
    whole_prompts: bool = False

    @property
    def is_encoder(self) -> bool:
        return self.engine.get("runner") == "pooling"

    @property
    def drafter(self) -> str:
        """The folder of the model that drafts, beside the model's own; empty: there is none."""
        method = self.drafts.get("method")
        return f"drafter of {method}" if method in DRAFTERS else ""

    @property
    def runs_here(self) -> bool:
        return self.needs in Path("/proc/cpuinfo").read_text()


MODELS = {
    "Llama": Model("LlamaConfig", SHAPE),
    "Llama, pages of 128": Model("LlamaConfig", SHAPE, {"block_size": 128}),
    "Qwen 3": Model("Qwen3Config", SHAPE),
    "Mistral, window of 64": Model("MistralConfig", SHAPE | WINDOW),
    "Gemma 2": Model("Gemma2Config", SHAPE | WINDOW | {"attn_logit_softcapping": 5.0}),
    "Gemma 3": Model("Gemma3TextConfig", SHAPE | WINDOW | {"sliding_window_pattern": 2}),
    "Mixtral": Model("MixtralConfig", SHAPE | EXPERTS),
    "GPT-OSS (sinks)": Model("GptOssConfig", SHAPE | WINDOW | EXPERTS),
    "Bloom (ALiBi)": Model(
        "BloomConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 512,
            "n_layer": 2,
            "n_head": 8,
            "initializer_range": 0.08,
        },
    ),
    "Llama, drafts by a model": Model(
        "LlamaConfig", SHAPE, drafts=DRAFTS | {"method": "draft_model"}
    ),
    "Llama, drafts by EAGLE": Model("LlamaConfig", SHAPE, drafts=DRAFTS | {"method": "eagle"}),
    "Mistral, window of 64, drafts by a model": Model(
        "MistralConfig", SHAPE | WINDOW, drafts=DRAFTS | {"method": "draft_model"}
    ),
    "DeepSeek V2 (MLA)": Model("DeepseekV2Config", LATENT, CPU_MLA, whole_prompts=True),
    "DeepSeek V2 (MLA, AMX)": Model(
        "DeepseekV2Config",
        LATENT,
        {"attention_config": {"backend": "AMX_MLA"}},
        exact=CPU_MLA,
        tokens=False,  # AMX_MLA takes bf16 alone
        needs="amx_bf16",
    ),
    "Llama, fp8 cache": Model(
        "LlamaConfig",
        SHAPE,
        {"kv_cache_dtype": "fp8"},
        exact={"kv_cache_dtype": "auto"},
        tokens=False,
    ),
    "BERT (encoder)": Model(
        "BertConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 512,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "max_position_embeddings": 1024,
            "initializer_range": 0.08,
        },
        {"runner": "pooling"},
        tokens=False,
        whole_prompts=True,
    ),
    # The last: vLLM 0.32 starts no other engine in a process that has loaded numba, as this does.
    "Llama, drafts by n-grams": Model(
        "LlamaConfig",
        SHAPE,
        drafts=DRAFTS | {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    ),
}


def save_noisy_copy(made, folder: Path) -> None:
    """The model that it drafts for with some noise, so that some drafts are accepted."""
    import torch

    for parameter in made.parameters():
        parameter.data += NOISE * torch.randn_like(parameter)
    made.save_pretrained(folder)


def save_eagle_head(made, folder: Path) -> None:
    """A layer behind a matrix that joins a token's embedding with the hidden state before it.

    The state passes and the layer, the model's first one, adds little: most drafts repeat the last
    token. Embeddings and the output matrix are those of the model.
    """
    import safetensors.torch
    import torch

    size = made.config.hidden_size
    weights = {
        name.removeprefix("model."): weight
        for name, weight in made.state_dict().items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = 0.1 * weight
    weights["fc.weight"] = torch.eye(size, 2 * size, dtype=made.dtype).roll(size, dims=1)
    made.config.num_hidden_layers = 1
    made.config.save_pretrained(folder)
    safetensors.torch.save_file(weights, folder / "model.safetensors")


#: What saves the drafter of a method in a folder, from the model that it drafts for.
DRAFTERS = {"draft_model": save_noisy_copy, "eagle": save_eagle_head}


def make_models(names: list[str], folder: Path, dtype: str) -> None:
    import torch
    import transformers

    for name in names:
        model = MODELS[name]
        torch.manual_seed(7)
        config = getattr(transformers, model.config)(**model.fields)
        kind = transformers.AutoModel if model.is_encoder else transformers.AutoModelForCausalLM
        made = kind.from_config(config, dtype=getattr(torch, dtype))
        made.save_pretrained(folder / name)
        if model.is_encoder:  # vLLM wants its tokenizer
            save_tokenizer(folder / name, VOCABULARY)
        if model.drafter:
            DRAFTERS[model.drafts["method"]](made, folder / name / model.drafter)


def save_tokenizer(folder: Path, words: int) -> None:
    """A token's text is its number; spaces separate them."""
    import tokenizers
    import transformers

    model = tokenizers.models.WordLevel({str(word): word for word in range(words)}, "0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def prompts(count: int) -> list[list[int]]:
    """Half of them begin with one of three prefixes; the longest are prefilled in chunks."""
    draw = random.Random(3)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(length)]

    prefixes = [tokens(length) for length in (64, 200, 330)]
    lengths = [1, 5, 17, 40, 90, 300]
    return [
        (draw.choice(prefixes) if draw.random() < 0.5 else []) + tokens(draw.choice(lengths))
        for _ in range(count)
    ]
