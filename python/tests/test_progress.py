"""Progress as it is shown, and told by the checks."""

import io

import clattn
from clattn import checks


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


def test_bar_is_silent_elsewhere():
    stream = io.StringIO()
    clattn.ProgressBar("compiling", stream)(1, 1)
    assert stream.getvalue() == ""


def test_checks_tell_their_progress():
    told = []
    results = clattn.check(cases=checks.CASES[:2], progress=lambda *step: told.append(step))
    assert [result.passed for result in results] == [True, True]
    assert told == [(0, 2), (1, 2), (2, 2)]
