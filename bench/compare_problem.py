"""One row's tensors, what a peer's output is held to, and how long a launch takes."""
import itertools
import math
import statistics
import time

import torch

ATTENTION, RECURRENT = "attention", "recurrent layers"  # kinds of rows
ROTATE_BYTES = {False: 640 << 20, True: 16 << 20}  # as clattn bench, full and --quick
MAX_SETS = 256
MOST_SECONDS = 1.0  # of a measurement, but for three rounds
TOLERANCE = {"f32": 1e-4, "f16": 2e-3, "bf16": 1e-2}  # of 1 + |reference|: a few roundings
# Largest relative error of a head's output vector (Euclidean norm). Outputs shrink as keys grow in
# number: beyond 400 000 zeros pass bf16's tolerance. Products in e4m3 are off by about 0.04.
MOST_OFF = 0.25
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
          "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Unsupported(Exception):
    """Why a peer has no time for a row."""


def prefix_sums(counts):
    return list(itertools.accumulate(counts, initial=0))


class Comparable:
    """Keeps the output of the first peer that was right, which others are compared with."""

    kind = ATTENTION
    first_output = None

    def agreement(self, peer, output):
        """The first peer whose output was right (None: this one) and the largest difference from
        all of it."""
        if self.first_output is None:
            self.first_output = peer, output.clone()
            return None, 0.0
        name, first = self.first_output
        worst = 0.0
        for mine, theirs in zip(output.split(4096), first.split(4096)):
            theirs = theirs.float()
            worst = larger(worst, (mine.float() - theirs).abs() / (1 + theirs.abs()))
        return name, worst


class Problem(Comparable):
    """The tensors of one row: queries, paged caches and what peers make of those.

    Of latent attention a cache is the latent parts and the rotary ones, as FlashInfer has them.
    Caches of 8 bits hold values as they are, with a scale of 1.
    """

    def __init__(self, row, device, quick):
        options = row["options"]
        self.name, self.options, self.device = row["name"], options, device
        if options["kv_cache_dtype"] not in DTYPES:
            raise Unsupported(f"a cache of {options['kv_cache_dtype']} under {options['dtype']}")
        self.dtype, self.kv_dtype = DTYPES[options["dtype"]], DTYPES[options["kv_cache_dtype"]]
        self.heads, self.kv_heads = options["num_heads"], options["num_kv_heads"]
        self.head_size, self.page = options["head_size"], options["block_size"]
        self.rope_dim = options["rope_dim"] if options["use_mla"] else 0
        self.value_size = self.head_size - self.rope_dim
        self.window, self.soft_cap = options["sliding_window"], options["logits_soft_cap"]
        self.scale = options["scale"] or 1 / math.sqrt(self.head_size)
        self.requests = [(q, s) for count, q, s in row["requests"] for _ in range(count)]
        self.pages_of = [-(-s // self.page) for _, s in self.requests]
        self.num_pages = sum(self.pages_of)
        self.tokens = sum(q for q, _ in self.requests)
        torch.manual_seed(7)
        self.query = self.random(self.tokens, self.heads, self.head_size)
        head = (self.kv_heads,) if not self.rope_dim else ()
        widths = (self.value_size, self.rope_dim) if self.rope_dim else (self.head_size,) * 2
        shapes = [(self.num_pages, self.page, *head, width) for width in widths]
        set_bytes = sum(map(math.prod, shapes)) * self.kv_dtype.itemsize
        self.sets = max(1, min(MAX_SETS, -(-ROTATE_BYTES[quick] // set_bytes)))
        self.caches = [tuple(self.random(*shape).to(self.kv_dtype) for shape in shapes)
                       for _ in range(self.sets)]
        # Those of clattn bench: -1 to 1 by head.
        self.sinks = self.sink_values() if options["sinks"] else None
        self.order = torch.randperm(self.num_pages, device=device)
        self.padded_order = self.pad_order()
        self.contiguous_pairs = self.packed_index = None

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def sink_values(self):
        return 0.5 * (torch.arange(self.heads, device=self.device) % 5).float() - 1

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def starts(self):
        return prefix_sums(query_len for query_len, _ in self.requests)

    def page_starts(self):
        return prefix_sums(self.pages_of)

    def rows_of(self, request, cache):
        """Keys or values of a request in their order, [seq_len, kv_heads, width]."""
        first = self.page_starts()[request]
        pages = self.order[first:first + self.pages_of[request]]
        rows = select_rows(cache, pages).reshape(-1, self.kv_heads, cache.shape[-1])
        return rows[:self.requests[request][1]]

    def keys_and_values(self, request):
        """What the reference attends to, in float64 on the CPU."""
        first, second = (self.rows_of(request, cache).cpu().double() for cache in self.caches[0])
        return (torch.cat((first, second), -1), first) if self.rope_dim else (first, second)

    def needs(self, *features):
        """Refuses what the peer has no word for: of latent, sinks, soft cap, 8 bits."""
        has = {"latent attention": self.rope_dim, "sinks": self.sinks is not None,
               "soft cap": self.soft_cap, "a cache of 8 bits": self.kv_dtype.itemsize == 1}
        for feature, present in has.items():
            if present and feature not in features:
                raise Unsupported(feature)

    def equal_query_len(self):
        """The query tokens of every request; prompts must be of one length, decodes need not."""
        lengths = set(self.requests) if self.tokens > len(self.requests) else {(1, 1)}
        if len(lengths) != 1:
            raise Unsupported("query tokens of requests of several lengths")
        return self.requests[0][0]

    def pad_order(self):
        """The pages of every request, as many as the longest has."""
        table = torch.zeros(len(self.requests), max(self.pages_of), dtype=torch.long)
        order = self.order.cpu()
        for request, first in enumerate(self.page_starts()[:-1]):
            table[request, :self.pages_of[request]] = order[first:first + self.pages_of[request]]
        return table.flatten().to(self.device)

    def packed(self, cache):
        """Keys or values of all requests, one behind the other, [keys, kv_heads, head_size]."""
        if self.packed_index is None:
            within = torch.arange(self.page, device=self.device)
            of_pages = self.order[:, None] * self.page + within
            starts = self.page_starts()
            self.packed_index = torch.cat([of_pages[first:last].flatten()[:seq_len]
                                           for first, last, (_, seq_len)
                                           in zip(starts, starts[1:], self.requests)])
        return select_rows(cache.view(-1, self.kv_heads, cache.shape[-1]), self.packed_index)

    def longest(self):
        return max(seq_len for _, seq_len in self.requests)

    def contiguous(self, cache):
        """[batch, kv_heads, longest, width] by the page table, short requests padded."""
        rows = select_rows(cache, self.padded_order)
        by_request = rows.view(len(self.requests), -1, self.kv_heads, self.head_size)
        return by_request[:, :self.longest()].transpose(1, 2)

    def contiguous_caches(self):
        """The same of all sets, made once for all peers."""
        if self.contiguous_pairs is None:
            self.contiguous_pairs = [tuple(self.contiguous(cache).contiguous() for cache in pair)
                                     for pair in self.caches]
        return self.contiguous_pairs

    def check(self, output):
        """Largest error over some rows of the first and last request, in float64 on the CPU, and
        the largest relative error of a head's vector among them."""
        worst, off, starts = 0.0, 0.0, self.starts()
        group = (self.kv_heads, self.heads // self.kv_heads)
        for request in {0, len(self.requests) - 1}:
            query_len, seq_len = self.requests[request]
            keys, values = self.keys_and_values(request)
            for token in {0, query_len // 2, query_len - 1}:
                last = seq_len - query_len + token + 1
                first = max(0, last - self.window) if self.window else 0
                row = self.query[starts[request] + token].cpu().double().view(*group, -1)
                logits = torch.einsum("kgd,skd->kgs", row, keys[first:last]) * self.scale
                if self.soft_cap:
                    logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
                truth = torch.einsum("kgs,skd->kgd", self.softmax(logits), values[first:last])
                got = output[starts[request] + token].cpu().double().view(*group, -1)
                worst = larger(worst, (got - truth).abs() / (1 + truth.abs()))
                off = max(off, *map(distance, got.flatten(0, 1).tolist(),
                                    truth.flatten(0, 1).tolist()))
        return worst, off

    def softmax(self, logits):
        """Over [kv_heads, group, keys]; a sink takes part of the sum and has no value."""
        if self.sinks is None:
            return logits.softmax(-1)
        sinks = self.sinks.cpu().double().view(*logits.shape[:2], 1)
        return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]


def larger(worst, errors):
    """The larger one; infinite where something is not a number."""
    error = errors.max().item()
    return math.inf if math.isnan(error) else max(worst, error)


def distance(got, truth):
    """|got - truth| / |truth| of two vectors, so 1 if got is zeros; infinite where that is not
    finite."""
    apart, length = math.dist(got, truth), math.hypot(*truth)
    if apart == 0:
        return 0.0
    return apart / length if length > 0 and math.isfinite(apart) else math.inf


def select_rows(cache, rows):
    """cache[rows], which PyTorch does not do to 8 bits everywhere."""
    if cache.dtype.itemsize > 1:
        return cache.index_select(0, rows)
    return cache.view(torch.uint8).index_select(0, rows).view(cache.dtype)


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
    rounds = max(3, min(rounds, int(MOST_SECONDS / (once * repeats))))

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
