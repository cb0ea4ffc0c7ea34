"""The program in docs/python.md, and the commands that it names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_program(capsys):
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S).group(1), {})
    assert capsys.readouterr().out == "1.0000 0.9937\n"


@pytest.mark.parametrize("command", ["devices", "explain --heads 4 --kv-heads 2 --head-size 64"])
def test_command(command, tmp_path):
    run = [sys.executable, "-m", "clattn", *command.split()]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout
