#!/usr/bin/env python3
"""Writes the tables of docs/results.md and docs/performance.md from the reports in bench/results/.

usage: bench/results_tables.py [--check] [--results FOLDER] [--page FILE]...

FOLDER/NAME.json, written by `clattn bench --json`, becomes a section with a table for each suite.
FOLDER/NAME/*.json, written by `bench/compare_torch.py --reports FOLDER/NAME`, becomes a table for
each model: clattn.json beside each peer. Both stand between the page's two marks. A page may also
name rows of one report, SUITE/BATCH/OPTIONS as they are called there, which become a table behind
the name:

    <!-- rows of bench/results/NAME.json: decode/64q1s8k prefill/q16k -->
    <!-- end of the rows -->

--check changes nothing and exits with 1 if a page does not say what the reports say. Exits with 2
for reports and pages that it cannot read.
"""
import argparse
import math
import pathlib
import re
import sys

import compare_report
import report_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN = "<!-- tables of bench/results/: written by bench/results_tables.py, do not edit -->"
END = "<!-- end of the tables of bench/results/ -->"
ROWS = re.compile(r"(<!-- rows of bench/results/([^/ ]+)\.json:([^>]*)-->\n).*?"
                  r"(<!-- end of the rows -->)", re.DOTALL)
CEILINGS = {
    "read_gb_per_s": ("streaming read", "GB/s"),
    "page_read_gb_per_s": ("pages in random order", "GB/s"),
    "copy_gb_per_s": ("copy, read and written", "GB/s"),
    "fma_gflop_per_s": ("f32 multiply-add", "GFLOP/s"),
    "bf16_gflop_per_s": ("bf16 by x86's units", "GFLOP/s"),
    "mma_gflop_per_s": ("`mma.sync`", "GFLOP/s"),
    "wgmma_gflop_per_s": ("`wgmma`", "GFLOP/s"),
}
PAGES = ("results.md", "performance.md")
JOINED = ("flashinfer", "fla", "sdpa", "vllm")  # libraries with several kernels or forms


class Refused(Exception):
    """A report or a page that cannot be used; says which and why."""


def number(value):
    """Three to four digits, thousands apart: 4 380, 490.1, 8.93, 0.0412."""
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def read_report(path):
    try:
        report = report_file.read(path)
        kind = report.get("format"), report.get("schema_version")
    except (OSError, ValueError, AttributeError) as error:
        raise Refused(f"{path}: {error}") from error
    if kind != ("clattn-bench", 1):
        raise Refused(f"{path}: format {kind[0]}, schema_version {kind[1]}, "
                      "legal: clattn-bench, 1")
    return report


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def provenance(report):
    device = report["device"]
    quick = ", `--quick`" if report["quick"] else ""
    return (f"{device['name']}, driver {device['driver_version']}, commit {report['commit']}, "
            f"{report['date'][:10]}{quick}")


def wrapped(text, width=100):
    """Lines of at most `width` columns."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def spread(row):
    low, high = (100 * (row[key] / row["median_us"] - 1) for key in ("p10_us", "p90_us"))
    return f"{low:+.0f}..{high:+.0f} %".replace("-", "−")


def rate_of(rate, unit):
    """Rates of products in TFLOP/s where they have thousands of GFLOP/s."""
    if unit == "GFLOP/s" and rate >= 1000:
        rate, unit = rate / 1000, "TFLOP/s"
    return f"{number(rate)} {unit}"


def row_cells(row):
    marks = ("~" if row["unsteady"] else "") + ("!" if row.get("above_ceiling") else "")
    rate = share = "-"
    if "rate" in row:
        rate = rate_of(row["rate"], row["rate_unit"])
        share = f"of {row['ceiling']}"
        if "share_of_ceiling" in row:
            share = f"{100 * row['share_of_ceiling']:.0f} % {share}"
    error = f"{100 * row['error_share_of_allowance']:.0f} %" if row["correct"] else "WRONG"
    name = row["name"].replace(f"/{row['suite']}/", " ")
    return [name, number(row["median_us"]) + marks, spread(row), rate, share, error]


def report_lines(title, report):
    lines = [f"### {title}", "", *wrapped(f"{provenance(report)}; `bench/results/{title}.json`."),
             ""]
    ceilings = [[name, rate_of(report['ceilings'][key], unit)]
                for key, (name, unit) in CEILINGS.items() if key in report["ceilings"]]
    lines += table(["ceiling", ""], ceilings)
    measured = [row for row in report["rows"] if "skipped" not in row]
    models = {row["name"].split("/", 1)[0] for row in measured}
    prefix = f"{models.pop()} " if len(models) == 1 else ""  # of every row: the title says it
    for suite in dict.fromkeys(row["suite"] for row in measured):
        cells = [row_cells(row) for row in measured if row["suite"] == suite]
        lines += table([suite, "µs", "p10..p90", "rate", "share", "error, of allowance"],
                       [[name.removeprefix(prefix), *others] for name, *others in cells])
    for row in report["rows"]:
        if "skipped" in row:
            lines += [*wrapped(f"{row['name']} was skipped: {row['skipped']}"), ""]
    return lines


def times_of_peers(reports):
    """The times of rows by peer, and the libraries of which several kernels or forms were measured.
    Each of those is one peer: for each row, its fastest."""
    libraries = [name.split("-", 1)[0] for name in reports]
    joined = {library for library in libraries
              if library in JOINED and libraries.count(library) > 1}
    times = {}
    for library, (name, report) in zip(libraries, reports.items()):
        peer = times.setdefault(library if library in joined else name, {})
        for row in report["rows"]:
            peer[row["name"]] = min(row["median_us"], peer.get(row["name"], math.inf))
    return times, sorted(joined)


def row_name(row):
    """The row's name without its model; "latent" stands for all latent options but heads."""
    name = row["name"].split("/", 1)[1].replace("/", " ")
    name = name.replace("num_kv_heads=1 head_size=576 use_mla=yes rope_dim=64", "latent")
    name = re.sub(r"num_heads=(\d+) num_kv_heads=(\d+)", r"\1/\2 heads", name)
    return re.sub(r" (block_size|scale)=\S+", "", name) if "latent" in name else name


def read_comparison(folder):
    """The report of clattn in a folder, and what times_of_peers() gives of the others."""
    reports = {path.stem: read_report(path) for path in sorted(folder.glob("*.json"))}
    if "clattn" not in reports:
        raise Refused(f"{folder}: no clattn.json")
    own = reports.pop("clattn")
    return (own, *times_of_peers(reports))


def rows_with_a_peer(own, times):
    return [row for row in own["rows"]
            if "skipped" not in row and any(row["name"] in peer for peer in times.values())]


def ratios_of(own, times):
    """How many times as fast clattn is in each row that a peer has: lists by the peer's name, and
    that compared with the fastest peer of each row."""
    rows = rows_with_a_peer(own, times)
    fastest = {row["name"]: min(peer[row["name"]] for peer in times.values()
                                if row["name"] in peer) for row in rows}

    def ratios(peer):
        return [peer[row["name"]] / row["median_us"] for row in rows if row["name"] in peer]
    return {name: ratios(peer) for name, peer in times.items()}, ratios(fastest)


def mean_text(name, ratios):
    return (f"{compare_report.geometric_mean(ratios):.2f} times as fast as {name} "
            f"({len(ratios)} row{'s' if len(ratios) > 1 else ''}, {min(ratios):.2f} to "
            f"{max(ratios):.2f})")


def comparison_lines(folder):
    own, times, joined = read_comparison(folder)
    models = {}
    for row in rows_with_a_peer(own, times):
        model = row["name"].split("/", 1)[0]
        cells = [row_name(row), number(row["median_us"]) if row["correct"] else "WRONG"]
        for peer in times.values():
            time = peer.get(row["name"])
            cells.append("-" if time is None
                         else f"{number(time)} ({time / row['median_us']:.2f})")
        models.setdefault(model, []).append(cells)
    fastest = f"; {', '.join(joined)}: the fastest kernel or form per row" if joined else ""
    text = (f"{provenance(own)}; µs, and in brackets how many times as fast clattn is{fastest}; "
            f"`bench/results/{folder.name}/`.")
    lines = [f"### {folder.name}", "", *wrapped(text), ""]
    for model, rows in models.items():
        lines += table([model, "clattn", *times], rows)
    by_peer, ratios = ratios_of(own, times)
    if not ratios:
        return lines
    if len(times) > 1:
        means = "; ".join(mean_text(name, values) for name, values in by_peer.items() if values)
        lines += [*wrapped(f"In the geometric mean clattn is {means}."), ""]
    text = (f"Beside the fastest peer of each row: {compare_report.geometric_mean(ratios):.2f} "
            f"times as fast in the geometric mean of {len(ratios)}, {min(ratios):.2f} to "
            f"{max(ratios):.2f} times in each.")
    return [*lines, *wrapped(text), ""]


def tables(results):
    if not results.is_dir():
        raise Refused(f"{results}: no such folder")
    lines = []
    for path in sorted(results.iterdir()):
        try:
            if path.is_dir():
                lines += comparison_lines(path)
            elif path.suffix == ".json":
                lines += report_lines(path.stem, read_report(path))
        except KeyError as error:
            raise Refused(f"{path}: lacks {error}") from error
    return lines or ["No report is kept there yet.", ""]


def chosen_rows(results, match):
    name = match[2]
    report = read_report(results / f"{name}.json")
    rows = {row["name"].split("/", 1)[-1]: row for row in report["rows"] if "skipped" not in row}
    cells = []
    for wanted in match[3].split():
        if wanted not in rows:
            raise Refused(f"{name}.json: lacks row {wanted}")
        _, time, _, rate, share, _ = row_cells(rows[wanted])
        cells.append([wanted.replace("/", " "), time, rate, share])
    text = f"{provenance(report)}; `bench/results/{name}.json`."
    lines = [*wrapped(text), "", *table(["", "µs", "rate", "share"], cells)]
    return match[1] + "\n".join(["", *lines]) + match[4]


def with_reports(page, text, results):
    """The page as the reports have it."""
    with_rows = ROWS.sub(lambda match: chosen_rows(results, match), text)
    if ROWS.search(text) and BEGIN not in text:
        return with_rows
    return with_tables(page, with_rows, tables(results))


def with_tables(page, text, lines):
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise Refused(f"{page}: expected each mark once:\n{BEGIN}\n{END}")
    head, rest = text.split(BEGIN)
    return "\n".join([head + BEGIN, "", *lines]) + END + rest.split(END)[1]


def fail(code, message):
    print(f"{pathlib.Path(sys.argv[0]).stem}: {message}", file=sys.stderr)
    sys.exit(code)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--page", type=pathlib.Path, action="append")
    arguments = parser.parse_args()
    for page in arguments.page or [ROOT / "docs" / name for name in PAGES]:
        try:
            text = page.read_text(encoding="utf-8")
            wanted = with_reports(page, text, arguments.results)
        except (OSError, Refused) as error:
            fail(2, error)
        if wanted == text:
            continue
        if arguments.check:
            fail(1, f"{page} is not what {arguments.results} says; run bench/results_tables.py")
        page.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
