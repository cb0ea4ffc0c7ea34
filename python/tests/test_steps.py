"""Cascades, recorded steps, groups of a model's layers, backends."""

import clattn
import numpy as np
import pytest
from clattn import reference

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "f32"}
OPTIONS = reference.Options(scale=32**-0.5)


class Model:
    """A layer whose cache holds random keys and values, slot by slot."""

    def __init__(self, context, queue, random, num_blocks=8):
        self.config = clattn.AttentionConfig(**SHAPE)
        self.backend = clattn.get_attn_backend(self.config, context)
        self.impl = self.backend.make_impl(context, self.config)
        self.cache = clattn.make_kv_cache(context, queue, self.backend, self.config, num_blocks)
        self.key, self.value = random.standard_normal((2, 16 * num_blocks, 2, 32), np.float32)
        slots = np.arange(16 * num_blocks)
        clattn.reshape_and_cache_flash(
            context, queue, self.key, self.value, self.cache, slots, "f32"
        )

    def want(self, query, table, length):
        positions = np.arange(length)
        slots = np.array(table)[positions // 16] * 16 + positions % 16
        keys, values = self.key[slots].astype(float), self.value[slots].astype(float)
        return reference.attention(query, keys, values, OPTIONS)


@pytest.fixture
def model(context, queue, random):
    return Model(context, queue, random)


TABLE = [[3, 7, 1], [3, 7, 2]]
LENGTHS = [40, 37]


def check(model, query, output, lse):
    for row in range(2):
        want, want_lse = model.want(query[row : row + 1], TABLE[row], LENGTHS[row])
        np.testing.assert_allclose(output[row : row + 1], want, atol=2e-5)
        np.testing.assert_allclose(lse[row : row + 1], want_lse, atol=2e-5)


def test_cascade_of_a_common_prefix(context, queue, random, model):
    assert clattn.validate_cascade_configuration(model.config) == []
    impl = clattn.CascadeImpl(context, model.backend, model.config)
    cascade = clattn.CascadeAttention(context, model.backend, model.config)
    batch = clattn.CommonAttentionMetadata([0, 1, 2], LENGTHS, TABLE)
    metadata = cascade.build(queue, batch, 32)
    assert metadata.slot_mapping == [16 + 7, 2 * 16 + 4]
    query = random.standard_normal((2, 4, 32), np.float32)
    output, lse, launches = np.empty_like(query), np.empty((2, 4), np.float32), []
    cascade.forward(queue, impl, query, output, model.cache, lse=lse, launches=launches)
    check(model, query, output, lse)
    assert launches
    with pytest.raises(
        clattn.InvalidArgument, match="output: 1 rows, legal: at least 2, "
    ):
        cascade.forward(queue, impl, query, output[:1], model.cache)


def test_cascade_of_levels(context, queue, random, model):
    levels = [
        clattn.CascadeLevel([0, 2], [0, 2], [3, 7], [16]),
        clattn.CascadeLevel([0, 1, 2], [0, 1, 2], [1, 2], [8, 5], causal=True),
    ]
    assert levels[1].causal and levels[0].paged_kv_indices.tolist() == [3, 7]
    wrapper = clattn.MultiLevelCascadeAttentionWrapper(context, model.backend, model.config, 2)
    wrapper.plan(queue, levels)
    query = random.standard_normal((2, 4, 32), np.float32)
    output, lse = np.empty_like(query), np.empty((2, 4), np.float32)
    impl = clattn.CascadeImpl(context, model.backend, model.config)
    wrapper.run(queue, impl, query, output, model.cache, lse=lse)
    check(model, query, output, lse)


def test_when_to_cascade(context, model):
    shape = {"query_lens": [1] * 16, "num_query_heads": 4, "num_kv_heads": 2, "num_sms": 8}
    assert clattn.use_cascade_attention(common_prefix_len=4096, **shape)
    assert not clattn.use_cascade_attention(common_prefix_len=64, **shape)
    for disabled in (False, True):
        options = clattn.BuilderOptions(disable_cascade_attn=disabled)
        builder = model.backend.make_builder(context, model.config, options)
        assert builder.use_cascade_attention(common_prefix_len=4096, **shape) != disabled


def test_recorded_steps(context, queue, random, model):
    state = clattn.AttentionState(
        context, model.backend, model.config, clattn.BuilderOptions(max_num_reqs=4, num_blocks=8)
    )
    query, output, lse = (context.allocate(n * 4) for n in (512, 512, 16))
    queue.fill(query)
    graphs = {}
    with state.graph_capture(4):
        for size in (4, 2):
            metadata = state.graph_capture_get_metadata_for_batch(queue, size)
            with clattn.GraphCapture(queue) as capture:
                model.impl.forward(queue, query, output, model.cache, metadata, lse=lse)
                array = np.empty((4, 4, 32), np.float32)
                with pytest.raises(clattn.InvalidArgument, match="query: an array of the host in"):
                    model.impl.forward(queue, array, output, model.cache, metadata)
            graphs[size] = capture.graph
    assert graphs[4].num_launches > 0
    for last in (0, 3):
        lengths = [40 - last, 37 - last]
        batch = clattn.CommonAttentionMetadata([0, 1, 2], lengths, TABLE)
        assert state.batch_size_for(batch) == 2
        step = state.begin_forward(queue, batch)
        assert step.graph_batch_size == 2
        given = random.standard_normal((2, 4, 32), np.float32)
        queue.write(query, given)
        graphs[2].replay(queue).wait()
        got = np.empty((4, 4, 32), np.float32)
        queue.read(output, got)
        for row in range(2):
            want, _ = model.want(given[row : row + 1], TABLE[row], lengths[row])
            np.testing.assert_allclose(got[row : row + 1], want, atol=2e-5)
    buffers = state.get_graph_input_buffers(step.metadata)
    slots = np.empty(buffers.num_slots, np.int64)
    queue.read(buffers.slot_mapping, slots)
    assert slots.tolist() == [1 * 16 + 4, 2 * 16 + 1]
    eager = state.begin_forward(queue, clattn.CommonAttentionMetadata([0, 9], [9], [[0]]))
    assert eager.graph_batch_size == 0 and eager.metadata.num_actual_tokens == 9
    prepared = state.prepare_graph_input_buffers(queue, 4, batch)
    assert prepared.max_seq_len == 37
    with pytest.raises(clattn.InvalidArgument, match="mode is 'none', legal: auto"):
        clattn.GraphCapture(queue, "none")


def test_mixed_batches_are_recorded(context, queue, model, random):
    options = clattn.BuilderOptions(max_num_reqs=4, num_blocks=8, graph_mixed=True)
    state = clattn.AttentionState(context, model.backend, model.config, options)
    query, output = context.allocate(8 * 512), context.allocate(8 * 512)
    with state.graph_capture(8):
        metadata = state.graph_capture_get_metadata_for_batch(queue, 8)
        with clattn.GraphCapture(queue) as capture:
            model.impl.forward(queue, query, output, model.cache, metadata)
    batch = clattn.CommonAttentionMetadata([0, 1, 6], [40, 37], TABLE)
    assert state.begin_forward(queue, batch).graph_batch_size == 8
    given, got = random.standard_normal((6, 4, 32), np.float32), np.empty((8, 4, 32), np.float32)
    queue.write(query, given)
    capture.graph.replay(queue).wait()
    queue.read(output, got)
    for rows, table, length in ((slice(0, 1), TABLE[0], 40), (slice(1, 6), TABLE[1], 37)):
        want, _ = model.want(given[rows], table, length)
        np.testing.assert_allclose(got[rows], want, atol=2e-5)


def test_a_recording_that_fails_is_dropped(context, queue, model):
    capture = clattn.GraphCapture(queue)
    with pytest.raises(ZeroDivisionError), capture:
        raise ZeroDivisionError
    with pytest.raises(clattn.InvalidArgument, match="graph: nothing was recorded"):
        _ = capture.graph
    query = np.zeros((1, 4, 32), np.float32)
    builder = model.backend.make_builder(context, model.config)
    metadata = builder.build(queue, clattn.CommonAttentionMetadata([0, 1], [1], [[0]]))
    model.impl.forward(queue, query, np.empty_like(query), model.cache, metadata)


def test_groups_of_a_model(context, queue, random):
    registry = clattn.LayerRegistry()
    layers = [
        clattn.Attention(context, registry, clattn.AttentionOptions(**SHAPE, prefix=f"layers.{i}"))
        for i in range(2)
    ]
    specs = clattn.get_kv_cache_spec(registry)
    assert list(specs) == ["layers.0", "layers.1"] and "layers.1" in registry
    size = 4 * specs["layers.0"].page_size_bytes
    config = clattn.KVCacheConfig(
        num_blocks=4,
        tensors=[clattn.KVCacheTensor(size_bytes=size, shared_by=[name]) for name in specs],
        groups=[clattn.KVCacheGroupSpec(layer_names=[n], spec=s) for n, s in specs.items()],
    )
    groups = clattn.init_attn_backend(config, registry, context)
    assert [group.layer_names for group in groups] == [["layers.0"], ["layers.1"]]
    assert [group.kv_cache_group_id for group in groups] == [0, 1]
    assert clattn.get_attn_cg_support(groups) == ("always", groups[0].backend.name)
    caches, states = clattn.init_kv_cache(config, registry, groups, context, queue)
    assert len(caches) == 2 and states == {} and layers[0].kv_cache.num_blocks == 4
    common = clattn.CommonAttentionMetadata([0, 3], [3])
    pages = [clattn.GroupPages([[block]]) for block in (2, 1)]
    metadata = clattn.build_attn_metadata(queue, groups, common, pages)
    assert [metadata[name].slot_mapping[0] for name in specs] == [32, 16]
    query = random.standard_normal((3, 4, 32), np.float32)
    key, value = random.standard_normal((2, 3, 2, 32), np.float32)
    want, _ = reference.attention(query, key.astype(float), value.astype(float), OPTIONS)
    for layer in layers:
        output = np.empty_like(query)
        layer.forward(queue, query, key, value, output, metadata[layer.layer_name])
        np.testing.assert_allclose(output, want, atol=2e-5)
    draft = groups[0].builder.build_for_drafting(
        queue, clattn.CommonAttentionMetadata([0, 3], [3], [[2]], num_actual_tokens=5)
    )
    assert draft.num_actual_tokens == 3
    assert all(launch.split_tiles == 0 for launch in clattn.planned_launches(draft))
    if groups[1].builder.supports_update_block_table:
        first, second = groups[0].builder, groups[1].builder
        built = first.build(queue, clattn.CommonAttentionMetadata([0, 3], [3], [[0]]))
        assert second.update_block_table(queue, built, pages[0]).slot_mapping[0] == 32
    raw = clattn.allocate_kv_cache(context, queue, config)
    views = {
        name: clattn.reshape_kv_cache(raw[name], specs[name], layers[0].backend, "NHD")
        for name in specs
    }
    assert len(clattn.bind_kv_cache(views, registry)) == 2
    assert layers[1].kv_cache.buffer.int_ptr == raw["layers.1"].int_ptr
    with pytest.raises(clattn.InvalidArgument, match="layers.9"):
        clattn.bind_kv_cache({"layers.9": views["layers.0"]}, registry)


def test_pages_of_states(context):
    state = clattn.StateTensor(shape=[2, 3], dtype="f32")
    spec = clattn.KVCacheSpec(kind="mamba", states=[state], page_size_padded=32)
    view = clattn.view_state_pages(context.allocate(96), spec)[0]
    assert (view.num_blocks, view.offset, view.block_stride) == (3, 0, 8)
    assert view.tensor.shape == [2, 3]


def test_builders_answer(context, queue, model):
    builder = model.backend.make_builder(
        context,
        model.config,
        clattn.BuilderOptions(graph_batch_size=2, max_num_reqs=2, num_blocks=8),
    )
    assert builder.can_run_in_graph(clattn.CommonAttentionMetadata([0, 1], [5], [[0]]))
    assert not builder.can_run_in_graph(clattn.CommonAttentionMetadata([0, 9], [9], [[0]]))
    moved, order = builder.reorder_batch([5, 1])
    assert moved and order.tolist() == [1, 0]
    other = model.backend.make_builder(context, model.config)
    workspace = clattn.AttentionWorkspace()
    other.set_workspace_buffer(workspace)
    other.build(queue, clattn.CommonAttentionMetadata([0, 1], [5], [[0]]))
    assert workspace.buffer or not workspace.counters_ready


def test_backends_answer(context, model):
    backend = model.backend
    config = backend.common_configuration()
    assert backend.validate_configuration(config, context) == []
    assert backend.why_not("head_size", 64) == [] and backend.why_not("head_size", 513)
    assert 64 in backend.get_supported_head_sizes() and "f16" in backend.get_supported_dtypes()
    slopes = [0.5] * config.num_heads
    assert backend.why_not("alibi_slopes", slopes) == [] and backend.why_not("use_mla", True)
    assert backend.why_not("dtype", np.int8) and backend.why_not("kv_cache_dtype", None) == []
    assert backend.why_not("attn_type", "decoder") == []
    with pytest.raises(clattn.InvalidArgument, match="field_name: no field 'heads'"):
        backend.why_not("heads", 8)
    with pytest.raises(clattn.InvalidArgument, match="head_size: '64', legal: int"):
        backend.why_not("head_size", "64")
    with pytest.raises(clattn.Unsupported, match="513"):
        backend.validate_head_size(513)
    shape = backend.get_kv_cache_shape(4, 16, 2, 32)
    assert shape[backend.kv_dimension] == 2 and sorted(shape) == sorted([2, 4, 16, 2, 32])
    assert sorted(backend.get_kv_cache_stride_order("NHD")) == [0, 1, 2, 3, 4]
    assert "NHD" in backend.supported_layouts and backend.get_required_kv_cache_layout() is None
    layout = clattn.default_kv_cache_layout(backend, context)
    assert layout == backend.preferred_layout(context) and backend.validate_layout(layout) == []
    assert backend.library == "" and backend.graph_support == "always"
    assert backend.get_cudagraph_support(model.config) == "always"
    assert all(size > 0 for size, _ in backend.get_supported_kernel_block_sizes())
    assert backend.get_preferred_block_size() == 16 and backend.get_preferred_block_size(32) == 32
    assert clattn.select_common_block_size(48, [backend]) == 48


def test_registry(context, model, tmp_path):
    config = clattn.AttentionConfig(**SHAPE, alibi_slopes=[1.0] * 4)
    choice = clattn.choose_attn_backend(config, context)
    assert choice.backend.name and all(reasons for _, reasons in choice.rejected)
    nothing = clattn.choose_attn_backend(clattn.AttentionConfig(**SHAPE | {"head_size": 513}))
    assert nothing.backend is None and nothing.rejected
    assert clattn.get_attn_backend(64, "f16", "auto", 16).name == "FLASHINFER"
    assert clattn.find_attn_backend("XFORMERS_VLLM_V1").name == "XFORMERS"
    names = [backend.name for backend in clattn.list_attn_backends()]
    taken = clattn.unregister_backend("XFORMERS")
    assert "XFORMERS" not in [backend.name for backend in clattn.list_attn_backends()]
    clattn.register_backend(taken, names.index("XFORMERS"))
    assert [backend.name for backend in clattn.list_attn_backends()] == names
    with pytest.raises(clattn.FileError, match="none.so"):
        clattn.load_backend_plugin(str(tmp_path / "none.so"))
    assert clattn.select_device("cpu").selector in [d.selector for d in clattn.list_devices()]
