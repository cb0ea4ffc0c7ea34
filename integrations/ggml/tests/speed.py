"""A table of llama-bench without and with CLAttn.

usage: speed.py WITHOUT.jsonl WITH.jsonl: what `llama-bench -o jsonl` printed, rounds in turns
"""

import json
import sys
from pathlib import Path
from statistics import median


def rounds(path: str) -> dict[tuple[int, int, int], list[float]]:
    """Tokens a second of each round by prompt, generated tokens and depth."""
    speeds: dict[tuple[int, int, int], list[float]] = {}
    for line in Path(path).read_text().splitlines():
        if not line.startswith("{"):
            continue
        test = json.loads(line)
        key = (test["n_prompt"], test["n_gen"], test["n_depth"])
        speeds.setdefault(key, []).append(test["avg_ts"])
    return speeds


def main() -> None:
    without, with_clattn = rounds(sys.argv[1]), rounds(sys.argv[2])
    print("| test | depth | ggml, tokens/s | CLAttn, tokens/s | times as fast |")
    print("| --- | --- | --- | --- | --- |")
    for key, before in without.items():
        after = with_clattn[key]
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        prompt, generated, depth = key
        test = f"pp{prompt}" if prompt else f"tg{generated}"
        print(
            f"| {test} | {depth} | {median(before):.1f} | {median(after):.1f} | "
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
