"""attention() and paged_attention() against attention in double precision."""

import clattn
import numpy as np
import pytest
from clattn import reference

LENGTHS = [(5, 5), (1, 70), (3, 9), (20, 33)]
STARTS = np.cumsum([0] + [q for q, _ in LENGTHS])
KEY_STARTS = np.cumsum([0] + [k for _, k in LENGTHS])


@pytest.fixture
def rows(random):
    def make(tokens, heads, size=32):
        return random.standard_normal((tokens, heads, size)).astype(np.float32)

    return make


@pytest.fixture
def ragged(rows):
    return rows(STARTS[-1], 4), rows(KEY_STARTS[-1], 2), rows(KEY_STARTS[-1], 2)


def exact(q, k, v, said=None, **options):
    out, lse = np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros(q.shape[:-1])
    named = reference.Options(scale=q.shape[-1] ** -0.5, **options)
    for i in range(len(LENGTHS)):
        mine, keys = slice(*STARTS[i : i + 2]), slice(*KEY_STARTS[i : i + 2])
        request = said[i] if said else None
        out[mine], lse[mine] = reference.attention(q[mine], k[keys], v[keys], named, request)
    return out, lse


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"logits_soft_cap": 3.0, "causal": False},
        {"alibi_slopes": [0.5, 0.25, 0.0, -0.125]},
        {"sinks": [0.0, 1.0, -2.0, 3.0]},
        {"attention_chunk_size": 8, "chunk_lookback": 1},
        {"window_left": 3},
        {"window_left": 0, "window_right": 5, "causal": False},
        {"window_left": 6, "causal": False},
        {"window_right": 1, "causal": False},
    ],
    ids=str,
)
def test_contiguous_keys(ragged, options):
    out, lse = clattn.attention(
        *ragged, query_start_loc=STARTS, key_start_loc=KEY_STARTS, return_lse=True, **options
    )
    wanted, wanted_lse = exact(*ragged, **options)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=1e-4)


SAID = [
    reference.Request(reference.CAUSAL, [(1, 4)], 0, 2),
    reference.Request(reference.BOTH_WAYS, [(50, 70)], 31, 40),
    reference.Request(reference.CANVAS, [], 8),
    reference.Request(reference.CAUSAL, [(10, 16), (16, 30)], 15, 3),
]
DIRECTIONS = {"direction": [1, 0, 2, 1]}
SPANS = {"span_start_loc": [0, 1, 2, 2, 4], "spans": [(1, 4), (50, 70), (10, 16), (16, 30)]}
FIRST_KEYS = {"first_keys": [0, 31, 8, 15]}
KEEP_KEYS = {"keep_keys": [2, 40, 0, 3]}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (DIRECTIONS, {"window_left": 2, "window_right": 1}),
        (SPANS, {"sliding_window": 3}),
        (SPANS, {"sliding_window": 3, "span_rule": "clip_left"}),
        (SPANS, {"sliding_window": 3, "span_rule": "clip_both", "use_spans": False}),
        (FIRST_KEYS, {}),
        (KEEP_KEYS, {"sliding_window": 3}),
        (
            DIRECTIONS | SPANS | FIRST_KEYS | KEEP_KEYS,
            {"window_left": 6, "sinks": [0.0, 1.0, -2.0, 3.0]},
        ),
    ],
    ids=["directions", "whole", "clip left", "clip both", "first keys", "kept keys", "all"],
)
def test_what_is_said_of_sequences(ragged, given, options):
    said = [
        reference.Request(
            request.direction if "direction" in given else None,
            request.spans if "spans" in given else [],
            request.first_key if "first_keys" in given else 0,
            request.keep_keys if "keep_keys" in given else 0,
        )
        for request in SAID
    ]
    out, lse = clattn.attention(
        *ragged, query_start_loc=STARTS, key_start_loc=KEY_STARTS, return_lse=True,
        **given, **options,
    )  # fmt: skip
    options = {name: value for name, value in options.items() if name != "use_spans"}
    wanted, wanted_lse = exact(*ragged, said, **options)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=1e-4)
    if "direction" in given:
        with pytest.raises(clattn.InvalidArgument, match="causal is false"):
            clattn.attention(
                *ragged, query_start_loc=STARTS, key_start_loc=KEY_STARTS, causal=False, **given
            )


def test_an_image_in_pages(context, queue, rows):
    layer = clattn.AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, dtype="f32")
    backend = clattn.get_attn_backend(layer, context)
    cache = clattn.make_kv_cache(context, queue, backend, layer, num_blocks=4)
    q, k, v = rows(9, 4), rows(9, 2), rows(9, 2)
    given = {"spans": [(2, 7)], "span_start_loc": [0, 1], "first_keys": [1]}
    out = clattn.paged_attention(
        q, cache, [[2]], [9], key=k, value=v, queue=(context, queue), **given
    )
    request = reference.Request(spans=[(2, 7)], first_key=1)
    wanted, _ = reference.attention(q, k, v, reference.Options(scale=32**-0.5), request)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
    assert not out[0].any()


def test_sides_are_refused_by_name(ragged):
    given = {"query_start_loc": STARTS, "key_start_loc": KEY_STARTS}
    with pytest.raises(clattn.Unsupported, match="window_right is -2, supported: >= -1"):
        clattn.attention(*ragged, **given, window_right=-2)


def test_three_lines(rows):
    q = rows(6, 4)
    out = clattn.attention(q, q[:, :2], q[:, :2])
    wanted, _ = reference.attention(q, q[:, :2], q[:, :2], reference.Options(scale=32**-0.5))
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
    assert out.dtype == q.dtype and out.shape == q.shape


def test_batches_of_equal_lengths(random):
    q = random.standard_normal((3, 5, 4, 32)).astype(np.float32)
    k, v = (random.standard_normal((3, 9, 2, size)).astype(np.float32) for size in (32, 16))
    out, lse = clattn.attention(q, k, v, return_lse=True, lse_layout="heads", lse_base="2")
    assert out.shape == (3, 5, 4, 16) and lse.shape == (3, 4, 5)
    for i in range(3):
        wanted, wanted_lse = reference.attention(
            q[i], k[i], v[i], reference.Options(scale=32**-0.5)
        )
        np.testing.assert_allclose(out[i], wanted, rtol=0, atol=1e-5)
        np.testing.assert_allclose(lse[i].T * np.log(2), wanted_lse, rtol=0, atol=1e-4)


def test_out_and_lse_of_the_caller(ragged):
    out = np.full((len(ragged[0]), 2, 4, 32), 9, np.float32)[:, 0]  # rows with gaps
    lse = np.empty((4, len(out)), np.float32)
    given = {"query_start_loc": STARTS, "key_start_loc": KEY_STARTS}
    result = clattn.attention(*ragged, out=out, lse=lse, lse_layout="heads", **given)
    assert result[0] is out and result[1] is lse
    plain, plain_lse = clattn.attention(*ragged, return_lse=True, **given)
    np.testing.assert_array_equal(out, plain)
    np.testing.assert_array_equal(lse.T, plain_lse)


def test_masks(ragged, random):
    mask = random.random((len(ragged[0]), 70)) < 0.7
    given = {"query_start_loc": STARTS, "key_start_loc": KEY_STARTS}
    by_bytes = clattn.attention(*ragged, mask=mask, **given)
    packed = np.packbits(mask, axis=1, bitorder="little")
    by_bits = clattn.attention(*ragged, mask=packed, packed_mask=True, **given)
    np.testing.assert_array_equal(by_bits, by_bytes)
    assert not np.array_equal(by_bytes, clattn.attention(*ragged, **given))


def test_pages_as_rows_and_lists(rows):
    pages = rows(12 * 2, 4 * 2).reshape(12, 2, 4, 2, 32)  # [blocks, K or V, tokens, heads, size]
    cache = pages[:, 0], pages[:, 1]
    q, lens = rows(4, 4), [7, 16, 1, 4]
    table = [[3, 5, -1, -1], [0, 1, 2, 4], [7, -1, -1, -1], [6, -1, -1, -1]]
    out = clattn.paged_attention(q, cache, table, lens)
    for i, length in enumerate(lens):
        used = table[i][: -(-length // 4)]
        k, v = (pages[used, side].reshape(-1, 2, 32)[:length] for side in (0, 1))
        wanted, _ = reference.attention(q[i : i + 1], k, v, reference.Options(scale=32**-0.5))
        np.testing.assert_allclose(out[i : i + 1], wanted, rtol=0, atol=1e-5)
    listed = clattn.paged_attention(
        q, cache, [3, 5, 0, 1, 2, 4, 7, 6], lens, page_start_loc=[0, 2, 6, 7, 8]
    )
    np.testing.assert_array_equal(listed, out)


def test_a_cache_takes_the_calls_keys_first(context, queue, rows):
    layer = clattn.AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, dtype="f32")
    backend = clattn.get_attn_backend(layer, context)
    cache = clattn.make_kv_cache(context, queue, backend, layer, num_blocks=4)
    q, k, v = rows(5, 4), rows(5, 2), rows(5, 2)
    out = clattn.paged_attention(q, cache, [[2]], [5], key=k, value=v, queue=(context, queue))
    np.testing.assert_allclose(out, clattn.attention(q, k, v), rtol=0, atol=1e-6)


def test_pytorch(rows):
    torch = pytest.importorskip("torch")
    q, k = torch.from_numpy(rows(6, 4)), torch.from_numpy(rows(6, 2))
    out, lse = clattn.attention(q, k, k, return_lse=True)
    assert isinstance(out, torch.Tensor) and lse.dtype == torch.float32
    np.testing.assert_array_equal(out, clattn.attention(q.numpy(), k.numpy(), k.numpy()))
    half = clattn.attention(*(x.to(torch.bfloat16) for x in (q, k, k)))
    assert half.dtype == torch.bfloat16
    assert (half.float() - out).abs().max() < 0.05


def test_device_memory(context, queue, rows):
    q, k = rows(6, 4), rows(6, 2)
    tensors = [context.allocate(x.nbytes) for x in (q, k, q)]
    for buffer, values in zip(tensors, (q, k, q), strict=True):
        queue.write(buffer, values)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "f32"}
    given = {"query_start_loc": [0, 6], "queue": (context, queue)}
    clattn.attention(tensors[0], tensors[1], tensors[1], out=tensors[2], **given, **shape)
    out = np.empty_like(q)
    queue.read(tensors[2], out)
    np.testing.assert_array_equal(out, clattn.attention(q, k, k))
    with pytest.raises(clattn.InvalidArgument, match="out or lse: None"):
        clattn.attention(tensors[0], tensors[1], tensors[1], **given, **shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": [1.0]}, "q: list, legal: an array"),
        ({"q": np.ones((2, 32), np.float32)}, "q: shape \\[2, 32\\], legal: \\[tokens"),
        ({"q": np.ones((2, 4, 32))}, "q: elements of float64, legal"),
        ({"num_heads": 8}, "num_heads: 8, legal: 4, as in q"),
        ({"num_kv_heads": 1}, "num_kv_heads: 1, legal: 2, as in k"),
        ({"lse_layout": "rows"}, "lse_layout: 'rows', legal: 'tokens'"),
        ({"lse_base": "10"}, "lse_base: '10', legal: 'e' or '2'"),
        ({"widow": 4}, "no field 'widow'"),
        ({"query_start_loc": []}, "query_start_loc: no values"),
        ({"direction": [3]}, "request 0: direction is 3, legal: 0 .both ways., 1 .causal."),
        ({"direction": [0, 1]}, "direction holds 2 elements, legal: 1"),
        ({"spans": [(0, 2)]}, "span_start_loc holds 0 elements, legal: 2"),
        ({"spans": [(0, 1, 2)]}, "spans: rows of 3, legal: rows of 2"),
        ({"spans": [(0, 2)], "span_start_loc": [0, 2]}, "span_start_loc.1. is 2, legal: 0 … 1"),
        ({"first_keys": [3]}, "request 0: first_keys is 3, legal: 0 … 2"),
        ({"keep_keys": [3], "window_left": 1}, "request 0: keep_keys is 3, legal: 0 … 2"),
        ({"out": np.ones((2, 4, 32), np.float16)}, "out: element type is float16"),
        ({"device": "cpu", "queue": (None, None)}, "device: 'cpu', legal with queue: none"),
        ({"num_splits": 4}, "no field 'num_splits'"),
    ],
    ids=str,
)
def test_refusals_name_the_argument(change, message):
    q, k = np.ones((2, 4, 32), np.float32), np.ones((2, 2, 32), np.float32)
    given = {"q": q, "k": k, "v": k} | change
    with pytest.raises(clattn.InvalidArgument, match=message):
        clattn.attention(**given)


def test_shapes_that_do_not_fit_are_refused(random):
    q, k = np.ones((2, 5, 4, 32), np.float32), np.ones((2, 9, 2, 32), np.float32)
    for given, message in (
        ((q, k[:1], k[:1]), "k: shape \\[1, 9, 2, 32\\], legal: as many batches as q"),
        ((q[:1], k, k), "k: shape .*, legal: as many batches as q"),
        ((q, k, np.ones((2, 10, 2, 32), np.float32)), "v: shape .*, legal: \\[2, 9, 2, ...\\]"),
    ):
        with pytest.raises(clattn.InvalidArgument, match=message):
            clattn.attention(*given)
    with pytest.raises(clattn.InvalidArgument, match="out: shape"):
        clattn.attention(q, k, k, out=np.empty((2, 6, 4, 32), np.float32))


def test_a_block_table_has_a_row_a_sequence(rows):
    pages = rows(8 * 2, 4 * 2).reshape(8, 2, 4, 2, 32)
    cache, table = (pages[:, 0], pages[:, 1]), np.zeros((4, 6), np.int32)
    with pytest.raises(clattn.InvalidArgument, match="block_table: 4 rows, legal: 3"):
        clattn.paged_attention(rows(3, 4), cache, table, [1, 2, 3])


def test_a_pair_of_arrays_keeps_what_is_stored(rows):
    pages = np.zeros((2, 4, 16, 2, 32), np.float32)
    q, k, v = rows(5, 4), rows(5, 2), rows(5, 2)
    clattn.paged_attention(q, pages, [[3]], [5], key=k, value=v)
    np.testing.assert_array_equal(pages[0, 3, :5], k)
    np.testing.assert_array_equal(pages[1, 3, :5], v)
    assert not pages[:, :3].any()


def test_values_of_fewer_elements_follow_their_keys(rows):
    pages = np.zeros((4, 16, 2, 32 + 24), np.float32)
    cache = pages[..., :32], pages[..., 32:]
    q, k, v = rows(5, 4), rows(5, 2), rows(5, 2, 24)
    out = clattn.paged_attention(q, cache, [[3]], [5], key=k, value=v)
    np.testing.assert_allclose(out, clattn.attention(q, k, v), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(pages[3, :5], np.concatenate([k, v], axis=-1))
    assert not pages[:3].any()


def test_clearing_changes_nothing(rows):
    q = rows(6, 4)
    before = clattn.attention(q, q, q)
    clattn.clear_attention_functions()
    np.testing.assert_array_equal(clattn.attention(q, q, q), before)
