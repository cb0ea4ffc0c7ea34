"""Keeps some parameter sets of each test, and counts what clattn.flashinfer refuses by itself."""

import collections
import os

import clattn
import pytest

SETS = int(os.environ["PEERS_SETS"])
_outcomes: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
_reasons: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each function's sets the first, the last and those at equal distances between them.

    Without what is of NVIDIA's devices alone.
    """
    functions = collections.defaultdict(list)
    for item in items:
        if "nvfp4" in item.nodeid or "cuda_graph" in item.nodeid:
            continue
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = []
    for sets in functions.values():
        last, count = len(sets) - 1, min(SETS, len(sets))
        kept += [sets[round(i * last / max(count - 1, 1))] for i in range(count)]
    items[:] = kept


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = (yield).get_result()
    if call.when != "call" and report.outcome == "passed":
        return
    outcome, reason = report.outcome, ""
    if call.excinfo is not None:
        reason = f"{call.excinfo.typename}: {call.excinfo.value}".strip().split("\n")[0]
        if "NVIDIA" in reason:
            outcome = "skipped"
        if isinstance(call.excinfo.value, clattn.Error):
            outcome, report.outcome = "refused", "skipped"
            report.longrepr = (str(item.path), item.location[1], reason)
    _outcomes[item.location[0]][outcome] += 1
    if reason:
        _reasons[outcome][reason] += 1


def pytest_terminal_summary(terminalreporter) -> None:
    columns = ["passed", "failed", "refused", "skipped"]
    print_line = terminalreporter.write_line
    print_line(f"\n{'file':44}" + "".join(f"{name:>9}" for name in columns))
    total = collections.Counter()
    for name, counts in sorted(_outcomes.items()):
        total += counts
        print_line(f"{name:44}" + "".join(f"{counts[column]:9}" for column in columns))
    print_line(f"{'all':44}" + "".join(f"{total[column]:9}" for column in columns))
    for outcome in ("failed", "refused"):
        for reason, count in _reasons[outcome].most_common():
            print_line(f"{outcome} {count}: {reason[:200]}")
