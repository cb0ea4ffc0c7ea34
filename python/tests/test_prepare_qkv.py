"""Norm, rotary embedding and write of queries, keys and values."""

import clattn
import numpy as np
import pytest


def prepared(x, weight, cos, sin):
    n = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * (1 + weight)
    first, second = n[..., :16], n[..., 16:32]
    c, s = cos[:, None], sin[:, None]
    turned = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    return np.concatenate([turned, n[..., 32:]], axis=-1)


def test_rows_of_a_projection(context, queue, random):
    fused = random.standard_normal((3, 8, 64), np.float32)
    query, key, value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    weight = random.standard_normal(64, np.float32)
    turns = random.standard_normal((9, 16), np.float32)
    table = np.concatenate([np.cos(turns), np.sin(turns)], axis=1)
    positions = [0, 8, 3]
    cos, sin = np.cos(turns)[positions], np.sin(turns)[positions]
    expected = prepared(query, weight, cos, sin), prepared(key, weight, cos, sin)
    errors = clattn.DeviceErrors(context, queue)
    outs = np.zeros((3, 4, 64), np.float32), np.zeros((3, 2, 64), np.float32)
    call = {
        "num_tokens": 3, "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "f32",
        "query": query, "key": key, "query_out": outs[0], "key_out": outs[1],
        "eps": 1e-6, "q_weight": weight, "k_weight": weight, "weight_plus_one": True,
        "cos_sin_cache": table, "rotary_dim": 32, "positions": positions, "errors": errors,
    }  # fmt: skip
    clattn.prepare_qkv(context, queue, **call).wait()
    for out, exact in zip(outs, expected):
        np.testing.assert_allclose(out, exact, atol=1e-5)
    three = {"mrope_section": [6, 5, 5], "positions": [positions] * 3, "mrope_interleaved": True}
    again = {"query_out": query, "query": query, "key_out": np.zeros_like(outs[1])}
    clattn.prepare_qkv(context, queue, **{**call, **three, **again}).wait()
    np.testing.assert_array_equal(query, outs[0])  # in place
    errors.check(queue)
    with pytest.raises(clattn.InvalidArgument, match="unknown keyword epsilon, legal: cache"):
        clattn.prepare_qkv(context, queue, **call, epsilon=1)
    with pytest.raises(clattn.InvalidArgument, match="value is given, legal without a cache"):
        clattn.prepare_qkv(context, queue, **call, value=value)
    with pytest.raises(clattn.InvalidArgument, match="eps: None, but q_weight"):
        clattn.prepare_qkv(context, queue, **{**call, "eps": None})


def test_session(context, queue, random):
    options = clattn.AttentionOptions(
        config=clattn.AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64, dtype="f32")
    )
    outs = []
    for fused in True, False:
        session = clattn.Session(context, [options], num_blocks=4)
        rows = np.linspace(-1, 1, 3 * 8 * 64, dtype=np.float32).reshape(3, 8, 64)
        query, key, value = rows[:, :4], rows[:, 4:6], rows[:, 6:]
        session.add([5, 6, 7])
        session.step([clattn.StepRequest(id=0)])
        call = {"query": query, "query_out": query, "key": key, "eps": 1e-6}
        out = np.zeros((3, 4, 64), np.float32)
        if fused:
            session.prepare_qkv(0, **call, value=value)
            session.attend(0, query, None, None, out)
        else:
            clattn.prepare_qkv(
                context, queue, **call, key_out=key, num_tokens=3, num_heads=4, num_kv_heads=2,
                head_size=64, dtype="f32",
            ).wait()  # fmt: skip
            session.attend(0, query, key, value, out)
        session.queue.finish()
        outs.append(out)
    np.testing.assert_array_equal(*outs)
