"""The examples: what they print, as programs of their own."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_engine_gives_the_tokens_of_the_one_in_cpp():
    run = [sys.executable, "-B", EXAMPLES / "python" / "engine.py"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (EXAMPLES / "engine" / "expected.txt").read_text()
