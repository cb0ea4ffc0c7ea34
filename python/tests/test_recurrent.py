"""Recurrent layers over states in pages, against their equations in NumPy."""

import clattn
import numpy as np
import pytest


def pages_of(context, queue, states, count):
    spec = clattn.KVCacheSpec(kind="mamba", states=states)
    buffer = context.allocate(spec.page_size_bytes * count)
    queue.write(buffer, np.zeros(spec.page_size_bytes * count, np.uint8))
    return buffer, clattn.view_state_pages(buffer, spec)


def delta_rule(query, key, value, g, beta, scale):
    """Outputs and the last state, token by token from zero."""
    tokens, heads, size = value.shape
    state = np.zeros((heads, size, key.shape[2]))
    out = np.zeros(value.shape)
    for t in range(tokens):
        for h in range(heads):
            k, q = key[t, h // 2], query[t, h // 2]
            k, q = (x / np.sqrt((x * x).sum() + 1e-6) for x in (k, q))
            state[h] *= np.exp(g[t, h])
            state[h] += np.outer(beta[t, h] * (value[t, h] - state[h] @ k), k)
            out[t, h] = scale * state[h] @ q
    return out, state


@pytest.mark.parametrize("name", ["fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule"])
def test_gated_delta_rule(context, queue, random, name):
    query, key = (random.standard_normal((20, 1, 32), np.float32) for _ in range(2))
    value = random.standard_normal((20, 2, 16), np.float32)
    g, beta = -random.random((20, 2), np.float32), random.random((20, 2), np.float32)
    states = clattn.gated_delta_net_state_shape(1, 2, 32, 16, 4, 0, "f32")
    buffer, (_, pages) = pages_of(context, queue, states, 2)
    builder = clattn.RecurrentMetadataBuilder(context)
    out = np.zeros_like(value)
    for first, end in (0, 17), (17, 20):
        metadata = builder.build(queue, [0, end - first], [[1]], has_initial_state=[first > 0])
        assert (metadata.num_reqs, metadata.max_state_index) == (1, 1)
        part = slice(first, end)
        step = np.zeros_like(value[part])
        getattr(clattn, name)(
            context, queue, query[part], key[part], value[part], step, pages, metadata,
            dtype="f32", num_k_heads=1, g=g[part], beta=beta[part],
        )  # fmt: skip
        out[part] = step
    expected, state = delta_rule(query, key, value, g, beta, 32**-0.5)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    raw = np.zeros(buffer.size_bytes // 4, np.float32)
    queue.read(buffer, raw)
    start = pages.offset + pages.block_stride
    np.testing.assert_allclose(raw[start : start + state.size], state.ravel(), atol=1e-5)


def test_convolution_of_two_steps(context, queue, random):
    x = random.standard_normal((6, 16), np.float32)
    weight = random.standard_normal((16, 3), np.float32)
    _, (pages,) = pages_of(context, queue, clattn.short_conv_state_shape(16, 3, "f32"), 1)
    builder = clattn.RecurrentMetadataBuilder(context)
    out = np.zeros_like(x)
    for first, end in (0, 1), (1, 6):
        metadata = builder.build(queue, [0, end - first], [[0]], has_initial_state=[first > 0])
        step = np.zeros_like(x[first:end])
        clattn.causal_conv1d_fn(
            context, queue, x[first:end], weight, step, pages, metadata, dtype="f32", width=3,
            activation="none",
        )  # fmt: skip
        out[first:end] = step
    padded = np.concatenate([np.zeros((2, 16), np.float32), x])
    expected = sum(padded[j : j + 6] * weight[:, j] for j in range(3))
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_gated_norm(context, queue, random):
    x, z = (random.standard_normal((3, 2, 32), np.float32) for _ in range(2))
    weight = random.standard_normal(32, np.float32)
    out = np.zeros_like(x)
    clattn.rms_norm_gated(
        context, queue, out, x, weight, z, num_tokens=3, num_heads=2, width=32, dtype="f32"
    )
    norm = x / np.sqrt((x * x).mean(axis=2, keepdims=True) + 1e-6)
    np.testing.assert_allclose(out, norm * weight * z / (1 + np.exp(-z)), atol=1e-5)


def test_refusals(context, queue):
    builder = clattn.RecurrentMetadataBuilder(context)
    with pytest.raises(clattn.InvalidArgument, match=r"num_accepted_tokens\[0\] is 0"):
        builder.build(queue, [0, 1], [[0, 1]], num_accepted_tokens=[0])
    with pytest.raises(clattn.InvalidArgument, match="name page 3"):
        builder.build(queue, [0, 1, 2], [[3], [3]])


def test_metadata_of_gated_delta_nets(context, queue):
    states = clattn.gated_delta_net_state_shape(1, 2, 16, 16, 4, 2, "f32")
    spec = clattn.KVCacheSpec(kind="mamba", states=states, num_speculative_blocks=2)
    assert (spec.mamba_cache_mode, spec.max_admission_blocks_per_request(100, 100)) == ("none", 3)
    builder = clattn.GDNAttentionMetadataBuilder(context, spec, null_block_id=0)
    batch = clattn.CommonAttentionMetadata([0, 3, 4, 8], [9, 5, 4], np.arange(1, 10).reshape(3, 3))
    made = builder.build(
        queue, batch, num_accepted_tokens=[3, 1, 1], num_decode_draft_tokens=[2, -1, -1]
    )
    assert (made.num_spec_decodes, made.num_decodes, made.num_prefills) == (1, 0, 2)
    assert (made.num_spec_decode_tokens, made.num_prefill_tokens) == (3, 5)
    assert made.spec_sequence_masks.tolist() == [1, 0, 0]
    assert made.spec_state_indices_tensor.tolist() == [[1, 2, 3]]
    assert made.non_spec_state_indices_tensor.tolist() == [4, 7]
    assert made.has_initial_state.tolist() == [1, 0]
    assert made.non_spec_token_indx.tolist() == [3, 4, 5, 6, 7]
    assert made.num_accepted_tokens.tolist() == [3]
    assert made.chunk_indices.tolist() == [[0, 0], [1, 0]]
    assert (made.metadata.state_columns, made.metadata.num_reqs) == (3, 3)
    with pytest.raises(clattn.InvalidArgument, match="num_accepted_tokens has 0 elements"):
        builder.build(queue, batch, num_decode_draft_tokens=[2, -1, -1])


def test_sessions_with_a_recurrent_layer(context, random):
    query, key = (random.standard_normal((20, 1, 32), np.float32) for _ in range(2))
    value = random.standard_normal((20, 2, 16), np.float32)
    g, beta = -random.random((20, 2), np.float32), random.random((20, 2), np.float32)
    spec = clattn.KVCacheSpec(kind="mamba", states=[clattn.StateTensor(shape=[2, 16, 32])])
    layer = clattn.AttentionOptions(num_heads=1, head_size=8, dtype="f32")
    session = clattn.Session(
        context, [layer], num_blocks=4,
        recurrent=clattn.RecurrentLayers(layers=[spec], num_slots=4),
    )  # fmt: skip
    assert (session.num_layers, session.num_recurrent_layers) == (1, 1)
    out, rows = np.zeros_like(value), np.zeros((20, 1, 8), np.float32)

    def run_layers(part):
        def run(step):
            made = np.zeros_like(value[part])
            clattn.chunk_gated_delta_rule(
                context, session.queue, query[part], key[part], value[part], made, step.states,
                step.metadata, dtype="f32", num_k_heads=1, g=g[part], beta=beta[part],
            )  # fmt: skip
            out[part] = made

        session.recur(0, run)
        session.attend(0, rows[part], rows[part], rows[part], np.empty_like(rows[part]))

    request = session.add(np.arange(20))
    for first, end in (0, 17), (17, 19), (19, 20):
        session.step([clattn.StepRequest(id=request, max_tokens=end - first)])
        run_layers(slice(first, end))
    np.testing.assert_allclose(out, delta_rule(query, key, value, g, beta, 32**-0.5)[0], atol=1e-5)
    assert session.state_slots.num_used == 1
    with pytest.raises(clattn.InvalidArgument, match="outside of a step"):
        session.recur(0, print)
