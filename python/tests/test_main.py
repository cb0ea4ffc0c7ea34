"""python -m clattn without a command, with small limits."""

import io
import re
import sys

import clattn
import numpy as np
import pytest
from clattn import __main__, tour


@pytest.fixture
def quick(monkeypatch):
    """A tour of a second or two: short lengths, one case, one run of each."""
    monkeypatch.setattr(sys, "argv", ["clattn"])
    monkeypatch.setattr(tour, "LAUNCH_S", 0.0)
    monkeypatch.setattr(tour, "PROBE_LENGTH", 40)
    monkeypatch.setattr(tour, "RUN_S", 0.001)
    monkeypatch.setattr(tour, "RUNS", 2)
    monkeypatch.setattr(tour, "CASES", tour.CASES[:1])


def test_tells_what_is_here_and_how_fast(quick, capsys):
    assert __main__.main() == 0
    told = capsys.readouterr()
    assert told.err == ""  # no terminal, so no bar
    lines = told.out.splitlines()
    assert lines[0] == "Devices:"
    best = clattn.select_device().selector
    name = re.escape(clattn.Context().capabilities.name)
    units = r"\d+ compute units, \d+\.\d GiB"
    assert any(re.match(rf"  {best} +\w+  {name} \(.*\), {units}$", line) for line in lines)
    for role in ("decode", "prefill"):
        assert any(re.match(rf"  {role} +\w+ +tiles of \d+ rows", line) for line in lines)
    assert any(line.startswith("  mixed") and " passed " in line for line in lines)
    number = r"[\d.e+-]+"
    for pattern in (
        rf"  decode, 1 x 40 tokens +{number} ms +{number} GB/s$",
        rf"  decode, 16 x 40 tokens +{number} ms +{number} GB/s$",
        rf"  prompt, 1 x 40 tokens +{number} ms +{number} TFLOP/s$",
    ):
        assert sum(re.match(pattern, line) is not None for line in lines) == 1, told.out
    for unit in ("ms: ", "GB/s: ", "TFLOP/s: ", "Lengths are below 4096"):
        assert any(line.startswith(unit) for line in lines)


def test_shows_progress_on_a_terminal(quick, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert __main__.main() == 0
    assert "1 of 1\n" in terminal.getvalue()  # compiled
    assert terminal.getvalue().endswith("4 of 4\n")  # a case, three measurements


def test_lengths_grow_where_launches_are_short(quick, monkeypatch):
    layer = tour.Layer(clattn.Context())
    work = tour.Work("decode", 2, 160)
    never = float("inf")
    assert tour._fitting(layer, work, never).work.length == 40
    monkeypatch.setattr(tour, "LAUNCH_S", 1e9)
    assert tour._fitting(layer, work, never).work == work
    assert tour._fitting(layer, tour.Work("decode", 2, 100), never).work.length == 100
    assert tour._fitting(layer, work, 0.0).work.length == 40  # in a hurry
    assert tour._fitting(layer, tour.Work("decode", 2, 30), never).work.length == 30


def test_rates():
    config = clattn.AttentionConfig(**tour.LAYER)
    decode, _, prompt = tour.WORKS
    assert decode.rate(config, 1e-3).split() == ["16.8", "GB/s"]  # 2 * 4096 * 8 * 128 * 2 bytes
    assert prompt.rate(config, 1e-3).split() == ["8.6", "TFLOP/s"]  # 4 * 1024 * 1025 / 2 * 32 * 128


def times_of(output):
    return re.findall(r" ms ", output)


def test_what_is_not_written_has_no_time(quick, monkeypatch, capsys):
    monkeypatch.setattr(tour.Step, "seconds", lambda self, launches: 1.0)
    assert __main__.main() == 1
    told = capsys.readouterr().out
    assert told.count("FAILED: the output is not finite everywhere") == 3
    assert not times_of(told)


def test_what_is_wrong_has_no_time(quick, monkeypatch, capsys):
    def wrong(self, launches):
        self.layer.queue.write(self.output, np.full_like(self.query, 0.5))
        return 1.0

    monkeypatch.setattr(tour.Step, "seconds", wrong)
    assert __main__.main() == 1
    told = capsys.readouterr().out
    assert len(re.findall(r"FAILED: the error is [\d.e+]+ times what is allowed", told)) == 3
    assert not times_of(told)


def test_a_device_that_does_not_open_hides_no_other(monkeypatch):
    def refuse(device):
        raise clattn.OpenCLError("no memory\nand more")

    monkeypatch.setattr(tour._clattn, "Context", refuse)
    lines = tour.device_lines()
    assert len(lines) == len(clattn.devices())
    assert all(line.endswith(" not usable: no memory") for line in lines)


def test_refusals_are_one_line(quick, monkeypatch, capsys):
    def refuse():
        raise clattn.InvalidArgument("device: 'x', legal: gpu, cpu")

    monkeypatch.setattr(tour._clattn, "select_device", refuse)
    assert __main__.main() == 2
    assert capsys.readouterr().err == "clattn: device: 'x', legal: gpu, cpu\n"


def test_an_unknown_command_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["clattn", "devises"])
    with pytest.raises(SystemExit) as refused:
        __main__.main()
    assert refused.value.code == 2
    assert "devises" in capsys.readouterr().err
