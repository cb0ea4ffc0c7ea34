#!/usr/bin/env python3
"""Runs vLLM's own benchmarks by CLAttn and by vLLM's CPU backend, and prints both.

They are what `vllm bench throughput` and `vllm bench latency` run, with the model of speed.py and
as many threads as there are cores. Every turn is a process that warms up before it measures; the
engines take turns.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import print_versions
from models import save_tokenizer
from speed import ENGINES, SHAPE, environment_of, make_model, ratios, turns


def benchmarks(given: argparse.Namespace) -> dict[str, list[str]]:
    """The arguments of each."""
    prompt, new = str(given.prompt), str(given.new)
    # vLLM's limit of characters counts five for a token; ours have six, with a space.
    engine = ["--max-model-len", str(2 * (given.prompt + given.new))]
    engine += ["--dtype", "bfloat16", "--enforce-eager", "--disable-detokenize"]
    engine += ["--no-enable-prefix-caching"]
    requests = str(given.requests)
    return {
        "throughput": ["--random-input-len", prompt, "--random-output-len", new]
        + ["--num-prompts", str(4 * given.requests), "--num-warmups", requests]
        + ["--max-num-seqs", requests, *engine],
        "latency": ["--input-len", prompt, "--output-len", new, "--batch-size", requests]
        + ["--num-iters-warmup", "1", "--num-iters", str(given.iterations), *engine],
    }


def benchmark(arguments: list[str]) -> None:
    """The child: what the program `vllm` does, which does not start without a package `vllm`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    module = importlib.import_module(f"vllm.benchmarks.{arguments[0]}")
    parser = FlexibleArgumentParser()
    module.add_cli_args(parser)
    module.main(parser.parse_args(arguments[1:]))


def seconds(report: dict) -> float:
    """Of all requests (throughput), or of a batch's median (latency)."""
    if "latencies" in report:
        return statistics.median(report["latencies"])
    return report["elapsed_time"]


def turn(name: str, plugins: str, arguments: list[str], folder: Path, threads: int) -> dict:
    log, report = folder / "log", folder / "report.json"
    command = [sys.executable, __file__, "--child", name, "--model", str(folder / "model")]
    command += ["--output-json", str(report), *arguments]
    with log.open("w") as file:
        code = subprocess.run(
            command, env=environment_of(plugins, threads), stdout=file, stderr=file
        ).returncode
    if code != 0:
        raise SystemExit(f"{log.read_text()}\nbench: {name} ended with {code}")
    return json.loads(report.read_text())


def shown(reports: list[dict]) -> str:
    """The median of an engine's rounds, as vLLM tells it."""
    if "latencies" in reports[0]:
        return f"{statistics.median(map(seconds, reports)):.3g} s"
    return f"{statistics.median(report['tokens_per_second'] for report in reports):.0f} tokens/s"


def table(told: dict[str, dict[str, list[dict]]]) -> str:
    """Of each benchmark's rounds by engine."""
    lines = ["| | vLLM's own | CLAttn | times as fast (rounds) |", "| --- | --- | --- | --- |"]
    for name, rounds in told.items():
        own, ours = (rounds[engine] for engine in ENGINES)
        ratio = ratios(map(seconds, own), map(seconds, ours))
        lines.append(f"| {name} | {shown(own)} | {shown(ours)} | {ratio} |")
    return "\n".join(lines)


def run(given: argparse.Namespace) -> None:
    print_versions()
    threads = len(os.sched_getaffinity(0))
    told: dict[str, dict[str, list[dict]]] = {}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        make_model(str(folder / "model"), given.layers)
        save_tokenizer(folder / "model", SHAPE["vocab_size"])
        for name, arguments in benchmarks(given).items():
            told[name] = {engine: [] for engine in ENGINES}
            for number, engine in turns(given.rounds):
                told[name][engine].append(turn(name, engine, arguments, folder, threads))
                print(f"bench: {name}, round {number + 1}, plug-ins: {engine}", file=sys.stderr)
    print(f"\n{table(told)}\n")
    print(f"{given.requests} requests at once, {given.prompt} tokens and {given.new} new of each,")
    print(f"{given.layers} layers, {threads} threads, bf16, medians of {given.rounds} rounds")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        benchmark(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8, help="that are served at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that are decoded of each")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=5, help="batches of a latency's round")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
