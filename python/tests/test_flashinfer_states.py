"""clattn.flashinfer's page helpers, merges, cascades and latent attention, and its refusals."""

import clattn
import clattn.flashinfer as flashinfer
import exact
import numpy as np
import pytest
from exact import close


@pytest.fixture(params=["numpy", "torch"])
def given(request):
    """Makes an array of either library."""
    if request.param == "numpy":
        return np.asarray
    return pytest.importorskip("torch").from_numpy


@pytest.fixture
def rows(random):
    return lambda *shape: random.standard_normal(shape).astype(np.float32)


def test_page_helpers(given):
    lens = flashinfer.get_seq_lens(given(np.int32([0, 2, 2, 3])), [1, 0, 4], 4)
    assert type(lens) is type(given(np.zeros(1))) and lens.tolist() == [5, 0, 4]
    requests, positions = flashinfer.get_batch_indices_positions(
        given(np.int32([0, 1, 3, 6, 10])), [5, 5, 5, 5], 12
    )
    assert requests.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, -1, -1]
    assert positions.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4, 0, 0]
    held = given(np.full(3, 9, np.int32)), given(np.full(3, 9, np.int32))
    found = flashinfer.get_batch_indices_positions([0, 2], [2], 3, *held)
    assert found[0] is held[0] and [x.tolist() for x in held] == [[0, 0, -1], [0, 1, 9]]


LISTS = {"kv_indices": [3, 1, 4], "kv_indptr": [0, 2, 3], "kv_last_page_len": [1, 4]}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16, np.uint8])
def test_append(given, random, layout, dtype):
    k, v = (random.integers(0, 100, (4, 2, 16)).astype(dtype) for _ in "kv")
    want = np.zeros((5, 2, 4, 2, 16), dtype)
    for row, page, at in ((0, 3, 3), (1, 1, 0), (2, 4, 2)):
        want[page, :, at] = k[row], v[row]
    if layout == "HND":
        want = want.swapaxes(2, 3)
    cache = np.zeros(want.shape, dtype)
    halves = given(cache[:, 0].copy()), given(cache[:, 1].copy())
    whole = given(cache)
    for form in (whole, halves):
        flashinfer.append_paged_kv_cache(
            given(k), given(v), [0, 0, 1, -1], [3, 4, 2, 0], form, **LISTS, kv_layout=layout
        )
    np.testing.assert_array_equal(np.asarray(whole), want)
    np.testing.assert_array_equal(np.asarray(halves[1]), want[:, 1])


def test_append_latent_rows(given, rows):
    ckv, kpe = rows(3, 512), rows(3, 64)
    whole = given(np.zeros((5, 4, 576), np.float32))
    for caches in (
        (given(np.zeros((5, 4, 512), np.float32)), given(np.zeros((5, 4, 64), np.float32))),
        (whole[..., :512], whole[..., 512:]),
    ):
        flashinfer.append_paged_mla_kv_cache(
            given(ckv), given(kpe), [0, 0, 1], [3, 4, 2], *caches, **LISTS
        )
        for page, at, row in ((3, 3, 0), (1, 0, 1), (4, 2, 2)):
            close(caches[0][page, at], ckv[row], 0)
            close(caches[1][page, at], kpe[row], 0)
    close(whole.sum(), ckv.sum() + kpe.sum(), 1e-3)


def test_append_refuses(rows):
    k, cache = rows(1, 2, 16), rows(5, 2, 4, 2, 16)
    for lists, text in (
        (([2], [0]), "batch_indices: 2, legal: -1 ... 1"),
        (([0], [5]), "positions: 5, legal: 0 ... 4"),
        (([0], [0, 1]), "positions: 2 values, legal: 1"),
    ):
        with pytest.raises(clattn.InvalidArgument, match=text):
            flashinfer.append_paged_kv_cache(k, k, *lists, cache, **LISTS)
    with pytest.raises(clattn.InvalidArgument, match="append_value: float16, legal: float32"):
        flashinfer.append_paged_kv_cache(k, k.astype(np.float16), [0], [0], cache, **LISTS)


def merged(v, s):
    """v [tokens, parts, heads, size] and s in base 2, in double precision."""
    weights = np.exp2(s.astype(float))[..., None]
    return (v * weights).sum(1) / weights.sum(1), np.log2(weights.sum(1)[..., 0])


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_merges(given, rows, parts):
    v, s = rows(5, parts, 4, 16), rows(5, parts, 4)
    s[0, 0] = -np.inf
    if parts == 1:
        s[0] = 0
    wanted = merged(v, s)
    for found, want in zip(flashinfer.merge_states(given(v), given(s)), wanted, strict=True):
        close(found, want)
    if parts != 2:
        return
    a, b = ((given(v[:, i].copy()), given(s[:, i].copy())) for i in range(2))
    for found, want in zip(flashinfer.merge_state(*a, *b), wanted, strict=True):
        close(found, want)
    mask = np.array([True, False, True, True, False])
    flashinfer.merge_state_in_place(*a, *b, mask=given(mask))
    close(a[0], np.where(mask[:, None, None], wanted[0], v[:, 0]))
    close(a[1], np.where(mask[:, None], wanted[1], s[:, 0]))
    flashinfer.merge_state_in_place(*b, *(given(x[:, 0].copy()) for x in (v, s)))
    close(b[0], wanted[0])


def test_merges_of_nothing(rows):
    v, s = flashinfer.merge_states(rows(2, 0, 4, 16), rows(2, 0, 4))
    assert v.shape == (2, 4, 16) and not v.any() and (s == -np.inf).all()
    assert flashinfer.merge_state(*[rows(0, 4, 16), rows(0, 4)] * 2)[0].shape == (0, 4, 16)
    with pytest.raises(clattn.InvalidArgument, match="s: elements of float64, legal: float32"):
        v = rows(1, 4, 16)
        flashinfer.merge_state_in_place(v, np.zeros((1, 4)), v, rows(1, 4))
    with pytest.raises(clattn.InvalidArgument, match=r"s_a: shape \[2, 4\], legal: \[1, 4\]"):
        flashinfer.merge_state(rows(1, 4, 16), rows(2, 4), rows(1, 4, 16), rows(1, 4))


@pytest.mark.parametrize("causal", [False, True])
def test_cascade(given, rows, causal):
    cache = rows(9, 2, 4, 2, 32)
    own = {0: [5, 2], 1: [7], 2: [1, 8]}  # behind the pages 3 and 6, which all share
    own_lens, tokens = [6, 4, 5], [6, 1, 5]  # more tokens than shared keys
    starts = np.cumsum([0, *tokens])
    q = rows(starts[-1], 4, 32)
    levels = 2, None
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(*levels)
    wrapper.plan(
        [np.int32([0, starts[-1]]), starts], [[0, 2], [0, 2, 3, 5]], [[3, 6], [5, 2, 7, 1, 8]],
        [[4], [2, 4, 1]], 4, 2, 32, 4, causal=causal, q_data_type="float32",
    )  # fmt: skip
    found = wrapper.run(given(q), given(cache))
    for i, pages in own.items():
        k, v = cache[[3, 6, *pages]].swapaxes(0, 1).reshape(2, -1, 2, 32)[:, : 8 + own_lens[i]]
        wanted = exact.attention(q[starts[i] : starts[i + 1]], k, v, causal=causal)[0]
        close(found[starts[i] : starts[i + 1]], wanted)


def latent(rows):
    """Queries of 1 and 2 tokens, their rows of 64 + 16 in pages, and what is right."""
    q, pages = rows(3, 8, 80), rows(5, 4, 80)
    wanted = [
        exact.attention(q[part], keys[:, None], keys[:, None, :64], causal=True, scale=0.2)
        for part, keys in (
            (slice(0, 1), np.concatenate([pages[3], pages[1]])[:5]),
            (slice(1, 3), pages[4]),
        )
    ]
    return q, pages, *map(np.concatenate, zip(*wanted, strict=True))


LATENT = {
    "num_heads": 8, "head_dim_ckv": 64, "head_dim_kpe": 16, "page_size": 4, "causal": True,
    "sm_scale": 0.2, "q_data_type": "float32", "kv_data_type": "float32",
}  # fmt: skip


@pytest.mark.parametrize("form", ["packed", "views", "split"])
def test_latent(given, rows, form):
    q, pages, wanted, wanted_lse = latent(rows)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(None)
    lists = flashinfer.MLAPlanMetadata.csr([0, 1, 3], [0, 2, 3], [3, 1, 4], [5, 4])
    wrapper.plan(metadata=lists, lse_mode="base2", **LATENT)
    if form == "packed":
        parts = {"query": given(q), "kv_cache": given(pages)}
    else:
        keep = np.copy if form == "split" else np.asarray
        halves = [
            given(keep(x)) if form == "split" else given(whole)[..., part]
            for whole in (q, pages)
            for part in (slice(0, 64), slice(64, 80))
            for x in (whole[..., part],)
        ]
        names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
        parts = dict(zip(names, halves, strict=True))
    out, lse = wrapper.run(**parts, return_lse=True)
    close(out, wanted)
    close(lse, wanted_lse / np.log(2), 1e-4)
    table = flashinfer.MLAPlanMetadata.dense([0, 1, 3], [[3, 1], [4, -1]], [5, 4])
    wrapper.plan(metadata=table, **LATENT)
    out, lse = wrapper.run(**parts, return_lse=True, return_lse_base_on_e=True)
    close(out, wanted)
    close(lse, wanted_lse, 1e-4)


def test_latent_rows_in_device_memory(rows):
    q, pages, wanted, _ = latent(rows)
    context = clattn.Context()
    queue = context.create_queue()
    whole = pages[:, :, None]
    cache = clattn.KVCache.share(context, whole, whole, "f32")
    query, out = context.allocate(q.nbytes), context.allocate(wanted.size * 4)
    queue.write(query, q)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(None, queue=(context, queue))
    wrapper.plan([0, 1, 3], [0, 2, 3], [3, 1, 4], [5, 4], **LATENT)
    wrapper.run(query=query, kv_cache=cache, out=out)
    found = np.empty(wanted.shape, np.float32)
    queue.read(out, found)
    close(found, wanted)


def test_latent_refuses(rows):
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(None)
    with pytest.raises(clattn.InvalidArgument, match="sm_scale: None"):
        wrapper.plan([0, 1], [0, 1], [0], [1], **{**LATENT, "sm_scale": None})
    with pytest.raises(clattn.InvalidArgument, match="metadata: neither or both"):
        wrapper.plan([0, 1], [0, 1], [0], **LATENT)
    with pytest.raises(clattn.InvalidArgument, match="no plan"):
        wrapper.run(query=rows(1, 8, 80), kv_cache=rows(1, 4, 80))
    wrapper.plan([0, 1], [0, 1], [7], [1], **LATENT)
    split = rows(1, 8, 64), rows(1, 8, 16)
    with pytest.raises(clattn.InvalidArgument, match="kv_indices: 7, legal: 0 ... 0"):
        wrapper.run(*split, rows(1, 4, 64), rows(1, 4, 16))
    with pytest.raises(clattn.InvalidArgument, match="q_nope, q_pe: one of two"):
        wrapper.run(split[0], None, kv_cache=rows(1, 4, 80))


DECODE = flashinfer.BatchDecodeWithPagedKVCacheWrapper
PREFILL = flashinfer.BatchPrefillWithPagedKVCacheWrapper
PLAN = {DECODE: ([0, 1], [0], [1], 4, 2, 32, 4), PREFILL: ([0, 1], [0, 1], [0], [1], 4, 2, 32, 4)}


@pytest.mark.parametrize(
    ("made", "said", "text"),
    [
        (DECODE, {"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode: 'ROPE_LLAMA', legal: "),
        (DECODE, {"rope_theta": 1e6}, "rope_theta: 1000000.0, legal: None or 10000.0"),
        (DECODE, {"window_right": 2}, "window_right: 2, legal: 0"),
        (DECODE, {"fixed_split_size": 4}, "fixed_split_size: 4, legal: nothing"),
        (DECODE, {"block_tables": [[0]]}, "block_tables: list, legal: nothing"),
        (DECODE, {"o_data_type": "float32"}, "o_data_type: 'f32', legal: 'f16'"),
        (DECODE, {"q_data_type": "int4"}, "q_data_type: int4, legal: float16"),
        (DECODE, {"seq_lens": [2]}, r"seq_lens: not the lengths .*legal: \[1\]"),
        (PREFILL, {"use_fp16_qk_reduction": True}, "use_fp16_qk_reduction: True, legal: False"),
        (PREFILL, {"head_dim_vo": 16}, "head_dim_vo: 16, legal: None or 32"),
        (PREFILL, {"prefix_len_ptr": [1]}, "prefix_len_ptr: list, legal: nothing"),
        (PREFILL, {"custom_mask": np.ones(3, bool)}, "custom_mask: 3 values, legal: 1"),
        (PREFILL, {"max_sequence_kv": 0}, "max_sequence_kv: 0, legal: at least 1"),
        (
            PREFILL,
            {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 1.0},
            "logits_soft_cap: 1.0, legal with pos_encoding_mode='ALIBI'",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_plans_refuse(made, said, text):
    with pytest.raises((clattn.InvalidArgument, clattn.Unsupported), match=text):
        made(None).plan(*PLAN[made], **said)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"use_cuda_graph": True}, "use_cuda_graph: True, legal: nothing: .*AttentionState"),
        ({"backend": "trtllm-gen"}, "backend: 'trtllm-gen', legal: 'auto' or 'fa2' or 'fa3'"),
        ({"kv_layout": "DHN"}, "kv_layout: 'DHN', legal: 'NHD' or 'HND'"),
        ({"jit_args": ["name"]}, "jit_args: list, legal: nothing"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("made", [DECODE, PREFILL, flashinfer.BatchPrefillWithRaggedKVCacheWrapper])
def test_wrappers_refuse(made, said, text):
    with pytest.raises((clattn.InvalidArgument, clattn.Unsupported), match=text):
        made(None, **said)


def test_runs_refuse(rows):
    wrapper = DECODE(None)
    cache = rows(1, 2, 4, 2, 32)
    with pytest.raises(clattn.InvalidArgument, match="no plan"):
        wrapper.run(rows(1, 4, 32), cache)
    wrapper.plan(*PLAN[DECODE], data_type="float32")
    for q, pages, said, text in (
        (rows(2, 4, 32), cache, {}, "q: 2 rows, legal: 1, as q_len_per_req says"),
        (rows(1, 4, 32), cache[:, :1], {}, r"paged_kv_cache: shape \[1, 1, 4, 2, 32\]"),
        (rows(1, 4, 32), rows(1, 2, 8, 2, 32), {}, "paged_kv_cache: pages of 8 tokens, legal: 4"),
        (rows(1, 4, 32).astype("f2"), cache, {}, "dtype: f32, legal: f16"),
        (rows(1, 4, 32), cache, {"window_left": 3}, "window_left: 3, legal: None or -1"),
        (rows(1, 4, 32), cache, {"kv_cache_sf": cache}, "kv_cache_sf: ndarray, legal: nothing"),
        (rows(1, 4, 32), cache, {"k_scale": [1, 2]}, "k_scale: 2 factors, legal: one"),
    ):
        with pytest.raises((clattn.InvalidArgument, clattn.Unsupported), match=text):
            wrapper.run(q, pages, **said)
    with pytest.raises(clattn.InvalidArgument, match="q: Buffer, legal: an array of the host"):
        flashinfer.single_decode_with_kv_cache(clattn.Context().allocate(4), cache, cache)
