#!/usr/bin/env python3
"""CLAttn beside PyTorch's attention and FlashInfer: the same shapes, one machine, one run.

Runs `clattn bench --json`, then every peer on the shapes of its rows. A peer's output is compared
with a float64 reference before it is timed; what a peer cannot do is a row with the reason. Peers
rotate over as much memory as `clattn bench` does, so that no cache holds what they read.
docs/benchmark.md explains the table and the files. Exit code 0: every row of clattn was right;
1: one was WRONG; 2: it could not be measured.
"""
import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

from compare_report import print_table, write_reports

SUITES = ("decode", "prefill", "mixed", "spec")
ROTATE_BYTES = {False: 640 << 20, True: 16 << 20}  # as clattn bench, full and --quick
TOLERANCE = {"f32": 1e-4, "f16": 2e-3, "bf16": 1e-2}  # of 1 + |reference|: a few roundings
MAX_SETS = 256


class Unsupported(Exception):
    """Why a peer has no time for a row."""


def leave(message):
    print(f"compare_torch: {message}", file=sys.stderr)
    sys.exit(2)


def import_or_leave(name, needed):
    try:
        return __import__(name)
    except Exception as error:  # whatever a broken installation raises
        if needed:
            leave(f"cannot import {name} ({error}); pip install {name}")
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
    parser.add_argument("--clattn", required=True, help="the program, build/release/src/cli/clattn")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda where there is one")
    parser.add_argument("--suite", action="append", choices=SUITES, help="repeat for several")
    parser.add_argument("--model", action="append", help="as of clattn bench; repeat for several")
    parser.add_argument("--shapes", action="append", help="as of clattn bench; repeat for several")
    parser.add_argument("--filter", default="", help="only rows with this text in their name")
    parser.add_argument("--quick", action="store_true", help="small shapes, short measurements")
    parser.add_argument("--threads", type=positive(int), default=os.cpu_count() or 1,
                        help="on CPUs, of PyTorch and of clattn through PoCL")
    parser.add_argument("--budget-seconds", type=positive(float), default=600,
                        help="clattn's time included; then no new row starts")
    parser.add_argument("--no-graphs", action="store_true", help="time CUDA by plain launches alone")
    parser.add_argument("--json", help="write everything that was measured")
    parser.add_argument("--reports", help="folder for one file a peer that clattn bench --compare reads")
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
                print(file.read().rstrip())  # What it had measured by then.
            leave(f"clattn bench alone took the {seconds:g} s of --budget-seconds, so there is nothing "
                  "to compare; give more, or fewer rows by --suite, --filter or --quick")
        except OSError as error:
            leave(f"--clattn: {error}")
        if result.returncode not in (0, 1) or not os.path.exists(path):
            leave(f"{' '.join(command)}: exit code {result.returncode}: {result.stderr.strip()}")
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def prefix_sums(counts):
    return list(itertools.accumulate(counts, initial=0))


class Problem:
    """The tensors of one row: queries, paged caches and, of equal requests, the same contiguous."""

    def __init__(self, row, device, quick):
        options = row["options"]
        self.name, self.options, self.device = row["name"], options, device
        if options["rope_dim"] > 0:
            raise Unsupported("latent attention")
        if options["kv_dtype"] != options["dtype"]:
            raise Unsupported(f"a cache of {options['kv_dtype']} under {options['dtype']}")
        self.dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[options["dtype"]]
        self.heads, self.kv_heads = options["heads"], options["kv_heads"]
        self.head_size, self.page = options["head_size"], options["block_size"]
        self.window, self.soft_cap = options["window"], options["soft_cap"]
        self.scale = options["scale"] or 1 / math.sqrt(self.head_size)
        self.requests = [(q, s) for count, q, s in row["requests"] for _ in range(count)]
        self.pages_of = [-(-s // self.page) for _, s in self.requests]
        self.num_pages = sum(self.pages_of)
        self.tokens = sum(q for q, _ in self.requests)
        torch.manual_seed(7)
        self.query = self.random(self.tokens, self.heads, self.head_size)
        page_shape = (self.num_pages, self.page, self.kv_heads, self.head_size)
        set_bytes = 2 * math.prod(page_shape) * self.query.element_size()
        self.sets = max(1, min(MAX_SETS, -(-ROTATE_BYTES[quick] // set_bytes)))
        self.caches = [(self.random(*page_shape), self.random(*page_shape)) for _ in range(self.sets)]
        self.order = torch.randperm(self.num_pages, device=device)

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def starts(self):
        return prefix_sums(query_len for query_len, _ in self.requests)

    def page_starts(self):
        return prefix_sums(self.pages_of)

    def rows_of(self, request, cache):
        """Keys or values of a request in their order, [seq_len, kv_heads, head_size]."""
        first = self.page_starts()[request]
        pages = self.order[first:first + self.pages_of[request]]
        rows = cache[pages].reshape(-1, self.kv_heads, self.head_size)
        return rows[:self.requests[request][1]]

    def equal_requests(self):
        if len(set(self.requests)) != 1:
            raise Unsupported("requests of several lengths")
        return self.requests[0]

    def check(self, output):
        """Largest error over some rows of the first and last request, in float64 on the CPU."""
        worst, starts = 0.0, self.starts()
        grouped = (self.kv_heads, self.heads // self.kv_heads, self.head_size)
        for request in {0, len(self.requests) - 1}:
            query_len, seq_len = self.requests[request]
            keys, values = (self.rows_of(request, cache).cpu().double() for cache in self.caches[0])
            for token in {0, query_len // 2, query_len - 1}:
                last = seq_len - query_len + token + 1
                first = max(0, last - self.window) if self.window else 0
                row = self.query[starts[request] + token].cpu().double().view(grouped)
                logits = torch.einsum("kgd,skd->kgs", row, keys[first:last]) * self.scale
                if self.soft_cap:
                    logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
                truth = torch.einsum("kgs,skd->kgd", logits.softmax(-1), values[first:last])
                got = output[starts[request] + token].cpu().double().view(grouped)
                error = ((got - truth).abs() / (1 + truth.abs())).max().item()
                worst = math.inf if math.isnan(error) else max(worst, error)
        return worst


def mask_of(problem, query_len, seq_len):
    """(attn_mask, is_causal) of scaled_dot_product_attention."""
    if problem.window and problem.window < seq_len:
        query = torch.arange(seq_len - query_len, seq_len, device=problem.device)[:, None]
        key = torch.arange(seq_len, device=problem.device)[None, :]
        return (key <= query) & (key > query - problem.window), False
    if query_len == 1:
        return None, False
    if query_len == seq_len:
        return None, True
    from torch.nn.attention.bias import causal_lower_right
    return causal_lower_right(query_len, seq_len), False


def prepare_sdpa(problem, backend, gathered=False, folded=False):
    """PyTorch's attention over contiguous tensors, or over those that it gathers from pages.

    Folded: the query heads of a KV head stand as its query tokens, which one token without a mask
    allows and PyTorch's CPU kernels do not do by themselves.
    """
    if problem.soft_cap or problem.options["sinks"]:
        raise Unsupported("soft cap or sinks")
    query_len, seq_len = problem.equal_requests()
    batch = len(problem.requests)
    mask, causal = mask_of(problem, query_len, seq_len)
    if folded and (query_len > 1 or mask is not None):
        raise Unsupported("decode without a window alone")
    query = (problem.query.view(batch, problem.kv_heads, -1, problem.head_size) if folded else
             problem.query.view(batch, query_len, problem.heads, -1).transpose(1, 2))

    def contiguous(cache):
        rows = cache.index_select(0, problem.order).view(batch, -1, problem.kv_heads, problem.head_size)
        return rows[:, :seq_len].transpose(1, 2)

    def attention(keys, values):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=problem.scale,
            enable_gqa=not folded and problem.heads != problem.kv_heads)
        by_token = out if folded else out.transpose(1, 2)
        return by_token.reshape(problem.tokens, problem.heads, problem.head_size)

    ready = [] if gathered else [tuple(contiguous(cache).contiguous() for cache in pair)
                                 for pair in problem.caches]

    def call(index):
        pair = map(contiguous, problem.caches[index]) if gathered else ready[index]
        if backend is None:
            return attention(*pair)
        from torch.nn.attention import sdpa_kernel
        with sdpa_kernel(backend):
            return attention(*pair)
    return call


def prepare_flashinfer(flashinfer, problem, tensor_cores):
    """FlashInfer over the same pages; its plan is made once, outside the time."""
    if problem.options["sinks"]:
        raise Unsupported("sinks")
    decode = problem.tokens == len(problem.requests)
    if tensor_cores is not None and not decode:
        raise Unsupported("decode alone")
    if tensor_cores is None and decode:
        raise Unsupported("prefill alone")

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=problem.device)

    last = ints([(s - 1) % problem.page + 1 for _, s in problem.requests])
    lists = (ints(problem.page_starts()), problem.order.int(), last)
    shape = (problem.heads, problem.kv_heads, problem.head_size, problem.page)
    common = {"window_left": problem.window - 1 if problem.window else -1,
              "logits_soft_cap": problem.soft_cap or None, "sm_scale": problem.scale,
              "q_data_type": problem.dtype, "kv_data_type": problem.dtype}
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=problem.device)
    if decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD",
                                                                use_tensor_cores=tensor_cores)
        wrapper.plan(*lists, *shape, **common)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(ints(problem.starts()), *lists, *shape, causal=True, **common)
    return lambda index: wrapper.run(problem.query, problem.caches[index])


def peers_of(device, flashinfer):
    """Name and how to prepare, a function of the problem."""
    peers = []
    backends = ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"] if device == "cuda" else []
    from torch.nn.attention import SDPBackend
    for name in backends:
        backend = getattr(SDPBackend, name, None)
        if backend is not None:
            short = name.removesuffix("_ATTENTION").lower()
            peers.append((f"sdpa-{short}", lambda p, b=backend: prepare_sdpa(p, b)))
    peers.append(("sdpa", lambda p: prepare_sdpa(p, None)))
    if device == "cpu":
        peers.append(("sdpa-folded", lambda p: prepare_sdpa(p, None, folded=True)))
    peers.append(("sdpa-gather", lambda p: prepare_sdpa(p, None, gathered=True)))
    if device == "cuda" and flashinfer is not None:
        for name, cores in (("flashinfer-decode", False), ("flashinfer-decode-tc", True),
                            ("flashinfer-prefill", None)):
            peers.append((name, lambda p, c=cores: prepare_flashinfer(flashinfer, p, c)))
    return peers


def seconds_of(device, run):
    """Of one run of many launches, pipelined and waited for once."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def measure(device, launch, launches_at_once, quick):
    """Seconds a launch: median, 10th and 90th percentile of the rounds."""
    round_seconds, rounds = (0.01, 5) if quick else (0.05, 11)
    seconds_of(device, launch)
    once = max(seconds_of(device, launch), 1e-6)
    repeats = max(1, min(20000, int(round_seconds / once)))

    def run():
        for _ in range(repeats):
            launch()

    times = sorted(seconds_of(device, run) / repeats / launches_at_once for _ in range(rounds))
    rank = [max(1, math.ceil(share * rounds)) - 1 for share in (0.1, 0.9)]
    return statistics.median(times), times[rank[0]], times[rank[1]]


def time_peer(problem, call, graphs, quick):
    """Times by plain launches and, on CUDA, as a recorded graph; the better one counts."""
    state = {"set": 0}

    def rotate():
        state["set"] = (state["set"] + 1) % problem.sets
        call(state["set"])

    result = (*measure(problem.device, rotate, 1, quick), "launches")
    if problem.device != "cuda" or not graphs:
        return result
    try:
        graph, count = torch.cuda.CUDAGraph(), max(problem.sets, 8)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(count):
                rotate()
        recorded = (*measure(problem.device, graph.replay, count, quick), "graph")
        return min(result, recorded)
    except Exception:  # what cannot be recorded has its time by launches
        torch.cuda.synchronize()
        return result


def measure_row(row, peers, arguments):
    """One entry a peer."""
    entries = []
    try:
        problem = Problem(row, arguments.device, arguments.quick)
    except (Unsupported, RuntimeError) as error:
        return [{"name": row["name"], "peer": peer, "reason": one_line(error)} for peer, _ in peers]
    for peer, prepare in peers:
        entry = {"name": row["name"], "peer": peer}
        try:
            with torch.inference_mode():
                call = prepare(problem)
                entry["max_error"] = problem.check(call(0))
                if entry["max_error"] > TOLERANCE[problem.options["dtype"]]:
                    raise Unsupported(f"WRONG: error {entry['max_error']:.2g}")
                median, low, high, how = time_peer(problem, call, not arguments.no_graphs, arguments.quick)
            entry.update(median_us=median * 1e6, p10_us=low * 1e6, p90_us=high * 1e6, timed_as=how,
                         ratio=median * 1e6 / row["median_us"])
        except Exception as error:  # a peer's failure is its row
            entry["reason"] = one_line(error)
        entries.append(entry)
    return entries


def one_line(error):
    text = str(error) or type(error).__name__
    return text.strip().splitlines()[0][:160]


def main():
    global torch
    arguments = parse_arguments()
    start = time.monotonic()
    torch = import_or_leave("torch", needed=True)
    flashinfer = import_or_leave("flashinfer", needed=False)
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        leave("--device cuda: this PyTorch finds no CUDA device")
    torch.set_num_threads(arguments.threads)
    report = run_clattn(arguments, arguments.budget_seconds)
    rows = [row for row in report["rows"] if "skipped" not in row]
    peers = peers_of(arguments.device, flashinfer)
    names = [peer for peer, _ in peers]
    entries = {}
    for row in rows:
        if time.monotonic() - start > arguments.budget_seconds:
            break
        for entry in measure_row(row, peers, arguments):
            entries[row["name"], entry["peer"]] = entry
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{arguments.threads} threads"
    print(f"clattn {report['commit']} on {report['device']['name']}; torch {torch.__version__} on "
          f"{name}; flashinfer {getattr(flashinfer, '__version__', 'not there')}")
    print_table(rows, entries, names)
    if arguments.json:
        everything = {"format": "clattn-compare-torch", "schema_version": 1, "torch": torch.__version__,
                      "flashinfer": getattr(flashinfer, "__version__", None), "device": name,
                      "clattn": report, "peers": list(entries.values())}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(everything, file, indent=1)
    if arguments.reports:
        write_reports(arguments.reports, report, rows, entries, names,
                      f"torch {torch.__version__}")
    sys.exit(0 if all(row["correct"] for row in rows) else 1)


if __name__ == "__main__":
    main()
