"""Pages copied, swapped and written; partial results joined."""

import clattn
import numpy as np
import pytest
from clattn import checks, reference


@pytest.fixture
def cache(context, queue, random):
    layer = checks.Layer(context, queue, checks.Case("", [(1, 100)]))
    size = layer.cache.buffer.size_bytes // 4
    queue.write(layer.cache.buffer, random.standard_normal(size, np.float32))
    return layer.cache


def test_copy_blocks(context, queue, cache):
    before = checks.stored_pages(queue, cache)
    clattn.copy_blocks(context, queue, [cache], np.array([[0, 3], [1, 2]])).wait()
    for old, new in zip(before, checks.stored_pages(queue, cache), strict=True):
        np.testing.assert_array_equal(new[[3, 2]], old[[0, 1]])
        np.testing.assert_array_equal(new[[0, 1, 4]], old[[0, 1, 4]])
    with pytest.raises(clattn.InvalidArgument, match="99"):
        clattn.copy_blocks(context, queue, [cache], np.array([[0, 99]]))


@pytest.mark.parametrize("on_device", [False, True])
def test_move_tokens(context, queue, cache, on_device):
    before = checks.stored_pages(queue, cache)
    # 20 goes where 18 was, after 18 has gone to 17.
    moves = [np.array([18, 20], np.int64), np.array([17, 18], np.int64), np.array([0, 2], np.int32)]
    if on_device:
        buffers = [context.allocate(array.nbytes) for array in moves]
        for buffer, array in zip(buffers, moves, strict=True):
            queue.write(buffer, array)
        moves = buffers
    clattn.move_tokens(context, queue, [cache], *moves).wait()
    for old, new in zip(before, checks.stored_pages(queue, cache), strict=True):
        np.testing.assert_array_equal(new[1, [1, 2]], old[1, [2, 4]])
        changed = np.argwhere((old != new).any(axis=(2, 3)))
        assert changed.tolist() == [[1, 1], [1, 2]]
    with pytest.raises(clattn.InvalidArgument, match=r"src_slots\[0\] is -1"):
        clattn.move_tokens(context, queue, [cache], [-1], [0], [0, 1])


def test_swap_blocks_through_the_host(context, queue, cache):
    before = checks.stored_pages(queue, cache)
    image = np.zeros(cache.buffer.size_bytes, np.uint8)
    clattn.swap_blocks(context, queue, cache, image, np.array([[0, 1], [1, 0]]))
    clattn.swap_blocks(context, queue, image, cache, np.array([[1, 4], [0, 5]]))
    for old, new in zip(before, checks.stored_pages(queue, cache), strict=True):
        np.testing.assert_array_equal(new[[4, 5]], old[[0, 1]])


def test_slots_below_zero_store_nothing(context, queue, cache, random):
    before = checks.stored_pages(queue, cache)
    rows = random.standard_normal((2, 3, 2, 64), np.float32)
    clattn.reshape_and_cache_flash(
        context, queue, rows[0], rows[1], cache, np.array([17, -1, 2]), "f32"
    )
    after = checks.stored_pages(queue, cache)
    for old, new, given in zip(before, after, rows, strict=True):
        np.testing.assert_array_equal(new[1, 1], given[0])
        np.testing.assert_array_equal(new[0, 2], given[2])
        changed = np.argwhere((old != new).any(axis=(2, 3)))
        assert changed.tolist() == [[0, 2], [1, 1]]


def test_merge_attn_states(context, queue, random):
    query, key, value = random.standard_normal((3, 12, 4, 32))
    options = reference.Options(scale=0.2, causal=False)
    want, want_lse = reference.attention(query[:5], key, value, options)
    parts = []
    for rows in (slice(0, 7), slice(7, 12)):
        output, lse = reference.attention(query[:5], key[rows], value[rows], options)
        parts += [output.astype(np.float32), lse.astype(np.float32)]
    merged, lse = np.empty((5, 4, 32), np.float32), np.empty((5, 4), np.float32)
    clattn.merge_attn_states(
        context, queue, merged, lse, *parts, num_heads=4, head_size=32, num_tokens=5, dtype="f32"
    )
    np.testing.assert_allclose(merged, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
