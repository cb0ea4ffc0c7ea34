"""The program in docs/python.md, and the commands that it names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_programs(capsys):
    names = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(program, names)
    assert capsys.readouterr().out == "1.0000 0.9937\n"


@pytest.mark.parametrize("command", ["devices", "explain --heads 4 --kv-heads 2 --head-size 64"])
def test_command(command, tmp_path):
    run = [sys.executable, "-m", "clattn", *command.split()]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout


def test_command_refuses_in_one_line(tmp_path):
    run = [sys.executable, "-m", "clattn", "explain", "--device", "no such device"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("clattn: ") and done.stderr.count("\n") == 1
