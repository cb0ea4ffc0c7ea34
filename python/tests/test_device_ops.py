"""Caches of every kind, merges with options, and lengths that only the device knows."""

import clattn
import numpy as np
import pytest
from clattn import checks, reference


def read(queue, buffer, dtype):
    values = np.empty(buffer.size_bytes // np.dtype(dtype).itemsize, dtype)
    queue.read(buffer, values)
    return values


@pytest.fixture
def layer(context, queue):
    return checks.Layer(context, queue, checks.Case("", [(1, 20), (1, 5)]))


def test_append_by_page_lists(context, queue, layer, random):
    key, value = random.standard_normal((2, 3, 2, 64), np.float32)
    batch = layer.batch
    lists = clattn.build_paged_kv_metadata(batch.metadata(), 16)
    clattn.append_paged_kv_cache(
        context, queue, key, value, "f32", layer.cache,
        batch_indices=[0, -1, 1], positions=[17, 0, 4], indices=lists.indices, indptr=lists.indptr,
    )  # fmt: skip
    pages = checks.stored_pages(queue, layer.cache)
    for row, request, position in ((0, 0, 17), (2, 1, 4)):
        slot = batch.slots(request, np.array([position]))[0]
        for stored, given in zip(pages, (key, value), strict=True):
            np.testing.assert_array_equal(stored[slot // 16, slot % 16], given[row])


def test_writes_take_buffers_of_slots(context, queue, layer, random):
    key = random.standard_normal((2, 2, 64), np.float32)
    slots = context.allocate(16)
    queue.write(slots, np.array([3, 18], np.int64))
    clattn.reshape_and_cache_flash(context, queue, key, key, layer.cache, slots, "f32").wait()
    stored = checks.stored_pages(queue, layer.cache)[0]
    np.testing.assert_array_equal(stored[[0, 1], [3, 2]], key)
    clattn.reshape_and_cache_flash(
        context, queue, key.tolist(), key, layer.cache, [5, 6], "f32", num_tokens=1
    )
    stored = checks.stored_pages(queue, layer.cache)[0]
    np.testing.assert_array_equal(stored[0, 5], key[0])
    assert np.isnan(stored[0, 6]).all()
    with pytest.raises(clattn.InvalidArgument, match="slot_mapping: float64"):
        clattn.reshape_and_cache_flash(context, queue, key, key, layer.cache, [0.5], "f32")


def test_packed_cache_decodes(context, queue, random):
    config = clattn.AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, dtype="f32")
    spec = clattn.KVCacheSpec(num_kv_heads=2, head_size=32, dtype="f32")
    shape = clattn.get_packed_kv_cache_shape(3, 16, 2, 32)
    assert list(shape) == [2, 3, 16 * 2 * 32]
    raw = context.allocate(4 * int(np.prod(shape)))
    cache = clattn.split_kv_cache(raw, spec)
    assert (cache.num_blocks, cache.block_size, cache.dtype) == (3, 16, "f32")
    key, value = random.standard_normal((2, 20, 2, 32), np.float32)
    slots = [32 + i if i < 16 else i - 16 for i in range(20)]
    clattn.reshape_and_cache(context, queue, key, value, cache, slots, "f32")
    stored = read(queue, raw, np.float32)
    assert stored[cache.key_at(2, 3, 1, 7)] == key[3, 1, 7]
    assert stored[cache.value_at(0, 1, 0, 5)] == value[17, 0, 5]
    assert clattn.validate_paged_attention(config, context) == []
    impl = clattn.make_paged_attention(context, config)
    builder = clattn.make_paged_attention_builder(context, config)
    batch = clattn.CommonAttentionMetadata([0, 1], [20], [[2, 0]])
    query = random.standard_normal((1, 4, 32), np.float32)
    output, lse = np.empty_like(query), np.empty((1, 4), np.float32)
    launches = []
    metadata = builder.build(queue, batch)
    impl.forward(queue, query, output, cache, metadata, lse=lse, launches=launches)
    options = reference.Options(scale=32**-0.5)
    want, want_lse = reference.attention(query, key.astype(float), value.astype(float), options)
    np.testing.assert_allclose(output, want, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)
    assert launches and launches[0].kernel in [kernel.name for kernel in impl.kernels()]
    pair = clattn.PackedKVCache(
        cache.key, raw, "f32", num_blocks=3, block_size=16, num_kv_heads=2, head_size=32
    )
    clattn.copy_blocks(context, queue, [pair], [[2, 1]])
    assert read(queue, raw, np.float32)[pair.key_at(1, 3, 1, 7)] == key[3, 1, 7]
    image = np.zeros(2 * 16 * 2 * 32, np.float32)  # a page
    clattn.swap_packed_blocks(context, queue, cache, image, [[2, 0]])
    assert image.any()
    clattn.swap_packed_blocks(context, queue, image, cache, [[0, 1]])
    stored = read(queue, raw, np.float32)
    copies = [stored[cache.value_at(page, 3, 1, 7)] for page in (1, 2)]
    assert copies == [value[3, 1, 7]] * 2
    assert clattn.use_paged_attention_v1(100, 1, 4) and not clattn.use_paged_attention_v1(999, 1, 4)


@pytest.mark.parametrize("cache_dtype", ["f32", "fp8_e4m3"])
def test_latent_attention(context, queue, random, cache_dtype):
    rank, rope, heads = 64, 16, 4
    config = clattn.MLAConfig(
        num_heads=heads, kv_lora_rank=rank, rope_dim=rope, block_size=16, dtype="f32",
        kv_cache_dtype=cache_dtype, scale=0.1,
    )  # fmt: skip
    assert clattn.validate_mla_configuration(config, context) == []
    assert config.cache_dtype == cache_dtype
    size = clattn.element_size_bytes(cache_dtype)
    buffer = context.allocate(3 * 16 * (rank + rope) * size)
    queue.fill(buffer)
    cache = clattn.MLACache(
        buffer, cache_dtype, num_blocks=3, block_size=16, kv_lora_rank=rank, rope_dim=rope
    )
    if cache_dtype != "f32":
        cache.set_scale(context, [0.02])
    kv_c = random.standard_normal((20, rank), np.float32)
    k_pe = random.standard_normal((20, rope), np.float32)
    slots = [32 + i if i < 16 else i - 16 for i in range(20)]
    clattn.concat_and_cache_mla(context, queue, kv_c, k_pe, cache, slots, "f32")
    gathered = np.empty((20, rank + rope), np.float32)
    clattn.gather_and_maybe_dequant_cache(
        context, queue, cache, gathered, "f32", cu_seq_lens=[0, 20], block_table=[[2, 0]]
    )
    rows = np.concatenate([kv_c, k_pe], axis=1)
    near = {"atol": 0, "rtol": 0} if cache_dtype == "f32" else {"atol": 1e-4, "rtol": 2.0**-4}
    np.testing.assert_allclose(gathered, rows, **near)
    impl = clattn.make_mla_impl(context, config)
    metadata = clattn.make_mla_builder(context, config).build(
        queue, clattn.CommonAttentionMetadata([0, 3], [20], [[2, 0]])
    )
    query = random.standard_normal((3, heads, rank + rope), np.float32)
    output, lse = np.empty((3, heads, rank), np.float32), np.empty((3, heads), np.float32)
    impl.forward(queue, query, output, cache, metadata, lse=lse)
    keys = gathered[:, None].astype(float)
    options = reference.Options(scale=0.1)
    want, want_lse = reference.attention(query, keys, keys[:, :, :rank], options)
    np.testing.assert_allclose(output, want, atol=3e-5)
    np.testing.assert_allclose(lse, want_lse, atol=3e-5)
    listing = clattn.MLAConfig(
        num_heads=heads, kv_lora_rank=rank, rope_dim=rope, block_size=16, dtype="f32",
        kv_cache_dtype=cache_dtype, scale=0.1, use_trees=True, use_first_keys=True,
    )  # fmt: skip
    batch = clattn.CommonAttentionMetadata(
        [0, 3], [20], [[2, 0]], first_keys=[4], tree_start_loc=[0, 3], tree_parents=[-1, 0, 0]
    )
    with pytest.raises(clattn.InvalidArgument, match="legal without use_first_keys: none"):
        clattn.make_mla_builder(context, config).build(queue, batch)
    metadata = clattn.make_mla_builder(context, listing).build(queue, batch)
    clattn.make_mla_impl(context, listing).forward(queue, query, output, cache, metadata, lse=lse)
    said = reference.Request(first_key=4, parents=[-1, 0, 0])
    want, want_lse = reference.attention(query, keys, keys[:, :, :rank], options, said)
    np.testing.assert_allclose(output, want, atol=3e-5)
    np.testing.assert_allclose(lse, want_lse, atol=3e-5)
    clattn.copy_blocks_mla(context, queue, [cache], [[2, 1]])
    again = np.empty_like(gathered[:16])
    clattn.gather_and_maybe_dequant_cache(
        context, queue, cache, again, "f32", cu_seq_lens=[0, 16], block_table=[[1]]
    )
    np.testing.assert_array_equal(again, gathered[:16])


def test_append_to_a_latent_cache(context, queue, random):
    buffer = context.allocate(2 * 16 * 80 * 4)
    queue.fill(buffer)
    cache = clattn.MLACache(
        buffer, "f32", num_blocks=2, block_size=16, kv_lora_rank=64, rope_dim=16
    )
    rows = random.standard_normal((2, 80), np.float32)
    clattn.append_paged_mla_kv_cache(
        context, queue, rows[:, :64], rows[:, 64:], "f32", cache,
        batch_indices=[0, 0], positions=[16, 1], indices=[1, 0], indptr=[0, 2],
    )  # fmt: skip
    stored = read(queue, buffer, np.float32).reshape(32, 80)
    np.testing.assert_array_equal(stored[[0, 17]], rows)
    assert not stored[1:17].any()


def test_latent_cache_of_a_layer(context, queue):
    config = clattn.AttentionConfig(
        num_heads=4, num_kv_heads=1, head_size=80, rope_dim=16, use_mla=True, dtype="f32"
    )
    backend = clattn.get_attn_backend(config, context)
    assert backend.is_mla and backend.name == clattn.MLA_BACKEND_NAME
    cache = clattn.make_mla_cache(
        clattn.make_kv_cache(context, queue, backend, config, 2), rope_dim=16
    )
    assert (cache.kv_lora_rank, cache.rope_dim, cache.num_blocks) == (64, 16, 2)


def states(random, heads_first=False):
    outputs = random.standard_normal((2, 5, 4, 16))
    lses = random.standard_normal((2, 5, 4))
    weights = np.exp(lses)
    merged = (outputs * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    given = [outputs[0], lses[0], outputs[1], lses[1]]
    if heads_first:
        given[1], given[3] = given[1].T, given[3].T
    given = [np.ascontiguousarray(each, np.float32) for each in given]
    return given, merged, np.log(weights.sum(0))


SHAPE = {"num_heads": 4, "head_size": 16, "num_tokens": 5, "dtype": "f32"}


def test_merge_in_base_2_with_heads_first(context, queue, random):
    given, want, want_lse = states(random, heads_first=True)
    for index in (1, 3):
        given[index] = (given[index] / np.log(2)).astype(np.float32)
    merged, lse = np.empty((5, 4, 16), np.float32), np.empty((4, 5), np.float32)
    clattn.merge_attn_states(
        context, queue, merged, lse, *given, **SHAPE, lse_base=2, lse_heads_first=True
    )
    np.testing.assert_allclose(merged, want, atol=2e-6)
    np.testing.assert_allclose(lse.T * np.log(2), want_lse, atol=2e-6)
    with pytest.raises(clattn.InvalidArgument, match="lse_base: 10, legal: 0"):
        clattn.merge_attn_states(context, queue, merged, lse, *given, **SHAPE, lse_base=10)


def test_merge_of_tokens_without_prefix(context, queue, random):
    given, want, _ = states(random)
    merged = np.empty((5, 4, 16), np.float32)
    clattn.merge_attn_states(
        context, queue, merged, None, *given, **SHAPE, prefill_tokens_with_context=2
    )
    np.testing.assert_allclose(merged[:2], want[:2], atol=2e-6)
    np.testing.assert_array_equal(merged[2:], given[2][2:])


def test_merge_to_fp8(context, queue, random):
    given, want, _ = states(random)
    stored = np.zeros((5, 4, 16), np.uint8)
    clattn.merge_attn_states(
        context, queue, stored, None, *given, **SHAPE, output_dtype="fp8_e4m3", output_scale=0.25
    )
    got = 0.25 * reference.decode(stored, "fp8_e4m3")
    np.testing.assert_allclose(got, want, rtol=2.0**-4, atol=0.25 * 2.0**-9)
    assert clattn.cache_op_work_group_size(context) >= 1


def test_swap_through_pinned_memory(context, queue, layer, random):
    size = layer.cache.buffer.size_bytes
    queue.write(layer.cache.buffer, random.standard_normal(size // 4, np.float32))
    before = checks.stored_pages(queue, layer.cache)
    pinned = clattn.PinnedMemory(context, size)
    assert pinned.array.nbytes == size
    clattn.swap_blocks(context, queue, layer.cache, pinned, [[0, 1]]).wait()
    clattn.swap_blocks(context, queue, pinned, layer.cache, [[1, 3]]).wait()
    for old, new in zip(before, checks.stored_pages(queue, layer.cache), strict=True):
        np.testing.assert_array_equal(new[3], old[0])
    with pytest.raises(clattn.InvalidArgument, match="source: list, legal: a cache, PinnedMemory"):
        clattn.swap_blocks(context, queue, [1], layer.cache, [[0, 0]])
    with pytest.raises(clattn.InvalidArgument, match="pairs: 3 columns, legal: 2"):
        clattn.swap_blocks(context, queue, pinned, layer.cache, [[0, 0, 0]])


def test_lengths_from_the_device(context, queue, layer):
    options = clattn.BuilderOptions(device_seq_lens=True)
    builder = layer.backend.make_builder(context, layer.config, options)
    builder.warm_up(queue)
    batch = clattn.CommonAttentionMetadata([0, 1, 2], [32, 16], layer.batch.block_table)
    metadata = builder.build(queue, batch)
    errors = clattn.DeviceErrors(context, queue)
    clattn.update_seq_lens(queue, metadata, [20, 5], errors)
    errors.check(queue)
    key, value = layer.rows(20, 2, 1.0), layer.rows(20, 2, 1.0)
    for request, length in ((0, 20), (1, 5)):
        slots = layer.batch.slots(request, np.arange(length))
        clattn.reshape_and_cache_flash(
            context, queue, key[:length], value[:length], layer.cache, slots, "f32"
        )
    query = layer.rows(2, 8, 1.0)
    output = np.empty_like(query)
    layer.impl.forward(queue, query, output, layer.cache, metadata)
    options = reference.Options(scale=64**-0.5)
    for row, length in ((0, 20), (1, 5)):
        keys, values = key[:length].astype(float), value[:length].astype(float)
        want, _ = reference.attention(query[row : row + 1], keys, values, options)
        np.testing.assert_allclose(output[row : row + 1], want, atol=2e-5)
    clattn.update_seq_lens(queue, metadata, [33, 5], errors)
    with pytest.raises(clattn.InvalidArgument, match="0"):
        errors.check(queue)


def test_query_lengths_from_the_device(context, queue, layer):
    assert layer.backend.supports_device_cpu_query_lens_mismatch
    options = clattn.BuilderOptions(
        device_seq_lens=True, device_query_lens=True, decode_threshold=3
    )
    builder = layer.backend.make_builder(context, layer.config, options)
    batch = clattn.CommonAttentionMetadata([0, 2, 3], [32, 16], layer.batch.block_table)
    metadata = builder.build(queue, batch)
    errors = clattn.DeviceErrors(context, queue)
    clattn.update_query_lens(queue, metadata, [0, 0, 2], [20, 6], errors)
    errors.check(queue)
    key, value = layer.rows(6, 2, 1.0), layer.rows(6, 2, 1.0)
    slots = layer.batch.slots(1, np.arange(6))
    clattn.reshape_and_cache_flash(context, queue, key, value, layer.cache, slots, "f32")
    query = layer.rows(3, 8, 1.0)
    output = np.full_like(query, 9)
    layer.impl.forward(queue, query, output, layer.cache, metadata)
    options = reference.Options(scale=64**-0.5)
    want, _ = reference.attention(query[:2], key.astype(float), value.astype(float), options)
    np.testing.assert_allclose(output[:2], want, atol=2e-5)
    np.testing.assert_array_equal(output[2], np.full_like(query[2], 9))
    clattn.update_query_lens(queue, metadata, [0, 0, 4], [20, 6], errors)
    with pytest.raises(clattn.InvalidArgument, match="update_query_lens: request 1"):
        errors.check(queue)


def test_lists_from_the_device(context, queue, layer):
    layer.config.use_directions = layer.config.use_trees = True
    impl = layer.backend.make_impl(context, layer.config)
    key, value = layer.rows(9, 2, 1.0), layer.rows(9, 2, 1.0)
    slots = layer.batch.slots(0, np.arange(9))
    clattn.reshape_and_cache_flash(context, queue, key, value, layer.cache, slots, "f32")
    query = layer.rows(3, 8, 1.0)
    errors = clattn.DeviceErrors(context, queue)
    table = layer.batch.block_table[:1]

    def rows(options, lists, **batch):
        builder = layer.backend.make_builder(context, layer.config, options)
        step = clattn.CommonAttentionMetadata([0, 3], [9], table, **batch)
        metadata = builder.build(queue, step)
        if lists:
            clattn.update_lists(queue, metadata, errors, **lists)
        output = np.empty_like(query)
        impl.forward(queue, query, output, layer.cache, metadata)
        return output

    plain, by_direction = clattn.BuilderOptions(), clattn.BuilderOptions(device_directions=True)
    for direction in (0, 1, 2):
        got = rows(by_direction, {"direction": [direction]})
        np.testing.assert_allclose(got, rows(plain, {}, direction=[direction]), atol=2e-5)
    errors.check(queue)
    by_trees = clattn.BuilderOptions(device_trees=True)
    lists = {"tree_sizes": [3], "tree_bits": [1, 3, 5], "tree_bits_stride": 1}
    got = rows(by_trees, lists, tree_start_loc=[0, 4])
    want = rows(plain, {}, tree_start_loc=[0, 3], tree_parents=[-1, 0, 0])
    np.testing.assert_allclose(got, want, atol=2e-5)
    errors.check(queue)
    with pytest.raises(clattn.InvalidArgument, match="tree_sizes is missing"):
        rows(by_trees, {"direction": None}, tree_start_loc=[0, 4])
    rows(by_direction, {"direction": [3]})
    with pytest.raises(clattn.InvalidArgument, match="request 0 was left out: its direction"):
        errors.check(queue)


def test_advance_steps(context, queue):
    given = {
        "input_tokens": np.array([1, 2, 3], np.int64),
        "input_positions": np.array([4, 15, 9], np.int64),
        "seq_lens": np.array([5, 16, 10], np.int32),
        "slot_mapping": np.array([4, 15, 0], np.int64),
    }
    more = {
        "num_seqs": 3, "num_queries": 2, "block_size": 16, "num_blocks": 8,
        "sampled_token_ids": [70, 80], "block_tables": [[6, 0], [3, 5], [0, 0]],
    }  # fmt: skip
    errors = clattn.DeviceErrors(context, queue)
    clattn.advance_step_flashattn(context, queue, errors, **given, **more)
    errors.check(queue)
    assert given["input_tokens"].tolist() == [70, 80, 0]
    assert given["input_positions"].tolist() == [5, 16, 0]
    assert given["seq_lens"].tolist()[:2] == [6, 17]
    assert given["slot_mapping"].tolist() == [6 * 16 + 5, 5 * 16, -1]
    pages = {
        "paged_kv_indices": np.zeros(8, np.int32),
        "paged_kv_indptr": np.zeros(4, np.int32),
        "paged_kv_last_page_len": np.zeros(3, np.int32),
        "block_table_bound": np.zeros(3, np.int32),
    }
    clattn.advance_step_flashinfer(context, queue, errors, **given, **more, **pages)
    assert pages["paged_kv_indptr"].tolist() == [0, 1, 3, 3]
    assert pages["paged_kv_indices"].tolist()[:3] == [6, 3, 5]
    assert pages["paged_kv_last_page_len"].tolist()[:2] == [7, 2]
    with pytest.raises(clattn.InvalidArgument, match="seq_lens: list, legal: a writable array of"):
        clattn.advance_step_flashattn(context, queue, errors, **(given | {"seq_lens": [1]}), **more)


def test_queues_copy_without_waiting(context, queue):
    buffer, back = context.allocate(64), np.empty(16, np.int32)
    queue.fill(buffer, 7)
    queue.write_async(buffer, np.arange(4, dtype=np.int32), 16).wait()
    queue.read_async(buffer, back).wait()
    assert back.tolist() == [7] * 4 + [0, 1, 2, 3] + [7] * 8
    assert buffer and queue.int_ptr and context.int_ptr
