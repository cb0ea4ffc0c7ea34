#!/usr/bin/env python3
"""Times vLLM by CLAttn beside vLLM by its own CPU backend, and prints the tokens of both.

Two engines, each with as many threads as there are cores, take turns on the same requests: a step
that prefills all prompts, then steps that decode a token of each. The weights are random, of the
shape of Qwen 3 0.6B with fewer layers and a smaller vocabulary. Processor time is printed as well,
because it says more where other programs run on the same cores.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator

from compare import print_versions

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "initializer_range": 0.05,
}


#: The plug-ins of each engine: none, and ours.
ENGINES = ("none", "clattn")
PHASES = ("prefill", "decode")


def make_model(folder: str, layers: int) -> None:
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.Qwen3Config(**SHAPE, num_hidden_layers=layers)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def clocks() -> tuple[float, float]:
    """Seconds that passed, and that all threads of this process ran."""
    return time.perf_counter(), time.process_time()


def rounds(given: argparse.Namespace) -> None:
    """The child: a round for each line of its input, a line of JSON for each round."""
    from vllm import LLM, SamplingParams

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log must not come between the lines
    length = given.prompt + given.new
    llm = LLM(
        model=given.folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=given.requests,
        max_num_batched_tokens=max(given.requests * given.prompt, length),
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
    )
    engine = llm.llm_engine
    sampling = SamplingParams(
        temperature=0, max_tokens=given.new, ignore_eos=True, detokenize=False
    )
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        draw = random.Random(int(line))
        for request in range(given.requests):
            tokens = [draw.randrange(SHAPE["vocab_size"]) for _ in range(given.prompt)]
            engine.add_request(f"{line}{request}", {"prompt_token_ids": tokens}, sampling)
        told = {"prefill": [], "decode": [], "tokens": {}}
        while engine.has_unfinished_requests():
            start = clocks()
            for output in engine.step():
                told["tokens"][output.request_id] = list(output.outputs[0].token_ids)
            step = [end - begin for begin, end in zip(start, clocks(), strict=True)]
            told["decode" if told["prefill"] else "prefill"].append(step)
        for phase in PHASES:
            passed, processor = zip(*told[phase], strict=True)
            # Linux counts other cores' time late: one step's means little, so the mean of all.
            told[phase] = [statistics.median(passed), statistics.mean(processor)]
        print(json.dumps(told), file=answers, flush=True)


def environment_of(plugins: str, threads: int) -> dict[str, str]:
    """Of an engine's process."""
    from clattn_vllm.device import THREAD_VARIABLES  # here, so that vLLM's own runs without us

    return os.environ | {
        "VLLM_PLUGINS": plugins,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        **dict.fromkeys(("OMP_NUM_THREADS", *THREAD_VARIABLES), str(threads)),
    }


class Engine:
    """A process that serves on demand."""

    def __init__(self, plugins: str, threads: int, arguments: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments], env=environment_of(plugins, threads),
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"speed: vLLM ended with {self.process.wait()}")
        return line

    def round(self, seed: int) -> dict:
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return json.loads(self.answer())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def turns(rounds: int) -> Iterator[tuple[int, str]]:
    """Each round's number and engines, another one first in every other round."""
    for number in range(rounds):
        for engine in ENGINES if number % 2 == 0 else reversed(ENGINES):
            yield number, engine


def ratios(own: Iterable[float], ours: Iterable[float]) -> str:
    """How many times as fast ours is: the median of the rounds' ratios, the least, the greatest."""
    each = sorted(a / b for a, b in zip(own, ours, strict=True))
    return f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"


def table(given: argparse.Namespace, told: dict[str, list[dict]]) -> None:
    print("\n| tokens/s | vLLM's own | CLAttn | times as fast (rounds) | by processor time |")
    print("| --- | --- | --- | --- | --- |")
    for phase, tokens in zip(PHASES, (given.requests * given.prompt, given.requests), strict=True):
        cells = [phase]
        for name in ENGINES:
            seconds = statistics.median(turn[phase][0] for turn in told[name])
            cells.append(f"{tokens / seconds:.0f}")
        for clock in range(2):
            cells.append(
                ratios(*([turn[phase][clock] for turn in told[name]] for name in ENGINES))
            )
        print(f"| {' | '.join(cells)} |")


def run(given: argparse.Namespace) -> None:
    print_versions()
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, given.layers)
        threads = len(os.sched_getaffinity(0))
        arguments = ["--folder", folder, "--requests", str(given.requests)]
        arguments += ["--prompt", str(given.prompt), "--new", str(given.new)]
        engines = {name: Engine(name, threads, arguments) for name in ENGINES}
        for engine in engines.values():
            engine.answer()
        told = {name: [] for name in engines}
        for number, name in turns(given.rounds + 1):
            told[name].append(engines[name].round(number))
            print(f"speed: round {number} of {given.rounds}, plug-ins: {name}", file=sys.stderr)
        for engine in engines.values():
            engine.end()
    for name, title in zip(ENGINES, ("vLLM's own", "CLAttn"), strict=True):
        first = next(iter(told[name][0]["tokens"].values()))
        print(f"{title}: tokens {first[:12]} ...")
    # The first turn, which fills caches and raises clocks, does not count.
    table(given, {name: rounds[1:] for name, rounds in told.items()})
    print(f"\n{given.requests} requests of {given.prompt} tokens, {threads} threads, bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens that are decoded of each")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # the child's model
    given = parser.parse_args()
    rounds(given) if given.folder else run(given)


if __name__ == "__main__":
    main()
