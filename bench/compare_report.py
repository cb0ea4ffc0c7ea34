"""What compare_torch.py has measured: as a table, and as files that `clattn bench --compare` reads.

`entries` holds one dictionary for each (row name, peer): times, or the reason why there are none.
"""
import math
import os

import report_file

UNSTEADY = 0.2  # as clattn bench marks rows: rounds further apart than this share of the median
DRIFT = 0.1  # between two measurements of a row


def is_unsteady(timed):
    return timed["p90_us"] - timed["p10_us"] > UNSTEADY * timed["median_us"]


def spread(timed):
    """Median, and the 10th and 90th percentile of the rounds as per cent of deviation from it."""
    low, high = (100 * (timed[key] / timed["median_us"] - 1) for key in ("p10_us", "p90_us"))
    mark = "~" if is_unsteady(timed) else ""
    return f"{timed['median_us']:.1f} {low:+.0f}..{high:+.0f}%{mark}"


def geometric_mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def fastest_of(row, entries, peers):
    """The entry of the peer that took least, or None."""
    timed = [entries[row["name"], peer] for peer in peers
             if "median_us" in entries.get((row["name"], peer), {})]
    return min(timed, key=lambda entry: entry["median_us"], default=None)


def name_and_ratio(entry):
    return f"{entry['peer']} ({entry['ratio']:.2f})" if entry else "-"


def print_table(rows, entries, peers):
    """Peers without a time have a line below the table, not a column."""
    timed = [peer for peer in peers
             if any(peer == p and "median_us" in entry for (_, p), entry in entries.items())]
    print("median us, p10-p90 of the rounds; in brackets how many times as fast clattn is\n")
    width = max(len(row["name"]) for row in rows)
    columns = "".join(f" {peer:>28}" for peer in timed)
    print(f"{'':{width}} {'clattn':>20}{columns} {'fastest peer':>28}")
    for row in rows:
        line = f"{row['name']:{width}} {spread(row):>20}"
        for peer in timed:
            entry = entries.get((row["name"], peer), {})
            cell = f"{spread(entry)} ({entry['ratio']:.2f})" if "median_us" in entry else "-"
            line += f" {cell:>28}"
        best = fastest_of(row, entries, timed)
        line += f" {name_and_ratio(best):>28}"
        print(line if row["correct"] else line + "  clattn WRONG")
    times = [*rows, *(entry for entry in entries.values() if "median_us" in entry)]
    if any(map(is_unsteady, times)):
        print("~ rounds differ by more than 20 %: other work on the machine? Do not compare it")
    print_means(rows, entries, timed)
    print_agreement(rows, entries)
    print_reasons(rows, entries, peers)


def print_means(rows, entries, peers):
    for peer in peers:
        ratios = [e["ratio"] for (_, p), e in entries.items() if p == peer and "ratio" in e]
        print(f"geometric mean over {len(ratios)} rows: "
              f"clattn is {geometric_mean(ratios):.2f} times as fast as {peer}")
    best = [entry for entry in (fastest_of(row, entries, peers) for row in rows) if entry]
    if best:
        ratios = [entry["ratio"] for entry in best]
        print(f"beside the fastest peer of each row: {geometric_mean(ratios):.2f} times as fast in "
              f"the geometric mean of {len(ratios)}, {min(ratios):.2f} to {max(ratios):.2f}; "
              f"clattn leads in {sum(ratio > 1 for ratio in ratios)}")


def print_agreement(rows, entries):
    """What the outputs were held to; docs/benchmark.md says against what, and how much."""
    shares = [row["error_share_of_allowance"] for row in rows if "error_share_of_allowance" in row]
    for text, values, form in (
            ("clattn from its oracle, of what it is allowed", shares, ".0%"),
            ("a peer from the float64 reference",
             [e["max_error"] for e in entries.values() if "median_us" in e], ".1e"),
            ("a peer from another",
             [e["max_difference"] for e in entries.values()
              if "median_us" in e and e.get("compared_with")], ".1e")):
        if values:
            print(f"largest error of {text}: {max(values):{form}} in {len(values)} outputs")


def print_drift(rows, again):
    """Which rows of clattn took another time when the peers were done."""
    first = {row["name"]: row["median_us"] for row in rows}
    ratios = {row["name"]: row["median_us"] / first[row["name"]] for row in again
              if "median_us" in row and row["name"] in first}
    drifted = [f"{name} {ratio:.2f}" for name, ratio in ratios.items()
               if not 1 / (1 + DRIFT) <= ratio <= 1 + DRIFT]
    print(f"clattn again: {len(drifted)} of {len(ratios)} rows took another time by more than "
          f"{DRIFT:.0%}: {', '.join(drifted) or 'none'}")


def print_reasons(rows, entries, peers):
    reasons = {}
    for row in rows:
        for peer in peers:
            entry = entries.get((row["name"], peer), {"reason": "the run was over"})
            if "median_us" not in entry:
                reasons.setdefault((peer, entry["reason"]), []).append(row["name"])
    for (peer, reason), names in reasons.items():
        print(f"no time of {peer} in {len(names)} rows ({names[0]}, ...): {reason}")


def write_reports(folder, report, rows, entries, peers, commit):
    """A file a peer in the form of clattn bench --json, with what --compare needs: their paths."""
    os.makedirs(folder, exist_ok=True)
    files = {"clattn": report}
    by_name = {row["name"]: row for row in rows}
    for peer in peers:
        timed = [e for (_, p), e in entries.items() if p == peer and "median_us" in e]
        if not timed:
            continue
        files[peer] = {**{key: value for key, value in report.items() if key != "rows"},
                       "commit": commit, "rows": []}
        for entry in timed:
            row = {**by_name[entry["name"]],
                   **{key: entry[key] for key in ("median_us", "p10_us", "p90_us")},
                   "unsteady": is_unsteady(entry), "correct": True, "backend": peer,
                   "kernels": []}
            row["rate"] /= entry["ratio"]
            if "share_of_ceiling" in row:
                row["share_of_ceiling"] /= entry["ratio"]
            files[peer]["rows"].append(row)
    paths = []
    for name, content in files.items():
        paths.append(os.path.join(folder, f"{name}.json"))
        report_file.write(paths[-1], content)
    return paths
