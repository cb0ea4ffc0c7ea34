"""clattn.flash_attn against attention in double precision, over NumPy's arrays and PyTorch's."""

import clattn
import exact
import numpy as np
import pytest
from clattn.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
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


SLOPES = [0.5, 0.25, 0.0, 0.125]
CASES = [
    ({}, {}),
    ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "scale": 0.3}),
    ({"causal": True, "window_size": (2, 5)}, {"causal": True, "left": 2}),
    ({"window_size": (2, 1), "softcap": 2.0}, {"left": 2, "right": 1, "cap": 2.0}),
    ({"window_size": (-1, 1)}, {"right": 1}),
    ({"causal": True, "alibi_slopes": SLOPES}, {"causal": True, "slopes": SLOPES}),
]


@pytest.mark.parametrize(("said", "options"), CASES, ids=lambda said: ",".join(said))
def test_batches(given, rows, said, options):
    q, k, v = rows(2, 5, 4, 32), rows(2, 7, 2, 32), rows(2, 7, 2, 32)
    out, lse, nothing = flash_attn_func(*map(given, (q, k, v)), return_attn_probs=True, **said)
    assert type(out) is type(given(q)) and lse.shape == (2, 4, 5) and nothing is None
    for i in range(2):
        wanted, wanted_lse = exact.attention(q[i], k[i], v[i], **options)
        close(out[i], wanted)
        close(lse[i], wanted_lse.T, 1e-4)


STARTS, KEY_STARTS = np.array([0, 5, 6, 9, 14]), np.array([0, 5, 15, 24, 27])


@pytest.mark.parametrize(("said", "options"), CASES[1:4], ids=lambda said: ",".join(said))
def test_unequal_lengths(given, rows, said, options):
    q, k, v = rows(14, 4, 32), rows(27, 2, 32), rows(27, 2, 32)
    wanted, wanted_lse = exact.batch(q, k, v, STARTS, KEY_STARTS, **options)
    starts, key_starts = (given(x.astype(np.int32)) for x in (STARTS, KEY_STARTS))
    out, lse, _ = flash_attn_varlen_func(
        *map(given, (q, k, v)), starts, key_starts, 5, 10, return_attn_probs=True, **said
    )
    close(out, wanted)
    close(lse, wanted_lse.T, 1e-4)
    table = np.full((4, 4), -1, np.int32)
    pages = [given(np.full((13, 4, 2, 32), np.nan, np.float32)) for _ in "kv"]
    for i in range(4):
        count = -(-(KEY_STARTS[i + 1] - KEY_STARTS[i]) // 4)
        table[i, :count] = 12 - 3 * i - np.arange(count)
        for j in range(KEY_STARTS[i], KEY_STARTS[i + 1]):
            page, at = divmod(j - KEY_STARTS[i], 4)
            for held, x in zip(pages, (k, v), strict=True):
                held[int(table[i, page]), int(at)] = given(x[j])
    out = flash_attn_varlen_func(
        given(q), *pages, STARTS, KEY_STARTS, 5, 10, block_table=given(table), **said
    )
    close(out, wanted)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("new", [0, 2, 3])
def test_caches(given, rows, paged, new):
    q = rows(3, 2, 4, 32)
    k_cache, v_cache = (rows(6, 4, 2, 32) if paged else rows(4, 12, 2, 32) for _ in "kv")
    lens = np.array([5, 8, 2], np.int32)
    table = np.array([[3, 1, 0], [5, 2, 4], [1, 3, 3]] if paged else [[2], [0], [3]], np.int32)
    if paged:
        table[2] = [1, 3, -1]  # sequences 0 and 2 must not share what is written
        table[0] = [0, 1 if new == 0 else 3, 4 if new else -1]
        if new:
            table = np.array([[0, 3, 1], [5, 2, 4], [1, -1, -1]], np.int32)
            lens = np.array([5, 8, 0], np.int32)
    k, v = rows(3, new, 2, 32), rows(3, new, 2, 32)
    expected = []
    for i in range(3):
        keys, values = (
            np.concatenate([c[table[i][table[i] >= 0]].reshape(-1, 2, 32)[: lens[i]], x[i]])
            for c, x in ((k_cache, k), (v_cache, v))
        )
        expected.append(exact.attention(q[i], keys, values, causal=True, left=4))
    caches = given(k_cache), given(v_cache)
    named = {"block_table": table} if paged else {"cache_batch_idx": table[:, 0]}
    if new:
        named |= {"k": given(k), "v": given(v)}
    out, lse = flash_attn_with_kvcache(
        given(q), *caches, cache_seqlens=given(lens), causal=True, window_size=(4, 0),
        return_softmax_lse=True, **named,
    )  # fmt: skip
    for i, (wanted, wanted_lse) in enumerate(expected):
        close(out[i], wanted)
        close(lse[i], wanted_lse.T, 1e-4)
    if new and not paged:
        close(caches[0][0, 8 : 8 + new], k[1], 0)
        close(caches[1][2, 5 : 5 + new], v[0], 0)


def test_left_padding_and_whole_rows(given, rows):
    q, k, v = rows(2, 1, 4, 32), rows(2, 12, 2, 32), rows(2, 12, 2, 32)
    out = flash_attn_with_kvcache(given(q), given(k), given(v), cache_leftpad=[3, 0])
    for i, first in enumerate((3, 0)):
        close(out[i], exact.attention(q[i], k[i], v[i], first=first)[0])


def test_refusals(rows):
    q = rows(1, 2, 4, 32)
    for call, text in (
        (lambda: flash_attn_func(q, q, q, 0.1), "dropout_p: 0.1, legal: 0.0"),
        (lambda: flash_attn_func(q, q, q, alibi_slopes=SLOPES), "alibi_slopes: given with keys"),
        (
            lambda: flash_attn_func(q, q, q, causal=True, alibi_slopes=[SLOPES]),
            "alibi_slopes: 2 dimensions, legal: 1",
        ),
        (lambda: flash_attn_func(q[0], q, q), "q: shape .*, legal: an array of 4 dimensions"),
        (
            lambda: flash_attn_varlen_func(q[0], q[0], q[0], [0, 2], [0, 2], 2, 1),
            "max_seqlen_k: 1, legal: at least 2",
        ),
        (
            lambda: flash_attn_varlen_func(q[0], q[0], q[0], [0, 2], [1, 2], 2, 1),
            r"cu_seqlens_k: \[1, 2\], legal: ascending numbers from 0",
        ),
        (lambda: flash_attn_with_kvcache(q, q, q, rotary_cos=q), "rotary_cos: 'ndarray'"),
        (lambda: flash_attn_with_kvcache(q, q, q, num_splits=2), "num_splits: 2, legal: 0"),
        (lambda: flash_attn_with_kvcache(q, q, q, cache_seqlens=3), "cache_seqlens: 3, legal: 0"),
        (lambda: flash_attn_with_kvcache(q, q, q, q, q), "cache_seqlens: None, legal with k"),
        (
            lambda: flash_attn_with_kvcache(q, q, q, cache_batch_idx=[1]),
            "cache_batch_idx: 1, legal: 0 ... 0",
        ),
    ):
        with pytest.raises((clattn.InvalidArgument, clattn.Unsupported), match=text):
            call()


def test_gradients_are_refused(rows):
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(rows(1, 2, 4, 32)).requires_grad_()
    with pytest.raises(clattn.Unsupported, match="q: requires a gradient"):
        flash_attn_func(q, q, q)
