"""The programs in docs/python.md and in the README, and the commands that the former names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import clattn

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "output"), [("docs/python.md", "1.0000 0.9937\n"), ("README.md", "True\n")]
)
def test_programs(page, output, capsys):
    names = {}
    for program in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S):
        exec(program, names)
    assert capsys.readouterr().out == output


def test_code_for_flashinfer():
    page = (ROOT / "docs/integrations.md").read_text()
    (program,) = re.findall(r"```python\n(import clattn.flashinfer .*?)```", page, re.S)
    names = {}
    exec(program, names)
    assert names["out"].shape == (2, 8, 64) and names["lse"].shape == (2, 8)


def test_version_is_the_headers():
    header = (ROOT / "include/clattn/version.h").read_text()
    assert clattn.__version__ == ".".join(re.findall(r"VERSION_[A-Z]+ (\d+)", header))


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
