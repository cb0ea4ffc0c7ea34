"""The peers of compare_torch.py: their tensors, how each is called, and its time."""
import itertools
import math
import statistics
import time

import torch

ROTATE_BYTES = {False: 640 << 20, True: 16 << 20}  # as clattn bench, full and --quick
MAX_SETS = 256
MOST_SECONDS = 1.0  # of a measurement, but for three rounds


class Unsupported(Exception):
    """Why a peer has no time for a row."""


def prefix_sums(counts):
    return list(itertools.accumulate(counts, initial=0))


class Problem:
    """The tensors of one row: queries, paged caches and what peers make of those.

    Of latent attention a cache is the latent parts and the rotary ones, as FlashInfer has them.
    """

    def __init__(self, row, device, quick):
        options = row["options"]
        self.name, self.options, self.device = row["name"], options, device
        if options["kv_dtype"] != options["dtype"]:
            raise Unsupported(f"a cache of {options['kv_dtype']} under {options['dtype']}")
        dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        self.dtype = dtypes[options["dtype"]]
        self.heads, self.kv_heads = options["heads"], options["kv_heads"]
        self.head_size, self.page = options["head_size"], options["block_size"]
        self.rope_dim = options["rope_dim"]
        self.value_size = self.head_size - self.rope_dim
        self.window, self.soft_cap = options["window"], options["soft_cap"]
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
        set_bytes = sum(map(math.prod, shapes)) * self.query.element_size()
        self.sets = max(1, min(MAX_SETS, -(-ROTATE_BYTES[quick] // set_bytes)))
        self.caches = [tuple(self.random(*shape) for shape in shapes) for _ in range(self.sets)]
        self.order = torch.randperm(self.num_pages, device=device)
        self.padded_order = self.pad_order()
        self.contiguous_pairs = None

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

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
        rows = cache[pages].reshape(-1, self.kv_heads, cache.shape[-1])
        return rows[:self.requests[request][1]]

    def keys_and_values(self, request):
        """What the reference attends to, in float64 on the CPU."""
        first, second = (self.rows_of(request, cache).cpu().double() for cache in self.caches[0])
        return (torch.cat((first, second), -1), first) if self.rope_dim else (first, second)

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

    def longest(self):
        return max(seq_len for _, seq_len in self.requests)

    def contiguous(self, cache):
        """[batch, kv_heads, longest, width] by the page table, short requests padded."""
        rows = cache.index_select(0, self.padded_order)
        by_request = rows.view(len(self.requests), -1, self.kv_heads, self.head_size)
        return by_request[:, :self.longest()].transpose(1, 2)

    def contiguous_caches(self):
        """The same of all sets, made once for all peers."""
        if self.contiguous_pairs is None:
            self.contiguous_pairs = [tuple(self.contiguous(cache).contiguous() for cache in pair)
                                     for pair in self.caches]
        return self.contiguous_pairs

    def check(self, output):
        """Largest error over some rows of the first and last request, in float64 on the CPU."""
        worst, starts = 0.0, self.starts()
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
                truth = torch.einsum("kgs,skd->kgd", logits.softmax(-1), values[first:last])
                got = output[starts[request] + token].cpu().double().view(*group, -1)
                error = ((got - truth).abs() / (1 + truth.abs())).max().item()
                worst = math.inf if math.isnan(error) else max(worst, error)
        return worst


def mask_of(problem, query_len):
    """(attn_mask, is_causal) of scaled_dot_product_attention."""
    longest = problem.longest()
    if len(set(problem.requests)) > 1:  # decodes, padded to the longest
        lengths = torch.tensor([s for _, s in problem.requests], device=problem.device)[:, None]
        key = torch.arange(longest, device=problem.device)[None, :]
        seen = key < lengths
        if problem.window:
            seen &= key >= lengths - problem.window
        return seen[:, None, None, :], False
    if problem.window and problem.window < longest:
        query = torch.arange(longest - query_len, longest, device=problem.device)[:, None]
        key = torch.arange(longest, device=problem.device)[None, :]
        return (key <= query) & (key > query - problem.window), False
    if query_len == 1:
        return None, False
    if query_len == longest:
        return None, True
    from torch.nn.attention.bias import causal_lower_right
    return causal_lower_right(query_len, longest), False


def prepare_sdpa(problem, backend, gathered=False, folded=False):
    """PyTorch's attention over contiguous tensors, or over those that it gathers from pages.

    Folded: the query heads of a KV head stand as its query tokens, which one token without a mask
    allows and PyTorch's CPU kernels do not do by themselves.
    """
    if problem.rope_dim:
        raise Unsupported("latent attention")
    if problem.soft_cap or problem.options["sinks"]:
        raise Unsupported("soft cap or sinks")
    query_len = problem.equal_query_len()
    batch = len(problem.requests)
    mask, causal = mask_of(problem, query_len)
    if folded and (query_len > 1 or mask is not None):
        raise Unsupported("decode without a window and of one length alone")
    query = (problem.query.view(batch, problem.kv_heads, -1, problem.head_size) if folded else
             problem.query.view(batch, query_len, problem.heads, -1).transpose(1, 2))

    def attention(keys, values):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=problem.scale,
            enable_gqa=not folded and problem.heads != problem.kv_heads)
        by_token = out if folded else out.transpose(1, 2)
        return by_token.reshape(problem.tokens, problem.heads, problem.head_size)

    ready = None if gathered else problem.contiguous_caches()

    def call(index):
        pair = map(problem.contiguous, problem.caches[index]) if gathered else ready[index]
        if backend is None:
            return attention(*pair)
        from torch.nn.attention import sdpa_kernel
        with sdpa_kernel(backend):
            return attention(*pair)
    return call


def prepare_flash_attention(flash_attn, problem):
    """FlashAttention 4 (CuTe DSL) over contiguous tensors, [batch, tokens, heads, head_size]."""
    if problem.rope_dim:
        raise Unsupported("latent attention")
    if problem.soft_cap or problem.options["sinks"]:
        raise Unsupported("soft cap or sinks")
    if len(set(problem.requests)) > 1:
        raise Unsupported("requests of several lengths")
    shape = (len(problem.requests), -1, problem.heads, problem.head_size)
    query = problem.query.view(shape)
    pairs = [tuple(rows.transpose(1, 2).contiguous() for rows in pair)
             for pair in problem.contiguous_caches()]
    window = (problem.window - 1, 0) if problem.window else (None, None)

    def call(index):
        out = flash_attn.cute.flash_attn_func(query, *pairs[index], softmax_scale=problem.scale,
                                              causal=True, window_size=window)
        out = out[0] if isinstance(out, tuple) else out
        return out.view(problem.tokens, problem.heads, problem.head_size)
    return call


def workspace_of(problem):
    return torch.zeros(256 << 20, dtype=torch.uint8, device=problem.device)


def prepare_flashinfer(flashinfer, problem, tensor_cores):
    """FlashInfer over the same pages; its plan is made once, outside the time."""
    if problem.rope_dim:
        raise Unsupported("latent attention")
    if problem.options["sinks"]:
        raise Unsupported("sinks")
    decode = problem.tokens == len(problem.requests)
    if tensor_cores is not None and not decode:
        raise Unsupported("decode alone")
    if tensor_cores is None and decode:
        raise Unsupported("prefill alone")
    ints = problem.ints
    last = ints([(s - 1) % problem.page + 1 for _, s in problem.requests])
    lists = (ints(problem.page_starts()), problem.order.int(), last)
    shape = (problem.heads, problem.kv_heads, problem.head_size, problem.page)
    common = {"window_left": problem.window - 1 if problem.window else -1,
              "logits_soft_cap": problem.soft_cap or None, "sm_scale": problem.scale,
              "q_data_type": problem.dtype, "kv_data_type": problem.dtype}
    if decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_of(problem), "NHD",
                                                                use_tensor_cores=tensor_cores)
        wrapper.plan(*lists, *shape, **common)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_of(problem), "NHD")
        wrapper.plan(ints(problem.starts()), *lists, *shape, causal=True, **common)
    return lambda index: wrapper.run(problem.query, problem.caches[index])


def prepare_flashinfer_mla(flashinfer, problem, backend):
    if not problem.rope_dim:
        raise Unsupported("latent attention alone")
    ints = problem.ints
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace_of(problem), backend=backend)
    wrapper.plan(ints(problem.starts()), ints(problem.page_starts()), problem.order.int(),
                 ints([s for _, s in problem.requests]), problem.heads, problem.value_size,
                 problem.rope_dim, problem.page, problem.tokens > len(problem.requests),
                 problem.scale, problem.dtype, problem.dtype)
    latent = problem.query[..., :problem.value_size].contiguous()
    rotary = problem.query[..., problem.value_size:].contiguous()
    return lambda index: wrapper.run(latent, rotary, *problem.caches[index])


def peers_of(device, flashinfer, flash_attn):
    """Name and how to prepare, a function of the problem; who is most asked for first."""
    peers = []
    if device == "cuda" and flash_attn is not None:
        peers.append(("flash-attn-4", lambda p: prepare_flash_attention(flash_attn, p)))
    if device == "cuda" and flashinfer is not None:
        for name, cores in (("flashinfer-decode-tc", True), ("flashinfer-decode", False),
                            ("flashinfer-prefill", None)):
            peers.append((name, lambda p, c=cores: prepare_flashinfer(flashinfer, p, c)))
        for backend in ("fa3", "fa2"):
            peers.append((f"flashinfer-mla-{backend}",
                          lambda p, b=backend: prepare_flashinfer_mla(flashinfer, p, b)))
    backends = []
    if device == "cuda":
        backends = ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"]
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
