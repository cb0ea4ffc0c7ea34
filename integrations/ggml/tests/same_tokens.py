"""Whether two runs of tests/tokens.cpp gave the same tokens.

Random models have near ties: where the first run's two best logits are closer than NEAR, the other
run may have chosen the other one, and the rest of that sequence is not compared.

usage: same_tokens.py FIRST OTHER
"""

import sys
from pathlib import Path

NEAR = 0.02  # logits of these models have a standard deviation of about 2


def sequences(path: str) -> list[list[tuple[int, float]]]:
    lines = Path(path).read_text().splitlines()
    pairs = [[choice.split(":") for choice in line.split()] for line in lines]
    return [[(int(token), float(margin)) for token, margin in line] for line in pairs]


def main() -> int:
    first, other = sequences(sys.argv[1]), sequences(sys.argv[2])
    compared = 0
    for number, (wanted, got) in enumerate(zip(first, other, strict=True)):
        for i, ((token, margin), (other_token, _)) in enumerate(zip(wanted, got, strict=True)):
            if token != other_token:
                if margin < NEAR:
                    break
                print(f"sequence {number}, token {i}: {other_token}, not {token} by {margin}")
                return 1
            compared += 1
    print(f"{compared} of {sum(map(len, first))} tokens compared, all equal")
    return 0 if compared > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
