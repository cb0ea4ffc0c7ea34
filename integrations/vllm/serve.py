#!/usr/bin/env python3
"""Serves models in this process and leaves a report of each: what compare.py starts."""

import argparse
import json
from pathlib import Path

from models import BATCHED_TOKENS, MODELS, NEW_TOKENS, prompts


def served_by_clattn(worker) -> list[bool]:
    """Of each attention layer of a rank, a drafter's included."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    kinds = (Attention, MLAAttention)
    return [
        getattr(layer.impl, "served", None) is not None
        for layer in layers
        if isinstance(layer, kinds)
    ]


def counted(llm, name: str) -> int:
    """vLLM's counter of that name."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def generated(llm, given: list[dict]) -> dict:
    """Greedy tokens, and the logarithm of each one's probability."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    results = llm.generate(given, sampling, use_tqdm=False)
    outputs = [result.outputs[0] for result in results]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [step[token].logprob for step, token in zip(output.logprobs, output.token_ids)]
            for output in outputs
        ],
        "cached": sum(result.num_cached_tokens or 0 for result in results),
    }


def embedded(llm, given: list[dict]) -> dict:
    """An encoder's vector of each request."""
    results = llm.embed(given, use_tqdm=False)
    return {"vectors": [list(result.outputs.embedding) for result in results]}


def speculation(model, folder: Path, ranks: int) -> dict:
    """The engine's options that have the model's drafts made."""
    config = dict(model.drafts)
    if model.drafter:
        config |= {"model": str(folder / model.drafter), "draft_tensor_parallel_size": ranks}
    return {"speculative_config": config, "disable_log_stats": False}  # which counts drafts


def serve(name: str, folder: Path, count: int, dtype: str, ranks: int, drafts: bool) -> dict:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    model = MODELS[name]
    print(f"serve: {name}", flush=True)
    chunks = not model.whole_prompts
    engine = {"block_size": 32} | model.engine
    if dtype == "float32":
        engine |= model.exact
    if drafts and model.drafts:
        engine |= speculation(model, folder / name, ranks)
    llm = LLM(
        model=str(folder / name),
        skip_tokenizer_init=not model.is_encoder,
        enforce_eager=True,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=BATCHED_TOKENS if chunks else 1024,
        enable_prefix_caching=chunks,
        enable_chunked_prefill=chunks,
        tensor_parallel_size=ranks,
        distributed_executor_backend="uni" if ranks == 1 else "mp",
        **engine,
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts(count)]
    report = embedded(llm, given) if model.is_encoder else generated(llm, given)
    report["clattn"] = llm.collective_rpc(served_by_clattn)  # of every rank
    if "speculative_config" in engine:
        report["drafted"] = counted(llm, "spec_decode_num_draft_tokens")
        report["accepted"] = counted(llm, "spec_decode_num_accepted_tokens")
    del llm
    cleanup_dist_env_and_memory()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the models")
    parser.add_argument("--run", required=True, help="the name of the reports")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--drafts", action="store_true", help="of models that have them")
    parser.add_argument("models", nargs="+")
    given = parser.parse_args()
    for name in given.models:
        report = serve(
            name, given.folder, given.requests, given.dtype, given.ranks, given.drafts
        )
        (given.folder / f"{name}.{given.run}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
