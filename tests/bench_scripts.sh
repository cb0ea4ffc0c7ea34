#!/bin/sh
# bench/checkperf, bench/compare_torch.py, bench/results_tables.py and bench/chart.py: what they
# refuse, what they count, how they exit; and that reports have a row a line.
# Needs no device, no PyTorch, no git: small scripts stand in for those.
# usage: tests/bench_scripts.sh
set -eu
bench=$(cd "$(dirname "$0")/../bench" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONDONTWRITEBYTECODE=1 CHECKPERF_DIR="$work/trees"
PATH=$work/bin:$PATH

fail() {
  echo "bench_scripts: $*"
  cat "$work/log"
  exit 1
}

expect() {  # CODE TEXT COMMAND...: it exits with CODE and says TEXT
  wanted=$1 text=$2 code=0
  shift 2
  "$@" > "$work/log" 2>&1 || code=$?
  [ "$code" = "$wanted" ] || fail "exit code $code, not $wanted: $*"
  [ -z "$text" ] || grep -qF -- "$text" "$work/log" || fail "does not say '$text': $*"
}

program() {  # FILE: a program of the lines on standard input
  mkdir -p "$(dirname "$1")"
  { echo '#!/bin/sh' && cat; } > "$1"
  chmod +x "$1"
}

# Commits old and new; what clattn of each says it took stands in the file `times`, a line a run.
program "$work/bin/cmake" < /dev/null
program "$work/bin/git" <<'TEXT'
case $* in
  *rev-parse*old^*) echo old ;;
  *rev-parse*new^*) echo new ;;
  *"worktree prune") ;;
  "-C "*/trees/*" rev-parse HEAD") cat "$2/.git" ;;
  "-C "*/trees/*" status "*) cat "$2/changes" ;;
  *) exit 1 ;;
esac
TEXT
for commit in old new; do
  program "$work/trees/$commit/build/release/clattn" <<'TEXT'
[ "$*" = "bench decode --json /dev/null" ] && exit 0
[ "$1 $2 $3" = "bench decode --json" ] || { echo "clattn: unknown: $2" >&2; exit 2; }
times=${0%/build/*}/times
echo "{\"rows\": [{\"name\": \"row\", \"median_us\": $(head -n 1 "$times")}]}" > "$4"
sed -i 1d "$times"
TEXT
  echo "$commit" > "$work/trees/$commit/.git"
  : > "$work/trees/$commit/changes"
done

expect 0 'RUNS=10' "$bench/checkperf" --help
expect 0 'THRESHOLD=5' "$bench/checkperf" -h
expect 2 'needs two commits' "$bench/checkperf" old
expect 2 "'decode': arguments of clattn bench stand behind --" "$bench/checkperf" old new decode
expect 2 "RUNS: '2', legal" env RUNS=2 "$bench/checkperf" old new
expect 2 "RUNS: 'x', legal" env RUNS=x "$bench/checkperf" old new
expect 2 "THRESHOLD: '-1', legal" env THRESHOLD=-1 "$bench/checkperf" old new
expect 2 "'nix' is no commit" "$bench/checkperf" old nix
expect 2 'clattn: unknown: --bogus' "$bench/checkperf" old new -- --bogus
grep -q pair "$work/log" && fail 'measured before it looked at the arguments'

# Only the programs of the two commits are asked, both of them, and only as they were committed.
program "$work/here/build/release/clattn" <<'TEXT'
echo 'clattn: of another time' >&2 && exit 2
TEXT
mkdir -p "$work/here/bench"
cp "$bench/checkperf" "$bench/checkperf_report.py" "$bench/report_file.py" "$work/here/bench"
expect 2 'no worktree for old' \
  env CHECKPERF_DIR="$work/none" "$work/here/bench/checkperf" old new -- decode
for commit in old new; do
  echo other > "$work/trees/$commit/.git"
  expect 2 "trees/$commit holds another source than that of $commit: remove it" \
    "$bench/checkperf" old new -- decode
  echo "$commit" > "$work/trees/$commit/.git"
  echo ' M program/bench/bench.cpp' > "$work/trees/$commit/changes"
  expect 2 "trees/$commit holds another source" "$bench/checkperf" old new -- decode
  : > "$work/trees/$commit/changes"
done

compared() {  # CODE TEXT OLD NEW: times of three runs each
  for commit in old new; do
    if [ $commit = old ]; then times=$3; else times=$4; fi
    echo "$times" | tr ' ' '\n' > "$work/trees/$commit/times"
  done
  expect "$1" "$2" env RUNS=3 "$bench/checkperf" old new -- decode
}
compared 0 'row   1.000   1.000 ... 1.000' '7 8 9' '7 8 9'
compared 0 '0 of 1 rows are slower by more than 5.0%' '7 8 9' '7 8 9'
compared 1 'row   2.000   2.000 ... 2.000  SLOWER' '10 20 30' '20 40 60'
compared 0 'row   0.500   0.500 ... 0.500  faster' '20 40 60' '10 20 30'
# Logarithms of 1, 1 and 2: mean 0.231, deviation 0.400, times 4.303 / sqrt 3 is 0.994.
compared 0 'row   1.260   0.466 ... 3.405  undecided' '10 10 10' '10 10 20'
compared 0 '0 of 1 rows are slower by more than 5.0%, 1 undecided' '10 10 10' '10 10 20'

# What compare_torch.py asks of torch before it touches a tensor; every row has a cache of 8 bits.
mkdir -p "$work/python/torch/nn" "$work/python/vllm"
echo 'raise ImportError("not today")' > "$work/python/vllm/__init__.py"
cat > "$work/python/torch/__init__.py" <<'TEXT'
import contextlib, types
__version__ = "0"
float32 = float16 = bfloat16 = float8_e4m3fn = float8_e5m2 = None
inference_mode = contextlib.nullcontext
cuda = types.SimpleNamespace(is_available=lambda: False)
set_num_threads = lambda count: print("torch threads", count)
TEXT
echo > "$work/python/torch/nn/__init__.py"
echo 'SDPBackend = None' > "$work/python/torch/nn/attention.py"
mkdir -p "$work/none/torch"
echo 'raise ImportError("not today")' > "$work/none/torch/__init__.py"
program "$work/clattn" <<'TEXT'
echo "clattn threads $POCL_MAX_PTHREAD_COUNT" >&2
case $* in
  "bench --compare "*clattn.json" --html "*) echo page > "$5" && exit 0 ;;
  *slow*) echo 'a measured row' && exec sleep 60 ;;
  *late*) correct=true late=yes ;;
  *skips*) correct=true skips=yes ;;
  *bad*) echo 'clattn: no such row' >&2 && exit 2 ;;
  *wrong*) correct=false ;;
  *) correct=true ;;
esac
while [ "$1" != --json ]; do shift; done
if [ -n "${skips:-}" ]; then
  cat > "$2" <<JSON
{"commit": "abc", "device": {"name": "d"}, "rows": [{"name": "row", "skipped": "too large"}]}
JSON
  exec sleep 60
fi
cat > "$2" <<JSON
{"commit": "abc$POCL_MAX_PTHREAD_COUNT", "device": {"name": "d"},
 "rows": [{"name": "row", "median_us": 200, "p10_us": 190, "p90_us": 220, "correct": $correct,
           "options": {"dtype": "f16", "kv_cache_dtype": "int8"}}]}
JSON
[ -z "${late:-}" ] || exec sleep 60
[ $correct = true ]
TEXT
torch() {  # CODE TEXT ARGUMENT...
  code=$1 text=$2
  shift 2
  expect "$code" "$text" env PYTHONPATH="$work/python" python3 "$bench/compare_torch.py" \
    --clattn "$work/clattn" --device cpu "$@"
}
torch 0 'at most 60 %' --help
torch 2 "--threads: '0', legal: more than 0" --threads 0
torch 2 "--threads: invalid int value: 'x'" --threads x
torch 2 "--budget-seconds: '-1', legal: more than 0" --budget-seconds -1
torch 2 'compare_torch: --clattn: ' --clattn /nowhere
torch 2 'finds no CUDA device' --device cuda
torch 2 'exit code 2: ' --filter bad
torch 2 'a measured row' --filter slow --budget-seconds 1
torch 2 'clattn bench took its 0.6 s of --budget-seconds before a row' \
  --filter slow --budget-seconds 1
torch 0 'clattn bench took its 0.6 s of --budget-seconds; its rows' --filter late --budget-seconds 1
torch 0 '200.0 -5..+10%' --filter late --budget-seconds 1 --json "$work/late.json"
grep -q '"median_us":200' "$work/late.json" || fail 'nothing written when time was over'
torch 2 'measured no row, so there is nothing to compare: too large' \
  --filter skips --budget-seconds 1
torch 2 '--peer: none with cudnn in its name, there are vllm-cpu, vllm-mla, sdpa, sdpa-folded' \
  --peer cudnn
torch 2 'no peer can be asked: vllm is not there (not today)' --peer vllm
torch 0 'not measured: vllm is not there (not today)' --peer vllm --peer gather
torch 0 'on 3 threads: torch 0' --threads 3 --html "$work/page.html"
grep -qx page "$work/page.html" || fail 'no page of plots'
torch 0 'row, sdpa-gather: 0.0 s, 0.0 of them before timing: a cache of int8' \
  --verbose --peer gather
grep -q 'row, sdpa:' "$work/log" && fail 'measured a peer that --peer leaves out'
torch 1 'clattn WRONG' --filter wrong
torch 0 'torch threads 3' --threads 3
torch 0 'clattn abc3 on d' --threads 3
torch 0 '200.0 -5..+10%' --threads 3
torch 0 'clattn again: 0 of 1 rows took another time by more than 10%: none' --again
torch 0 'no time of sdpa in 1 rows (row, ...): a cache of int8 under f16' --threads 3
expect 2 'cannot import torch (not today)' env PYTHONPATH="$work/none" python3 \
  "$bench/compare_torch.py" --clattn "$work/clattn"

# Each output is held to the reference and to another peer's; a lost device ends the run.
cat > "$work/judge.py" <<'TEXT'
import types
import compare_problem, compare_torch, torch
compare_torch.torch = torch
compare_problem.TOLERANCE = {"f16": 0.01}
compare_problem.time_peer = lambda *_: (2e-4, 1e-4, 3e-4, "graph")
arguments = types.SimpleNamespace(no_graphs=False, quick=True, device="cuda", budget_seconds=9)
def judged(error, difference, off=0.25):
    problem = types.SimpleNamespace(options={"dtype": "f16"}, check=lambda output: (error, off),
                                    agreement=lambda peer, output: ("first", difference))
    row = {"name": "row", "median_us": 100}
    entry = compare_torch.measure_peer(problem, "p", lambda problem: abs, row, arguments)
    return entry.get("reason", entry.get("ratio"))
print(judged(0.01, 0.02), judged(0.011, 0), judged(0, 0.021), judged(float("inf"), 0), sep="; ")
# Over many keys outputs are so small that zeros are within the absolute tolerance.
small, nan = [3e-4, -4e-4], float("nan")
print(judged(4e-4, 0, compare_problem.distance([0, 0], small)))
print(*(compare_problem.distance(got, truth) for got, truth in (
    (small, small), ([3e-4, 0], small), ([0, 0], [0, 0]), ([1, 0], [0, 0]), ([nan, 0], small))))
def lost(): raise RuntimeError("fault\nmore")
torch.cuda.synchronize = lost
compare_problem.Problem = lambda *_: None
compare_torch.measure_peer = lambda problem, peer, *_: {"name": "row", "peer": peer, "seconds": 0,
                                                        "reason": "fault"}
peers = [("p", None), ("q", None)]
print(*compare_torch.measure_all([{"name": "row"}], peers, arguments, 9, print))
TEXT
judge() { expect 0 "$1" env PYTHONPATH="$bench:$work/python" python3 "$work/judge.py"; }
judge '2.0; WRONG: error 0.011, allowed 0.01; WRONG: 0.021 from the output of first, allowed 0.02;'
judge '; WRONG: error inf, allowed 0.01'
judge 'WRONG: relative error of a head 1, allowed 0.25'
judge '0.0 0.8 0.0 inf inf'
judge 'p lost the device, which ends the run: fault'
judge "('row', 'p')"
grep -q "'q'" "$work/log" && fail 'asked a peer without a device'

cat > "$work/report.py" <<'TEXT'
import json, sys
from compare_report import print_drift, print_table, write_reports
def row(name): return {"name": name, "median_us": 100, "p10_us": 90, "p90_us": 130, "rate": 8.0,
                       "share_of_ceiling": 0.5, "correct": True, "kernels": ["k"]}
def entry(name, ratio): return {"name": name, "peer": "p", "median_us": 100 * ratio,
                                "p10_us": 100 * ratio, "p90_us": 150 * ratio, "ratio": ratio,
                                "max_error": 0.001 * ratio, "max_difference": 0.002,
                                "compared_with": None if ratio == 2 else "p"}
rows = [row("a"), row("b"), row("c")]
rows[1]["error_share_of_allowance"] = 0.31
entries = {("a", "p"): entry("a", 2), ("b", "p"): entry("b", 8),
           ("c", "p"): {"name": "c", "reason": "cannot"},
           ("a", "r"): {**entry("a", 0.5), "peer": "r"}}
print_table(rows, entries, ["p", "q", "r"])
print_drift(rows, [{**row("a"), "median_us": 111}, {**row("b"), "median_us": 109}, row("new")])
print(*write_reports(sys.argv[1], {"format": "f", "rows": rows}, rows, entries, ["p", "q"],
                     "torch 0"))
peer = json.load(open(sys.argv[1] + "/p.json"))
fields = ("name", "median_us", "rate", "share_of_ceiling", "unsteady", "kernels")
print([tuple(row[field] for field in fields) for row in peer["rows"]])
TEXT
report() { expect 0 "$1" env PYTHONPATH="$bench" python3 "$work/report.py" "$work/reports"; }
report '100.0 -10..+30%~'
report '200.0 +0..+50%~ (2.00)'
report '~ rounds differ by more than 20 %'
report 'clattn again: 1 of 2 rows took another time by more than 10%: a 1.11'
report 'geometric mean over 2 rows: clattn is 4.00 times as fast as p'
report 'no time of p in 1 rows (c, ...): cannot'
report 'no time of q in 3 rows (a, ...): the run was over'
report 'p (8.00)'
report 'r (0.50)'
grep -q 'clattn .* q ' "$work/log" && fail 'a column of a peer without a time'
report 'beside the fastest peer of each row: 2.00 times as fast in the geometric mean of 2, '
report '0.50 to 8.00; clattn leads in 1'
report 'of clattn from its oracle, of what it is allowed: 31% in 1 outputs'
report 'largest error of a peer from the float64 reference: 8.0e-03 in 3 outputs'
report 'largest error of a peer from another: 2.0e-03 in 2 outputs'
report "/reports/clattn.json $work/reports/p.json"
report "[('a', 200, 4.0, 0.25, True, []), ('b', 800, 1.0, 0.0625, True, [])]"
[ ! -e "$work/reports/q.json" ] || fail 'a report of a peer without a time'

# The form of reports, within others too, and that those which are kept have it.
cat > "$work/form.py" <<'TEXT'
import json, pathlib, sys
import report_file
def lines_of_rows(text):
    return [json.loads(line.rstrip(",")) for line in text.splitlines() if line.startswith('{"')]
rows = [{"name": "a\n", "requests": [[1, 2, 3]]}, {"name": "µ", "kernels": [{"name": "k"}]}]
report = {"format": "f", "device": {"name": "d", "units": [1]}, "rows": rows, "layout": "HND"}
report_file.write(sys.argv[1], {"clattn": report, "none": [], "peers": rows[:1]})
assert report_file.read(sys.argv[1]) == {"clattn": report, "none": [], "peers": rows[:1]}
print(open(sys.argv[1], encoding="utf-8").read(), end="")
for path in pathlib.Path(sys.argv[2]).rglob("*.json"):
    if lines_of_rows(path.read_text(encoding="utf-8")) != report_file.read(path)["rows"]:
        sys.exit(f"{path}: not a row a line")
TEXT
expect 0 '' env PYTHONPATH="$bench" python3 "$work/form.py" "$work/form.json" "$bench/results"
cmp -s "$work/log" - << 'TEXT' || fail 'another form of reports'
{
"clattn": {
"format": "f",
"device": {"name":"d","units":[1]},
"rows": [
{"name":"a\n","requests":[[1,2,3]]},
{"name":"µ","kernels":[{"name":"k"}]}
],
"layout": "HND"
},
"none": [],
"peers": [
{"name":"a\n","requests":[[1,2,3]]}
]
}
TEXT

# Tables of kept reports: one file, and a folder of peers.
results() {  # CODE TEXT [--check]
  code=$1 text=$2
  shift 2
  expect "$code" "$text" python3 "$bench/results_tables.py" --results "$work/results" \
    --page "$work/page.md" "$@"
}
page_says() { grep -qxF -- "$1" "$work/page.md" || fail "the page lacks '$1'"; }
mkdir -p "$work/results/peers"
begin=$(sed -n 's/^BEGIN = "\(.*\)"$/\1/p' "$bench/results_tables.py")
end=$(sed -n 's/^END = "\(.*\)"$/\1/p' "$bench/results_tables.py")
printf 'before\n\n%s\n%s\n\nafter\n' "$begin" "$end" > "$work/page.md"
cat > "$work/kept.py" <<'TEXT'
import json, sys
def row(name, us, **more):
    return {"name": name, "suite": "decode", "median_us": us, "p10_us": 0.9 * us,
            "p90_us": 1.3 * us, "rate": 4380.4, "rate_unit": "GB/s", "ceiling": "read",
            "share_of_ceiling": 0.984, "correct": True, "error_share_of_allowance": 0.31,
            "unsteady": False, "above_ceiling": False, **more}
def write(path, rows):
    json.dump({"format": "clattn-bench", "schema_version": 1, "commit": "abc1234",
               "date": "2026-11-25T06:00:00Z", "quick": False, "rows": rows,
               "device": {"name": "D", "driver_version": "1.2"},
               "ceilings": {"read_gb_per_s": 4451.2, "fma_gflop_per_s": 99.94}},
              open(path, "w", encoding="utf-8"))
folder = sys.argv[1]
write(folder + "/d.json", [
    row("a", 1234.4, unsteady=True), row("b", 8.927, correct=False, above_ceiling=True),
    {"name": "c", "suite": "decode", "skipped": "no such kernel"}])
write(folder + "/peers/clattn.json",
      [row("m/decode/a", 100), row("m/decode/b", 10), row("n/decode/alone", 1)])
write(folder + "/peers/p.json", [row("m/decode/a", 250)])
write(folder + "/peers/q.json", [row("m/decode/b", 5), row("m/decode/a", 100)])
TEXT
python3 "$work/kept.py" "$work/results"
results 1 'is not what' --check
results 0 ''
results 0 '' --check
page_says '### d'
# shellcheck disable=SC2016  # Markdown's backticks
page_says 'D, driver 1.2, commit abc1234, 2026-11-25; `bench/results/d.json`.'
page_says '| streaming read | 4 451 GB/s |'
page_says '| f32 multiply-add | 99.9 GFLOP/s |'
page_says '| a | 1 234~ | −10..+30 % | 4 380 GB/s | 98 % of read | 31 % |'
page_says '| b | 8.93! | −10..+30 % | 4 380 GB/s | 98 % of read | WRONG |'
page_says 'c was skipped: no such kernel'
page_says '| m | clattn | p | q |'
page_says '| decode a | 100.0 | 250.0 (2.50) | 100.0 (1.00) |'
page_says '| decode b | 10 | - | 5 (0.50) |'
page_says "In the geometric mean clattn is 2.50 times as fast as p (1 row, 2.50 to 2.50); \
0.71 times as fast as"
page_says 'q (2 rows, 0.50 to 1.00).'
page_says "Beside the fastest peer of each row: 0.71 times as fast in the geometric mean of 2, \
0.50 to 1.00"
page_says 'times in each.'
grep -q alone "$work/page.md" && fail 'compares a row that no peer has'
[ "$(head -n 1 "$work/page.md") $(tail -n 1 "$work/page.md")" = 'before after' ] ||
  fail 'changes what stands outside of the marks'
sed -i 's/1 234/1 233/' "$work/page.md"
results 1 'run bench/results_tables.py' --check
results 0 ''
page_says '| a | 1 234~ | −10..+30 % | 4 380 GB/s | 98 % of read | 31 % |'
printf 'over\n<!-- rows of bench/results/d.json:\n  a b -->\nold\n%s\nunder\n' \
  '<!-- end of the rows -->' > "$work/rows.md"
results 1 'rows.md is not what' --page "$work/rows.md" --check
results 0 '' --page "$work/rows.md"
results 0 '' --page "$work/rows.md" --check
sed 's/|  |/| |/' "$work/rows.md" > "$work/log"
cmp -s "$work/log" - << 'TEXT' || fail 'writes other rows than those that the page names'
over
<!-- rows of bench/results/d.json:
  a b -->

D, driver 1.2, commit abc1234, 2026-11-25; `bench/results/d.json`.

| | µs | rate | share |
| --- | --- | --- | --- |
| a | 1 234~ | 4 380 GB/s | 98 % of read |
| b | 8.93! | 4 380 GB/s | 98 % of read |
<!-- end of the rows -->
under
TEXT
sed -i 's/  a b/  a c/' "$work/rows.md"
results 2 'd.json: lacks row c' --page "$work/rows.md" --check

# The picture of means, of the same folder of peers in the place of each that it shows.
chart() {  # CODE TEXT [--check]
  code=$1 text=$2
  shift 2
  expect "$code" "$text" python3 "$bench/chart.py" --results "$work/charted" \
    --picture "$work/speed.svg" "$@"
}
picture_says() { grep -qF -- "$1" "$work/speed.svg" || fail "the picture lacks '$1'"; }
mkdir "$work/charted"
for folder in h200-aims h100-aims xeon-16-cores; do
  cp -r "$work/results/peers" "$work/charted/$folder"
done
mv "$work/charted/xeon-16-cores/p.json" "$work/charted/xeon-16-cores/vllm.json"
chart 2 'No such file' --check
chart 0 ''
chart 0 '' --check
picture_says 'class="end">vLLM</text>'
picture_says 'class="mean">2.50</text>'
picture_says '>1 batch, 2.50 to 2.50</text>'
picture_says 'class="behind"/>'
picture_says 'class="mean">0.71</text>'
picture_says '>2 batches, 0.50 to 1.00</text>'
picture_says '>driver 1.2, CLAttn abc1234, 2026-11-25</text>'
python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' "$work/speed.svg" ||
  fail 'the picture is no XML'
sed -i 's/2\.50/2.51/' "$work/speed.svg"
chart 1 'run bench/chart.py' --check
rm "$work/charted/h100-aims/clattn.json"
chart 2 'h100-aims: no clattn.json'
rm "$work/charted/h200-aims"/[pq].json
chart 2 'h200-aims: no row that a peer has'

echo '{"format": "clattn-bench", "schema_version": 2}' > "$work/results/e.json"
results 2 'e.json: format clattn-bench, schema_version 2, legal: clattn-bench, 1' --check
echo '{"format": "clattn-bench", "schema_version": 1}' > "$work/results/e.json"
results 2 "e.json: lacks 'device'" --check
echo '[' > "$work/results/e.json"
results 2 'e.json: Expecting' --check
rm "$work/results/e.json" "$work/results/peers/clattn.json"
results 2 'peers: no clattn.json' --check
echo 'no marks' > "$work/page.md"
rm -r "$work/results/peers"
results 2 'expected each mark once' --check

echo 'bench_scripts: arguments, exit codes and arithmetic are right'
