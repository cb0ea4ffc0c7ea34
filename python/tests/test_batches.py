"""Arithmetic on batches, against plain Python."""

import clattn
import numpy as np
import pytest

META = clattn.CommonAttentionMetadata


def batch(query_lens, seq_lens, columns=4, **more):
    starts = np.cumsum([0, *query_lens]).tolist()
    table = np.arange(len(seq_lens) * columns).reshape(-1, columns)[::-1].tolist()
    return META(starts, seq_lens, table, **more)


def lists(*arrays):
    return [array.tolist() for array in arrays]


def test_lists_are_taken_and_shown():
    made = batch([1, 3], [9, 3], num_computed_tokens=[8, 0], graph_pad_size=4, causal=True)
    assert lists(made.query_start_loc, made.seq_lens) == [[0, 1, 4], [9, 3]]
    assert made.block_table.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert (made.num_reqs, made.num_actual_tokens, made.graph_pad_size) == (2, 4, 4)
    assert made.num_computed_tokens.tolist() == [8, 0] and made.slot_mapping.size == 0
    assert made.is_causal() and not META([0, 1], [1]).is_causal("encoder")
    clattn.validate_batch(made, 4, 8)
    with pytest.raises(clattn.InvalidArgument, match="block_table"):
        clattn.validate_batch(made, 4, 6)


def test_rows_of_padding_and_without_them():
    made = batch([1, 3, 0], [9, 3, 0], num_actual_tokens=16, first_keys=[2, 0, 0])
    assert made.num_actual_tokens == 16 and made.naive_query_lens().tolist() == [1, 3, 0]
    clattn.validate_batch(made, 4, 12)
    two = made.unpadded(4, 2)
    del made
    assert (two.num_reqs, two.num_actual_tokens) == (2, 4)
    assert lists(two.query_start_loc, two.first_keys) == [[0, 1, 4], [2, 0]]
    assert two.block_table.tolist() == [[8, 9, 10, 11], [4, 5, 6, 7]]
    with pytest.raises(clattn.InvalidArgument, match="num_requests is 3, legal: 0 … 2"):
        two.unpadded(4, 3)


def test_what_is_said_of_requests_is_taken_and_shown():
    said = {
        "direction": [2, 1],
        "span_start_loc": [0, 0, 2],
        "spans": [(0, 2), (2, 3)],
        "first_keys": np.array([4, 0]),
        "keep_keys": [5, 0],
    }
    made = batch([1, 3], [9, 3], **said)
    assert made.direction.tolist() == [2, 1] and made.spans.tolist() == [[0, 2], [2, 3]]
    assert lists(made.span_start_loc, made.first_keys) == [[0, 0, 2], [4, 0]]
    assert made.keep_keys.tolist() == [5, 0]
    plain = batch([1, 3], [9, 3], spans=[], span_start_loc=[0, 0, 0])
    assert plain.direction.size == plain.spans.size == plain.first_keys.size == 0
    assert plain.keep_keys.size == 0
    assert made.causal is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"direction": [256, 0]}, "direction: 256, legal: 0 ... 255"),
        ({"direction": ["causal", "causal"]}, "direction: .*, legal: a list or array of integers"),
        ({"spans": [1, 2]}, "spans: int64 .2., legal: integers of 2 dimensions"),
        ({"spans": [(1, 2, 3)]}, "spans: rows of 3, legal: rows of 2, the first position and one"),
        ({"span_start_loc": [0.5]}, "span_start_loc: float64 .1., legal"),
        ({"first_keys": [2**31, 0]}, "first_keys: 2147483648, legal"),
    ],
    ids=str,
)
def test_what_is_said_of_requests_is_refused_by_name(given, text):
    with pytest.raises(clattn.InvalidArgument, match=text):
        batch([1, 3], [9, 3], **given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([0, 1.5], "query_start_loc: float64 .2., legal: a list or array of integers"),
        ([0, 2**40], "query_start_loc: 1099511627776, legal: -2147483648 ... 2147483647"),
        ([[0, 1]], "query_start_loc: int64 .1, 2., legal: a list"),
        ("ab", "query_start_loc"),
        ([0, None], "query_start_loc: list, legal: a list or array of integers"),
        ([[0], [1, 2]], "query_start_loc: list, legal: an array"),
    ],
)
def test_errors_name_the_argument(given, text):
    with pytest.raises(clattn.InvalidArgument, match=text):
        META(given, [1])


def test_int32_arrays_are_not_copied():
    lengths = np.array([5, 6], np.int32)
    made = META([0, 1, 2], lengths)
    lengths[1] = 7
    assert made.seq_lens.tolist() == [5, 7]


def test_slots():
    made = batch([1, 3], [9, 3])
    assert clattn.compute_slot_mapping(made, 4).tolist() == [6 * 4, 0, 1, 2]
    padded = clattn.compute_slot_mapping(made, 4, num_slots=6)
    assert padded.tolist() == [24, 0, 1, 2, clattn.PAD_SLOT_ID, -1]
    clattn.pad_slot_mapping(padded, 2)
    assert padded.tolist() == [24, 0, -1, -1, -1, -1]
    with pytest.raises(clattn.InvalidArgument, match="slot_mapping: .*writable array of int64"):
        clattn.pad_slot_mapping([1, 2], 1)
    kernel = clattn.map_to_kernel_blocks([[3, -1], [0, 1]], 32, 16)
    assert kernel.tolist() == [[6, 7, -1, -1], [0, 1, 2, 3]]
    with pytest.raises(clattn.InvalidArgument, match="kernel_block_size"):
        clattn.map_to_kernel_blocks([[3]], 32, 12)


def test_page_lists():
    pages = clattn.build_paged_kv_metadata(batch([1, 3], [9, 3]), 4)
    assert lists(pages.indptr, pages.indices, pages.last_page_len) == [
        [0, 3, 4], [4, 5, 6, 0], [1, 3],
    ]  # fmt: skip
    assert clattn.get_seq_lens(pages.indptr, pages.last_page_len, 4).tolist() == [9, 3]
    found = clattn.get_batch_indices_positions([0, 1, 4], [9, 3], 6)
    assert lists(*found) == [[0, 1, 1, 1, -1, -1], [8, 0, 1, 2, 0, 0]]


def test_splits():
    mixed = batch([1, 1, 4, 2], [9, 3, 8, 2])
    split = clattn.split_decodes_and_prefills(mixed)
    assert (split.num_decodes, split.num_decode_tokens) == (2, 2)
    assert (split.num_prefills, split.num_prefill_tokens) == (2, 6)
    options = clattn.SplitOptions(
        decode_threshold=4, treat_short_extends_as_decodes=False, is_prefilling=[False, True] * 2
    )
    assert options.is_prefilling.tolist() == [0, 1, 0, 1] and options.decode_threshold == 4
    assert clattn.split_decodes_and_prefills(mixed, options).num_decodes == 1
    uniform = clattn.SplitOptions(decode_threshold=4, require_uniform=True)
    assert clattn.split_decodes_and_prefills(mixed, uniform).num_decodes == 2
    three = clattn.split_decodes_prefills_and_extends(mixed)
    assert (three.num_decodes, three.num_extends, three.num_prefills) == (2, 1, 1)
    assert (three.num_decode_tokens, three.num_extend_tokens, three.num_prefill_tokens) == (2, 4, 2)
    assert clattn.split_prefill_chunks([5, 5, 9], 10, 2) == [(2, 4), (4, 5)]


def test_reordering():
    moved, order = clattn.reorder_batch_to_split_decodes_and_prefills([5, 1, 1], 1)
    assert moved and sorted(order.tolist()) == [0, 1, 2] and order.tolist()[2] == 0
    moved, order, swaps = clattn.reorder_batch_to_split_decodes_and_prefills(
        [7, 1, 3], [0, 9, 4], [7, 9, 20], 4
    )
    rows = [0, 1, 2]
    for a, b in swaps:
        rows[a], rows[b] = rows[b], rows[a]
    assert moved and rows == order.tolist() == [1, 2, 0]
    assert clattn.reorder_batch_threshold(3) == 4
    assert clattn.reorder_batch_threshold(3, parallel_drafting=True) == 7


def test_slices_are_batches():
    whole = batch([1, 6, 1], [9, 6, 5])
    slices = clattn.create_ubatch_slices(whole, 4)
    assert [each.token_slice for each in slices] == [(0, 4), (4, 8)]
    assert [each.request_slice for each in slices] == [(0, 2), (1, 3)]
    first, second = ((part, part.metadata()) for part in clattn.split_attn_metadata(slices, whole))
    assert lists(first[1].query_start_loc, first[1].seq_lens) == [[0, 1, 4], [9, 3]]
    assert lists(second[1].query_start_loc, second[1].seq_lens) == [[0, 3, 4], [6, 5]]
    assert second[1].block_table.tolist() == whole.block_table[1:].tolist()
    assert second[0].slice.token_slice == (4, 8)
    again = clattn.make_metadata_with_slice(clattn.UBatchSlice((1, 3), (4, 8)), whole)
    del whole, slices
    assert again.metadata().seq_lens.tolist() == again.seq_lens.tolist() == [6, 5]
    assert clattn.slice_query_start_locs([0, 1, 7, 8], (1, 3)).tolist() == [0, 6, 7]


def test_batches_of_drafts():
    made = clattn.advance_batch(batch([1, 1], [7, 3]))
    assert made.metadata().seq_lens.tolist() == [8, 4]
    with pytest.raises(clattn.InvalidArgument):
        clattn.advance_batch(batch([2, 1], [7, 3]))
    turned = clattn.advance_batch(batch([2, 1], [7, 3]), turn_prefills_into_decodes=True)
    assert turned.query_start_loc.tolist() == [0, 1, 2]
    fast = clattn.make_kv_sharing_fast_prefill_common_attn_metadata(batch([3, 2], [9, 2]), [2, 4])
    assert fast.metadata().query_start_loc.tolist() == [0, 1, 2]


def test_virtual_batches():
    local = clattn.make_local_attention_virtual_batches(8, batch([5], [10]), 4)
    assert local.num_virtual == 2 and local.virtual_batch_to_request.tolist() == [0, 0]
    assert lists(local.query_start_loc, local.seq_lens) == [[0, 3, 5], [8, 2]]
    assert local.block_table.tolist() == [[0, 1], [2, 3]] and local.blocks_per_chunk == 2
    assert local.gather_block_table([[9, 8, 7, 6]]).tolist() == [[9, 8], [7, 6]]
    made = local.metadata([1, 2, 3, 4, 5])
    del local
    assert made.slot_mapping.tolist() == [1, 2, 3, 4, 5] and made.seq_lens.tolist() == [8, 2]


def test_context_parallel_lengths():
    assert clattn.get_dcp_local_seq_lens([5, 2], 2).tolist() == [[3, 2], [1, 1]]
    assert clattn.get_dcp_local_seq_lens([5, 2], 2, 1).tolist() == [2, 1]


def test_block_pool():
    pool = clattn.BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.publish([1, 2, 3, 4], blocks, cache_salt=7)
    assert pool.find_prefix([1, 2, 3, 9], 7) == blocks[:1] and pool.find_prefix([1, 2]) == []
    assert pool.is_published(blocks[0]) and pool.num_used == pool.peak_used == 2
    assert 0 < pool.content_of(blocks[0]) < pool.content_of(blocks[1])
    pool.share(np.array(blocks))
    assert pool.reference_count(blocks[1]) == 2
    pool.release(blocks)
    pool.release(blocks)
    assert (pool.num_free, pool.num_blocks, pool.block_size) == (4, 4, 2)
    with pytest.raises(clattn.OutOfBlocks, match="5"):
        pool.allocate(5)
    with pytest.raises(clattn.InvalidArgument, match="token_ids"):
        pool.find_prefix([0.5])
    assert clattn.hash_block(1, [2, 3]) != clattn.hash_block(2, [2, 3])


def test_tuning(context, tmp_path):
    row = clattn.TuningRow(device="cpu", role="decode", dtype="f16", variant="v__x", time_us=2.5)
    cost = clattn.CostRow(
        device="cpu", kernel="v*", costs=clattn.KernelCosts(task_us=3, read_gbs=1)
    )
    text = clattn.format_tuning([row], [cost])
    assert clattn.format_tuning_row(row) in text and clattn.format_cost_row(cost) in text
    read = clattn.parse_tuning(text + "nonsense\n")
    assert read.rows == [row] and read.costs[0].costs.task_us == 3 and len(read.problems) == 1
    assert row.cache_dtype is None and row.dtype == "f16"
    path = tmp_path / "rows.tsv"
    clattn.save_tuning(str(path), [row])
    assert clattn.parse_tuning(path.read_text()).rows == [row]
    assert clattn.page_class(16) == "medium" and clattn.device_classes(context)[-1] == "cpu"
    key = clattn.TuningRow(role="decode", head_size=64, group=4, dtype="f32", cache_dtype="f32")
    assert all(each.role == "decode" for each in clattn.tuning_candidates(context, key))
    config = clattn.AttentionConfig(num_heads=8, num_kv_heads=2, head_size=64, dtype="f32")
    launches = clattn.predicted_launches(config, context.capabilities, [], batch([1], [40]))
    assert launches and launches[0].items > 0
    other = clattn.Context()
    clattn.set_tuning(other, clattn.tuning_candidates(other, key)[:1])
    assert clattn.tuning_problems(other) == []


def test_specs_of_caches():
    spec = clattn.KVCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="f16")
    assert spec.page_size_bytes == 2 * 16 * 2 * 64 * 2
    window = clattn.KVCacheSpec(kind="sliding_window", sliding_window=64, dtype="f16")
    assert window.max_memory_usage_bytes(4096, 16) == (79 // 16 + 2) * window.page_size_bytes
    with pytest.raises(clattn.InvalidArgument, match="kind: 'none' is not one of full, sliding"):
        clattn.KVCacheSpec(kind="none")
    assert window.max_admission_blocks_per_request(4096, 16) == 79 // 16 + 2
    assert clattn.get_kv_cache_spec_kind(window) == "sliding_window"
    assert clattn.get_kv_cache_spec_kind(clattn.KVCacheSpec(kind="full_attention")) == (
        "full_attention"
    )
    narrow = clattn.KVCacheSpec(block_size=16, num_kv_heads=1, head_size=64, dtype="f16")
    group = clattn.KVCacheGroupSpec(
        layer_names=["a", "b"], spec=spec, layer_specs={"b": narrow}
    )
    assert group.spec_of("b") == narrow and group.spec_of("a") == spec
    assert group.page_size_bytes == spec.page_size_bytes * 3 // 2
    assert group.max_memory_usage_bytes(33, 8) == 3 * group.page_size_bytes
    state = clattn.StateTensor(shape=[4, 8], dtype="f32")
    mamba = clattn.KVCacheSpec(kind="mamba", states=[state])
    assert mamba.page_size_bytes == 128
    same = clattn.unify_kv_cache_spec_page_size({"a": spec, "b": mamba})
    assert same["b"].page_size_bytes == same["a"].page_size_bytes == spec.page_size_bytes
    assert clattn.KVCacheSpec.merge([spec, spec]) == spec
    assert (clattn.element_size_bytes("bf16"), clattn.is_quantized("int8")) == (2, True)
    assert clattn.parse_dtype(np.float16) == "f16" and clattn.parse_kv_cache_dtype("auto") is None
    assert clattn.find_dtype("f12") is None
    clattn.set_kv_cache_layout("LBHNC")
    assert clattn.get_kv_cache_layout() == "HND"
    clattn.set_kv_cache_layout(None)
    assert clattn.extract_layer_index("model.layers.3.attn") == 3
