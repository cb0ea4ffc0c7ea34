"""The peers of compare_torch.py: which there are, and how each is called.

A peer is made ready for a problem by a function of its library's module and the problem, outside
the time. What that returns runs a launch over the caches of an index and gives its output,
[tokens, heads, value_size].
"""
import functools
import importlib
import os

import torch

from compare_problem import Unsupported, prefix_sums


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


def prepare_sdpa(_, problem, backend=None, gathered=False, folded=False):
    """PyTorch's attention over contiguous tensors, or over those that it gathers from pages.

    Folded: the query heads of a KV head stand as its query tokens, which one token without a mask
    allows and PyTorch's CPU kernels do not do by themselves.
    """
    problem.needs()
    from torch.nn.attention import SDPBackend, sdpa_kernel
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
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return attention(*pair)
    return call


def prepare_flash_attention(flash_attn, problem):
    """FlashAttention 4 (CuTe DSL) over contiguous keys: [batch, tokens, heads, head_size] where the
    requests are alike, else packed.
    """
    problem.needs("sinks", "soft cap")
    common = {"softmax_scale": problem.scale, "causal": True,
              "window_size": (problem.window - 1, 0) if problem.window else (None, None)}
    if problem.soft_cap:
        common["softcap"] = problem.soft_cap
    if problem.sinks is not None:
        common["learnable_sink"] = problem.sinks.bfloat16()
    if len(set(problem.requests)) == 1:
        attention = flash_attn.flash_attn_func
        query = problem.query.view(len(problem.requests), -1, problem.heads, problem.head_size)
        pairs = [tuple(rows.transpose(1, 2).contiguous() for rows in pair)
                 for pair in problem.contiguous_caches()]
    else:
        attention, query = flash_attn.flash_attn_varlen_func, problem.query
        pairs = [tuple(map(problem.packed, pair)) for pair in problem.caches]
        seq_lens = [seq_len for _, seq_len in problem.requests]
        common |= {"cu_seqlens_q": problem.ints(problem.starts()),
                   "cu_seqlens_k": problem.ints(prefix_sums(seq_lens)),
                   "max_seqlen_q": max(query_len for query_len, _ in problem.requests),
                   "max_seqlen_k": max(seq_lens)}

    def call(index):
        out = attention(query, *pairs[index], **common)
        out = out[0] if isinstance(out, tuple) else out
        return out.view(problem.tokens, problem.heads, problem.head_size)
    return call


def workspace_of(problem):
    return torch.zeros(256 << 20, dtype=torch.uint8, device=problem.device)


def check_flashinfer_row(problem):
    problem.needs("soft cap", "a cache of 8 bits")
    if problem.head_size not in (64, 128, 256):
        raise Unsupported("heads of 64, 128 and 256 alone; at others its kernels may fault")


def prepare_flashinfer(flashinfer, problem, tensor_cores):
    """FlashInfer over the same pages; its plan is made once, outside the time."""
    check_flashinfer_row(problem)
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
              "q_data_type": problem.dtype, "kv_data_type": problem.kv_dtype}
    made = {"kv_layout": "NHD"}
    if problem.kv_dtype.itemsize == 1:
        made["backend"] = "fa2"  # the other one wants queries of 8 bits, too
    if decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace_of(problem), use_tensor_cores=tensor_cores, **made)
        wrapper.plan(*lists, *shape, **common)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_of(problem), **made)
        wrapper.plan(ints(problem.starts()), *lists, *shape, causal=True, **common)
    return lambda index: wrapper.run(problem.query, problem.caches[index])


def prepare_flashinfer_mixed(flashinfer, problem):
    """FlashInfer's one persistent kernel for prompts and decodes."""
    check_flashinfer_row(problem)
    if problem.window or len({query_len for query_len, _ in problem.requests}) == 1:
        raise Unsupported("batches of several query lengths without a window alone")
    ints = problem.ints
    wrapper = flashinfer.BatchAttention(kv_layout="NHD")
    wrapper.plan(ints(problem.starts()), ints(problem.page_starts()), problem.order.int(),
                 ints([seq_len for _, seq_len in problem.requests]), problem.heads,
                 problem.kv_heads, problem.head_size, problem.head_size, problem.page, causal=True,
                 sm_scale=problem.scale, logits_soft_cap=problem.soft_cap,
                 q_data_type=problem.dtype, kv_data_type=problem.kv_dtype)
    return lambda index: wrapper.run(problem.query, problem.caches[index],
                                     logits_soft_cap=problem.soft_cap)[0]


def prepare_flashinfer_mla(flashinfer, problem, backend):
    if not problem.rope_dim:
        raise Unsupported("latent attention alone")
    problem.needs("latent attention")
    ints = problem.ints
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace_of(problem), backend=backend)
    wrapper.plan(ints(problem.starts()), ints(problem.page_starts()), problem.order.int(),
                 ints([s for _, s in problem.requests]), problem.heads, problem.value_size,
                 problem.rope_dim, problem.page, problem.tokens > len(problem.requests),
                 problem.scale, problem.dtype, problem.dtype)
    latent = problem.query[..., :problem.value_size].contiguous()
    rotary = problem.query[..., problem.value_size:].contiguous()
    return lambda index: wrapper.run(latent, rotary, *problem.caches[index])


def prepare_vllm(cpu_attn, problem):
    """The C++ kernel of vLLM's CPU backend, over pages; its schedule is made outside the time.

    Its pages have as many tokens as ours where it has its faster kernels for them (multiples of
    32), else 128 as in vLLM.
    """
    problem.needs("sinks", "soft cap", "a cache of 8 bits")
    page = problem.page if problem.page % 32 == 0 else 128
    kv_type = problem.options["kv_cache_dtype"] if problem.kv_dtype.itemsize == 1 else "auto"
    isa = cpu_attn._get_attn_isa(problem.dtype, page, problem.head_size, kv_type)
    if isa == "amx":
        torch.cpu._init_amx()  # Linux must be asked for tiles; in vLLM, PyTorch's products do
    counts = [-(-seq_len // page) for _, seq_len in problem.requests]
    order = torch.randperm(sum(counts), dtype=torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    slots = []
    for request, (first, count) in enumerate(zip(prefix_sums(counts), counts)):
        table[request, :count] = order[first:first + count]
        tokens = order[first:first + count, None].long() * page + torch.arange(page)
        slots.append(tokens.flatten()[:problem.requests[request][1]])
    slots = torch.cat(slots)

    def paged(pair):
        shape = (sum(counts), problem.kv_heads, 2 * page, problem.head_size)
        stored = torch.uint8 if problem.kv_dtype.itemsize == 1 else problem.dtype
        halves = torch.zeros(shape, dtype=stored).chunk(2, dim=2)
        rows = (problem.packed(cache).to(problem.dtype) for cache in pair)
        cpu_attn.ops.cpu_attn_reshape_and_cache(*rows, *halves, slots, isa, kv_cache_dtype=kv_type)
        return halves

    caches = [paged(pair) for pair in problem.caches]
    starts = problem.ints(problem.starts())
    seq_lens = problem.ints([seq_len for _, seq_len in problem.requests])
    window = problem.window or -1
    # More query heads a KV head than 16 its splits refuse.
    splits = cpu_attn.envs.VLLM_CPU_ATTN_SPLIT_KV and problem.heads <= 16 * problem.kv_heads
    schedule = cpu_attn.ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(counts), num_heads=problem.heads, num_kv_heads=problem.kv_heads,
        head_dim=problem.head_size, seq_lens=seq_lens, dtype=problem.dtype, query_start_loc=starts,
        causal=True, sliding_window_size=window, isa=isa,
        enable_kv_split=splits, kv_cache_dtype=kv_type)
    output = torch.empty_like(problem.query)

    def call(index):
        cpu_attn.ops.cpu_attention_with_kv_cache(
            problem.query, *caches[index], output, starts, seq_lens, problem.scale, True, None,
            window, table, problem.soft_cap, schedule, problem.sinks, kv_cache_dtype=kv_type)
        return output
    return call


def prepare_vllm_mla(cpu_attn, problem):
    """The decode of vLLM's AMX_MLA backend over latent rows, in pages as ours."""
    if not problem.rope_dim:
        raise Unsupported("latent attention alone")
    problem.needs("latent attention")
    if problem.tokens != len(problem.requests):
        raise Unsupported("decode alone")
    if not torch.cpu._is_amx_tile_supported():
        raise Unsupported("processors with AMX alone")
    torch.cpu._init_amx()
    amx_mla = importlib.import_module("vllm.v1.attention.backends.mla.amx_mla")
    count = len(problem.requests)
    rows = amx_mla._expand_block_table(problem.padded_order.view(count, -1).int(), problem.page)
    seq_lens = torch.tensor([seq_len for _, seq_len in problem.requests])
    splits = amx_mla._compute_num_kv_splits(problem.longest(), torch.get_num_threads())
    requests, shape = torch.arange(count), (count, problem.heads)
    partial = torch.zeros(*shape, splits, problem.value_size + 1)
    output = torch.empty(*shape, problem.value_size, dtype=problem.dtype)
    caches = [torch.cat(pair, -1).view(-1, 1, problem.head_size) for pair in problem.caches]

    def call(index):
        keys = caches[index]
        cpu_attn.ops.cpu_mla_decode(
            problem.query, keys, keys[..., :problem.value_size], output, None, None, None, partial,
            rows, requests, seq_lens, problem.scale, 0.0, False, 0, None, None)
        return output
    return call


#: Of each device: the peers, the library that each needs and what makes it ready, who is most asked
#: for first.
PEERS = {
    "cuda": [
        ("flash-attn-4", "flash-attn-4", prepare_flash_attention),
        *((f"flashinfer-{name}", "flashinfer",
           functools.partial(prepare_flashinfer, tensor_cores=cores))
          for name, cores in (("decode-tc", True), ("decode", False), ("prefill", None))),
        ("flashinfer-mixed", "flashinfer", prepare_flashinfer_mixed),
        *((f"flashinfer-mla-{backend}", "flashinfer",
           functools.partial(prepare_flashinfer_mla, backend=backend))
          for backend in ("fa3", "fa2")),
        *((f"sdpa-{name}", "torch", functools.partial(prepare_sdpa, backend=backend))
          for name, backend in (("cudnn", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION"),
                                ("efficient", "EFFICIENT_ATTENTION"))),
        ("sdpa", "torch", prepare_sdpa),
        ("sdpa-gather", "torch", functools.partial(prepare_sdpa, gathered=True)),
    ],
    "cpu": [
        ("vllm-cpu", "vllm", prepare_vllm),
        ("vllm-mla", "vllm", prepare_vllm_mla),
        ("sdpa", "torch", prepare_sdpa),
        ("sdpa-folded", "torch", functools.partial(prepare_sdpa, folded=True)),
        ("sdpa-gather", "torch", functools.partial(prepare_sdpa, gathered=True)),
    ],
}
#: The module that has a library's calls.
MODULES = {"torch": "torch", "flashinfer": "flashinfer", "flash-attn-4": "flash_attn.cute",
           "vllm": "vllm.v1.attention.backends.cpu_attn", "fla": "fla.ops.gated_delta_rule",
           "transformers": "transformers.models.qwen3_next.modeling_qwen3_next"}


def load(library):
    """A library's module, or why there is none."""
    os.environ.setdefault("VLLM_PLUGINS", "none")  # vLLM's own kernel, whatever else is installed
    try:
        return importlib.import_module(MODULES[library]), None
    except Exception as error:  # whatever a broken installation raises
        return None, str(error) or type(error).__name__
