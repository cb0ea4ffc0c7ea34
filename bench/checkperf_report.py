"""What checkperf has measured: a ratio of times for each row, its interval and what it decides.

usage: checkperf_report.py FOLDER RUNS THRESHOLD_PER_CENT NAME_A NAME_B
The folder holds a0.json, b0.json, a1.json, ... of clattn bench. Exit code 0: no row is slower;
3: some are; 2: there is nothing to compare.
"""
import math
import os
import statistics
import sys

import report_file

# Student's t, two-sided 95 %, by degrees of freedom; the next lower row serves those between.
T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
     12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000}


def times(path):
    rows = report_file.read(path)["rows"]
    # Reports of before the names were there are told apart by their fields.
    fields = ("suite", "batch", "query_len", "seq_len")
    names = [r.get("name") or "/".join(str(r[k]) for k in fields) for r in rows]
    return {name: row["median_us"] for name, row in zip(names, rows) if "median_us" in row}


def interval(a, b):
    """Geometric mean of b / a over the pairs, and its 95 % confidence interval."""
    logs = [math.log(y / x) for x, y in zip(a, b)]
    t = T[max(key for key in T if key <= len(logs) - 1)]
    mean, error = statistics.mean(logs), t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - error), math.exp(mean + error)


def verdict_of(low, high, threshold):
    if low > 1 + threshold:
        return "SLOWER"
    if high < 1 - threshold:
        return "faster"
    return "undecided" if high > 1 + threshold else ""


def main():
    work, runs, threshold = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 100
    a, b = ([times(os.path.join(work, f"{side}{run}.json")) for run in range(runs)]
            for side in "ab")
    names = [name for name in a[0] if all(name in report for report in a + b)]
    if not names:
        print("checkperf: the two have no row in common", file=sys.stderr)
        return 2
    width = max(map(len, names))
    print(f"time of {sys.argv[5]} / time of {sys.argv[4]}, {runs} pairs")
    print(f"{'':{width}}   ratio   95 % interval")
    verdicts = []
    for name in names:
        ratio, low, high = interval([report[name] for report in a], [report[name] for report in b])
        verdicts.append(verdict_of(low, high, threshold))
        print(f"{name:{width}} {ratio:7.3f}   {low:.3f} ... {high:.3f}  {verdicts[-1]}".rstrip())
    slower, undecided = verdicts.count("SLOWER"), verdicts.count("undecided")
    print(f"{slower} of {len(names)} rows are slower by more than {threshold:.1%}"
          + (f", {undecided} undecided: more RUNS narrow the intervals" if undecided else ""))
    return 3 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
