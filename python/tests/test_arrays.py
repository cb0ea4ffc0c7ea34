"""Arrays of the host: in place on CPUs, of any strides, through DLPack too."""

import clattn
import numpy as np
import pytest
from clattn import checks


class DLPackOnly:
    """An array of a library that is not NumPy."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def address(array):
    return array.__array_interface__["data"][0]


def on_cpu(context):
    assert context.capabilities.kind == "cpu", "these tests want a CPU (PoCL)"


def paged(layer):
    """The layer's cache in an array of vLLM's CPU layout, and its keys and values as views."""
    blocks, config = layer.batch.num_blocks, layer.config
    array = np.zeros((blocks, config.num_kv_heads, 2, config.block_size, config.head_size), "f4")
    key, value = array[:, :, 0], array[:, :, 1]
    return array, key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)


@pytest.fixture
def layer(context, queue):
    return checks.Layer(context, queue, checks.Case("", checks.MIXED))


def given(layer):
    tokens = int(layer.batch.query_start_loc[-1])
    return layer.rows(tokens, 8, 1.0), layer.rows(tokens, 2, 1.0), layer.rows(tokens, 2, 1.0)


def attend(layer, cache, query, key, value, output):
    metadata = layer.builder.build(layer.queue, layer.batch.metadata())
    layer.impl.write_kv_cache(layer.queue, key, value, cache, metadata)
    layer.impl.forward(layer.queue, query, output, cache, metadata)
    return output


def test_share_copies_nothing(context, queue):
    on_cpu(context)
    array = np.arange(4096, dtype=np.float32)
    buffer = context.share(array)
    with queue.map(buffer) as seen:
        assert address(seen) == address(array)
        seen.view(np.float32)[7] = -1
    assert array[7] == -1
    queue.write(buffer, np.full(4, 5, np.float32), offset_bytes=16)
    assert list(array[3:9]) == [3, 5, 5, 5, 5, 8]


def test_share_keeps_the_array(context, queue):
    buffer = context.share(np.full(1 << 20, 3, np.uint8))  # nobody else has it
    back = np.empty(1 << 20, np.uint8)
    queue.read(buffer, back)
    assert (back == 3).all()


@pytest.mark.parametrize("wrap", [lambda array: array, DLPackOnly], ids=["numpy", "dlpack"])
def test_cache_in_an_array(context, queue, layer, wrap):
    on_cpu(context)
    array, key_pages, value_pages = paged(layer)
    cache = clattn.KVCache.share(context, wrap(key_pages), wrap(value_pages), "f32")
    assert cache.buffer.size_bytes == array.nbytes
    query, key, value = given(layer)
    output = np.full_like(query, np.nan)
    attend(layer, cache, *map(wrap, (query, key, value, output)))
    start = 0
    for row, (count, length) in enumerate(layer.batch.requests):
        slots = layer.batch.slots(row, np.arange(length - count, length))
        pages, offsets = slots // 16, slots % 16
        np.testing.assert_array_equal(key_pages[pages, offsets], key[start : start + count])
        np.testing.assert_array_equal(value_pages[pages, offsets], value[start : start + count])
        start += count
    assert np.isfinite(output).all()


def test_strides_of_single_heads_and_pages_do_not_matter(context):
    on_cpu(context)
    array = np.zeros((2, 3, 16, 8, 64), np.float32)
    key, value = array[0, :, :, :1], array[1, :, :, :1]
    value = np.lib.stride_tricks.as_strided(value, value.shape, (*value.strides[:2], 8, 4))
    cache = clattn.KVCache.share(context, key, value, "f32")
    assert (cache.num_kv_heads, cache.head_stride, cache.token_stride) == (1, 64, 512)
    one = np.lib.stride_tricks.as_strided(value[:1], (1, 16, 1, 64), (4, 2048, 8, 4))
    cache = clattn.KVCache.share(context, key[:1], one, "f32")
    assert (cache.num_blocks, cache.block_stride) == (1, 1024)


@pytest.mark.parametrize("wrap", [lambda array: array, DLPackOnly], ids=["numpy", "dlpack"])
def test_two_allocations_are_refused(context, wrap):
    key, value = (np.zeros((2, 16, 1, 64), np.float32) for _ in range(2))
    between = np.zeros(1 << 20, np.uint8)
    with pytest.raises(
        clattn.InvalidArgument, match="key, value: two allocations, legal: views of"
    ):
        clattn.KVCache.share(context, wrap(key), wrap(value), "f32")
    assert not between.any()
    with pytest.raises(clattn.InvalidArgument, match="key: list, legal: a writable array .num_blo"):
        clattn.KVCache.share(context, [1], value, "f32")


def test_lists_of_rows(context, queue, layer):
    query, key, value = given(layer)
    want = attend(layer, layer.cache, query, key, value, np.empty_like(query))
    lists = (x.tolist() for x in (query, key, value))
    np.testing.assert_array_equal(attend(layer, layer.cache, *lists, np.empty_like(query)), want)


def test_rows_of_a_projection(context, queue, layer):
    query, key, value = given(layer)
    cache = layer.cache
    want = attend(layer, cache, query, key, value, np.empty_like(query))
    tokens = len(query)
    qkv = np.concatenate([x.reshape(tokens, -1) for x in (query, key, value)], axis=1)
    qkv.setflags(write=False)
    wide = np.zeros((tokens, 1024), np.float32)
    parts = qkv[:, :512], qkv[:, 512:640].reshape(tokens, 2, 64), qkv[:, 640:]
    got = attend(layer, cache, *parts, wide[:, 128:640])
    np.testing.assert_array_equal(got, want.reshape(tokens, -1))
    assert not wide[:, :128].any() and not wide[:, 640:].any()


def test_buffers_return_before_the_work_is_done(context, queue, layer):
    arrays = given(layer)
    want = attend(layer, layer.cache, *arrays, np.empty_like(arrays[0]))
    metadata = layer.builder.build(queue, layer.batch.metadata())
    query, key, value, output = (context.allocate(x.nbytes) for x in (*arrays, arrays[0]))
    for buffer, array in zip((query, key, value), arrays, strict=True):
        queue.write(buffer, array)
    layer.impl.write_kv_cache(queue, key, clattn.Tensor(value), layer.cache, metadata)
    event = layer.impl.forward(queue, query, output, layer.cache, metadata)
    event.wait()
    got = np.empty_like(want)
    queue.read(output, got)
    np.testing.assert_array_equal(got, want)


def test_read_only_output_is_refused(context, queue, layer):
    query, key, value = given(layer)
    output = np.empty_like(query)
    output.setflags(write=False)
    with pytest.raises((TypeError, RuntimeError)):
        attend(layer, layer.cache, query, key, value, output)


def test_pytorch(context, queue, layer):
    torch = pytest.importorskip("torch", reason="pip install torch (the CPU build) to run this")
    on_cpu(context)
    query, key, value = given(layer)
    want = attend(layer, layer.cache, query, key, value, np.empty_like(query))
    pages = torch.zeros(layer.batch.num_blocks, 2, 32, 64)
    halves = (half.transpose(1, 2) for half in pages.chunk(2, dim=2))
    cache = clattn.KVCache.share(context, *halves, torch.float32)
    tensors = [torch.from_numpy(x) for x in (query, key, value, np.zeros_like(query))]
    first = attend(layer, layer.cache, *tensors)
    assert first.data_ptr() == tensors[3].data_ptr()
    np.testing.assert_array_equal(first.numpy(), want)
    attend(layer, cache, *tensors)
    assert pages.abs().sum() > 0
    half = torch.zeros(4, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(clattn.InvalidArgument, match="query: element type is bfloat16, legal: f32"):
        attend(layer, layer.cache, half, *tensors[1:])
