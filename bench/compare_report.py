"""What compare_torch.py has measured: as a table, and as files that `clattn bench --compare` reads.

`entries` holds one dictionary for each (row name, peer): times, or the reason why there are none.
"""
import json
import math
import os


def spread(timed):
    """Median, and the 10th and 90th percentile of the rounds as per cent of deviation from it."""
    low, high = (100 * (timed[key] / timed["median_us"] - 1) for key in ("p10_us", "p90_us"))
    return f"{timed['median_us']:.1f} {low:+.0f}..{high:+.0f}%"


def print_table(rows, entries, peers):
    print("median us, p10-p90 of the rounds; in brackets how many times as fast clattn is\n")
    width = max(len(row["name"]) for row in rows)
    print(f"{'':{width}} {'clattn':>20}" + "".join(f" {peer:>28}" for peer in peers))
    reasons = {}
    for row in rows:
        line = f"{row['name']:{width}} {spread(row):>20}"
        for peer in peers:
            entry = entries.get((row["name"], peer), {"reason": "out of time"})
            cell = "-"
            if "median_us" in entry:
                cell = f"{spread(entry)} ({entry['ratio']:.2f})"
            else:
                reasons.setdefault((peer, entry["reason"]), []).append(row["name"])
            line += f" {cell:>28}"
        print(line if row["correct"] else line + "  clattn WRONG")
    for peer in peers:
        ratios = [e["ratio"] for (_, p), e in entries.items() if p == peer and "ratio" in e]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"geometric mean over {len(ratios)} rows: "
                  f"clattn is {mean:.2f} times as fast as {peer}")
    for (peer, reason), names in reasons.items():
        print(f"no time of {peer} in {len(names)} rows ({names[0]}, ...): {reason}")


def write_reports(folder, report, rows, entries, peers, commit):
    """A file a peer in the form of clattn bench --json, with what --compare needs."""
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
                   "correct": True, "backend": peer, "kernels": []}
            row["rate"] /= entry["ratio"]
            if "share_of_ceiling" in row:
                row["share_of_ceiling"] /= entry["ratio"]
            files[peer]["rows"].append(row)
    for name, content in files.items():
        with open(os.path.join(folder, f"{name}.json"), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
