"""Progress as it is shown, and told by the checks."""

import io
import sys

import clattn
import pytest
from clattn import __main__, checks


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bar_fills_on_a_terminal():
    terminal = Terminal()
    bar = clattn.ProgressBar("compiling", terminal)
    for done in range(4):
        bar(done, 3)
    lines = terminal.getvalue().split("\r")[1:]
    assert lines[0] == f"compiling [{' ' * 30}] 0 of 3"
    assert lines[1] == f"compiling [{'#' * 10}{' ' * 20}] 1 of 3"
    assert lines[3] == f"compiling [{'#' * 30}] 3 of 3\n"


def test_bar_ends_its_line_when_the_call_fails():
    terminal = Terminal()
    with pytest.raises(clattn.InvalidArgument):
        with clattn.ProgressBar("compiling", terminal) as bar:
            bar(1, 3)
            raise clattn.InvalidArgument("no device fits")
    assert terminal.getvalue().endswith("1 of 3\n")


def test_bar_ends_its_line_once():
    terminal = Terminal()
    with clattn.ProgressBar("compiling", terminal) as bar:
        bar(3, 3)
    assert terminal.getvalue().endswith("3 of 3\n")
    assert terminal.getvalue().count("\n") == 1
    with clattn.ProgressBar("nothing to do", terminal):
        pass
    assert terminal.getvalue().count("\n") == 1


def test_a_check_that_fails_ends_the_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "argv", ["clattn", "check"])

    def check(_, progress):
        progress(1, 3)
        raise clattn.InvalidArgument("no device fits")

    monkeypatch.setattr(clattn, "check", check)
    assert __main__.main() == 2
    assert terminal.getvalue().endswith("1 of 3\nclattn: no device fits\n")


def test_bar_is_silent_elsewhere():
    stream = io.StringIO()
    clattn.ProgressBar("compiling", stream)(1, 1)
    assert stream.getvalue() == ""


def test_checks_tell_their_progress():
    told = []
    results = clattn.check(cases=checks.CASES[:2], progress=lambda *step: told.append(step))
    assert [result.passed for result in results] == [True, True]
    assert told == [(0, 2), (1, 2), (2, 2)]
