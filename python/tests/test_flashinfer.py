"""clattn.flashinfer against attention in double precision, over NumPy's arrays and PyTorch's."""

import clattn
import clattn.flashinfer as flashinfer
import exact
import numpy as np
import pytest
from exact import close

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 32, 4
LENGTHS = [(5, 5), (1, 10), (0, 3), (6, 2), (3, 9), (2, 0), (2, 4)]  # tokens and keys
STARTS = np.cumsum([0] + [q for q, _ in LENGTHS])
KEY_STARTS = np.cumsum([0] + [k for _, k in LENGTHS])
PAGE_STARTS = np.cumsum([0] + [-(-k // PAGE) for _, k in LENGTHS])
LAST = [(k - 1) % PAGE + 1 for _, k in LENGTHS]
PAGES = np.random.default_rng(5).permutation(16)[: PAGE_STARTS[-1]]
SHAPE = (HEADS, KV_HEADS, SIZE, PAGE)


@pytest.fixture(params=["numpy", "torch"])
def given(request):
    """Makes an array of either library."""
    if request.param == "numpy":
        return np.asarray
    return pytest.importorskip("torch").from_numpy


@pytest.fixture
def rows(random):
    return lambda *shape: random.standard_normal(shape).astype(np.float32)


def cache_of(k, v, layout="NHD", dtype=np.float32):
    """[pages, 2, ...] that holds the keys, and NaN elsewhere."""
    cache = np.full((16, 2, PAGE, k.shape[1], SIZE), np.nan, dtype)
    for i in range(len(LENGTHS)):
        for j in range(KEY_STARTS[i], KEY_STARTS[i + 1]):
            page, at = divmod(j - KEY_STARTS[i], PAGE)
            cache[PAGES[PAGE_STARTS[i] + page], :, at] = k[j], v[j]
    return cache if layout == "NHD" else np.ascontiguousarray(cache.swapaxes(2, 3))


@pytest.fixture
def ragged(rows):
    return rows(STARTS[-1], HEADS, SIZE), *(rows(KEY_STARTS[-1], KV_HEADS, SIZE) for _ in "kv")


MASKS = [np.random.default_rng(i).random((q, k)) < 0.7 for i, (q, k) in enumerate(LENGTHS)]
FLAT = np.concatenate([mask.ravel() for mask in MASKS])
PACKED = np.concatenate([np.packbits(mask, bitorder="little") for mask in MASKS])
SLOPES = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
PREFILLS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"causal": True, "window_left": 2}, {"causal": True, "left": 2}),
    ({"window_left": 2, "sm_scale": 0.1}, {"left": 2, "scale": 0.1}),
    ({"causal": True, "logits_soft_cap": 1.5}, {"causal": True, "cap": 1.5}),
    ({"custom_mask": FLAT, "causal": True}, {"masks": MASKS}),
    ({"packed_custom_mask": PACKED, "window_left": 3}, {"masks": MASKS, "left": 3}),
]


@pytest.mark.parametrize(("said", "options"), PREFILLS, ids=lambda said: ",".join(said))
def test_prefill_over_pages(given, ragged, said, options):
    q, k, v = ragged
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None)
    lists = [given(np.int32(array)) for array in (STARTS, PAGE_STARTS, PAGES, LAST)]
    masks = {name: given(said[name]) for name in said if "mask" in name}
    wrapper.plan(*lists, *SHAPE, q_data_type=q.dtype, **{**said, **masks})
    out, lse = wrapper.run(given(q), given(cache_of(k, v)), return_lse=True)
    wanted, wanted_lse = exact.batch(*ragged, STARTS, KEY_STARTS, **options)
    assert type(out) is type(given(q))
    close(out, wanted)
    close(lse, wanted_lse / np.log(2), 1e-4)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["one array", "views", "two allocations"])
def test_caches(given, ragged, layout, form):
    q, k, v = ragged
    cache = cache_of(k, v, layout)
    wanted, wanted_lse = exact.batch(*ragged, STARTS, KEY_STARTS, causal=True)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, layout)
    pages = [*PAGES, -1]  # what follows those in use is the caller's
    wrapper.plan(STARTS, PAGE_STARTS, pages, LAST, *SHAPE, causal=True, q_data_type="float32")
    if form == "two allocations":
        cache = given(cache[:, 0].copy()), given(cache[:, 1].copy())
    else:
        cache = given(cache)
        cache = cache if form == "one array" else (cache[:, 0], cache[:, 1])
    out, lse = given(np.empty_like(q)), given(np.empty((HEADS, len(q)), np.float32))
    found = wrapper.run(
        given(q), cache, out=out, lse=lse, return_lse=True, lse_base="ln", lse_layout="HN"
    )
    assert found[0] is out
    close(out, wanted)
    close(lse, wanted_lse.T, 1e-4)
    close(wrapper.forward(given(q), cache, causal=True, logits_soft_cap=0.0), wanted)


@pytest.mark.parametrize(("said", "options"), PREFILLS[1:4], ids=lambda said: ",".join(said))
def test_ragged_keys(given, ragged, said, options):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None)
    starts, key_starts = given(STARTS.astype(np.int32)), given(KEY_STARTS.astype(np.int32))
    wrapper.plan(starts, key_starts, HEADS, KV_HEADS, SIZE, q_data_type="float32", **said)
    wanted, wanted_lse = exact.batch(*ragged, STARTS, KEY_STARTS, **options)
    out, lse = wrapper.run_return_lse(*map(given, ragged))
    close(out, wanted)
    close(lse, wanted_lse / np.log(2), 1e-4)


def test_ragged_values_of_another_width(ragged):
    q, k, v = ragged
    v = np.ascontiguousarray(v[..., :16])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None)
    wrapper.plan(STARTS, KEY_STARTS, HEADS, KV_HEADS, SIZE, 16, q_data_type="float32")
    close(wrapper.run(q, k, v), exact.batch(q, k, v, STARTS, KEY_STARTS)[0])


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ({}, {}),
        ({"window_left": 3}, {"left": 3}),
        ({"logits_soft_cap": 2.0, "sm_scale": 0.3}, {"cap": 2.0, "scale": 0.3}),
        ({"pos_encoding_mode": "ALIBI"}, {"slopes": SLOPES}),
    ],
    ids=lambda said: ",".join(said),
)
def test_decode(given, rows, ragged, said, options):
    _, k, v = ragged
    q = rows(len(LENGTHS), HEADS, SIZE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, use_tensor_cores=True)
    wrapper.plan(PAGE_STARTS, PAGES, LAST, *SHAPE, data_type="float32", **said)
    wanted, wanted_lse = exact.batch(q, k, v, range(len(q) + 1), KEY_STARTS, causal=True, **options)
    cache = given(cache_of(k, v))
    close(wrapper.run(given(q), cache), wanted)
    if "pos_encoding_mode" in said:
        with pytest.raises(clattn.Unsupported, match="return_lse: True, legal with pos_encoding"):
            wrapper.run(given(q), cache, return_lse=True)
        return
    out, lse = wrapper.run(given(q), cache, return_lse=True)
    close(lse, wanted_lse / np.log(2), 1e-4)
    scaled = wrapper.run(given(q / 4), cache, q_scale=2.0, k_scale=2.0, v_scale=0.5)
    close(scaled, wanted / 2)


def test_decode_of_several_tokens_and_sinks(rows, ragged):
    _, k, v = ragged
    q, sinks = rows(2 * len(LENGTHS), HEADS, SIZE), [0.5, -1.0, 2.0, 0.0]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(PAGE_STARTS, PAGES, LAST, *SHAPE, data_type="float32", q_len_per_req=2)
    found = wrapper.run(q, cache_of(k, v), sinks=np.array(sinks))
    starts = 2 * np.arange(len(LENGTHS) + 1)
    close(found, exact.batch(q, k, v, starts, KEY_STARTS, causal=True, sinks=sinks)[0])


def test_types(rows, ragged):
    torch = pytest.importorskip("torch")
    _, k, v = ragged
    q = torch.from_numpy(rows(len(LENGTHS), HEADS, SIZE)).to(torch.bfloat16)
    cache = torch.from_numpy(np.nan_to_num(cache_of(k, v)))
    for stored in (torch.bfloat16, torch.float8_e4m3fn):
        held = cache.to(stored)
        keys = held.float().numpy()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)
        wrapper.plan(
            PAGE_STARTS, PAGES, LAST, *SHAPE, q_data_type=torch.bfloat16, kv_data_type=stored
        )
        lists = [PAGES[PAGE_STARTS[i] : PAGE_STARTS[i + 1]] for i in range(len(LENGTHS))]
        rows_of = [keys[pages].swapaxes(0, 1).reshape(2, -1, KV_HEADS, SIZE) for pages in lists]
        for i, (_, length) in enumerate(LENGTHS):
            wanted = exact.attention(q[i : i + 1].float().numpy(), *rows_of[i][:, :length])[0]
            for halves in (held, (held[:, 0].clone(), held[:, 1].clone())):
                close(wrapper.run(q, halves)[i : i + 1].float(), wanted, 3e-2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single(given, rows, layout):
    q, k, v = rows(3, HEADS, SIZE), rows(9, KV_HEADS, SIZE), rows(9, KV_HEADS, SIZE)
    keys, values = (given(x if layout == "NHD" else x.swapaxes(0, 1).copy()) for x in (k, v))
    out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(
        given(q), keys, values, causal=True, kv_layout=layout
    )
    wanted, wanted_lse = exact.attention(q, k, v, causal=True)
    close(out, wanted)
    close(lse, wanted_lse / np.log(2), 1e-4)
    mask = np.random.default_rng(2).random((3, 9)) < 0.6
    wanted = exact.attention(q, k, v, mask=mask)[0]
    for name, array in {
        "custom_mask": mask,
        "packed_custom_mask": np.packbits(mask, bitorder="little"),
    }.items():
        found = flashinfer.single_prefill_with_kv_cache(
            given(q), keys, values, kv_layout=layout, **{name: given(array)}
        )
        close(found, wanted)
    out, lse = flashinfer.single_decode_with_kv_cache(
        given(q[0]), keys, values, layout, window_left=3, return_lse=True, v_scale=2.0
    )
    wanted, wanted_lse = exact.attention(q[:1], k, v, left=3)
    close(out, 2 * wanted[0])
    close(lse, wanted_lse[0] / np.log(2), 1e-4)


def test_device_memory(ragged):
    q, k, v = ragged
    context = clattn.Context()
    queue = context.create_queue()
    config = clattn.AttentionConfig(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, block_size=PAGE, dtype="f32"
    )
    backend = clattn.get_attn_backend(config, context)
    cache = clattn.make_kv_cache(context, queue, backend, config, num_blocks=16)
    buffers = [context.allocate(array.nbytes) for array in (q, k, v, q)]
    for buffer, array in zip(buffers, (q, k, v), strict=False):
        queue.write(buffer, array)
    where = {"queue": (context, queue)}
    request = np.repeat(np.arange(len(LENGTHS)), np.diff(KEY_STARTS))
    position = np.arange(KEY_STARTS[-1]) - KEY_STARTS[request]
    flashinfer.append_paged_kv_cache(
        *buffers[1:3], request, position, cache, PAGES, PAGE_STARTS, LAST, **where
    )
    wanted = exact.batch(*ragged, STARTS, KEY_STARTS, causal=True)[0]
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, **where)
    paged.plan(STARTS, PAGE_STARTS, PAGES, LAST, *SHAPE, causal=True, q_data_type="float32")
    flat = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None, **where)
    flat.plan(STARTS, KEY_STARTS, HEADS, KV_HEADS, SIZE, causal=True, q_data_type="float32")
    for run in (
        lambda: paged.run(buffers[0], cache, out=buffers[3]),
        lambda: flat.run(*buffers[:3], out=buffers[3]),
    ):
        run()
        found = np.empty_like(q)
        queue.read(buffers[3], found)
        close(found, wanted)
