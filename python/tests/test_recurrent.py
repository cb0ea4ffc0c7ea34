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
