"""Every kind of work against attention in double precision."""

import clattn
import numpy as np
import pytest
from clattn import checks, reference


@pytest.mark.parametrize("case", checks.CASES, ids=lambda case: case.name)
def test_case(context, queue, case):
    result = checks.run(context, queue, case)
    assert result.passed, result


def test_a_difference_is_noticed(context, queue, monkeypatch):
    exact = reference.attention
    monkeypatch.setattr(
        reference, "attention", lambda *given: (exact(*given)[0] + 1e-4, exact(*given)[1])
    )
    assert not checks.run(context, queue, checks.Case("decode", checks.DECODE)).passed


@pytest.mark.parametrize("dtype", ["f32", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_cache_holds_what_was_given(context, queue, dtype):
    layer = checks.Layer(context, queue, checks.Case("", [(9, 9)], {"kv_cache_dtype": dtype}))
    metadata = layer.builder.build(queue, layer.batch.metadata())
    key, value = layer.rows(9, 2, 1.0), layer.rows(9, 2, 1.0)
    layer.impl.write_kv_cache(queue, key, value, layer.cache, metadata)
    slots = layer.batch.slots(0, np.arange(9))
    for given, pages, scale in zip(
        (key, value), checks.stored_pages(queue, layer.cache), layer.scales, strict=True
    ):
        stored = scale * pages.reshape(-1, 2, 64)[slots]
        if dtype == "int8":
            given = np.clip(given, -127 * scale, 127 * scale)
        # Half a step: of int8 everywhere, of fp8 next to zero.
        relative = 0 if dtype == "f32" else reference.ROUNDOFF.get(dtype, 0)
        absolute = {"f32": 0, "int8": scale / 2 + 1e-6}.get(dtype, scale * 2.0**-9)
        assert np.all(np.abs(stored - given) <= relative * np.abs(given) + absolute)


def test_forward_stores_what_it_is_given_first(context, queue):
    outputs, pages = [], []
    for at_once in (False, True):
        layer = checks.Layer(context, queue, checks.Case("", [(9, 9), (1, 1)]))
        metadata = layer.builder.build(queue, layer.batch.metadata())
        key, value, query = layer.rows(10, 2, 1.0), layer.rows(10, 2, 1.0), layer.rows(10, 8, 1.0)
        given = {"key": key, "value": value} if at_once else {}
        if not at_once:
            layer.impl.write_kv_cache(queue, key, value, layer.cache, metadata)
        outputs.append(np.empty_like(query))
        layer.impl.forward(queue, query, outputs[-1], layer.cache, metadata, **given)
        pages.append(checks.stored_pages(queue, layer.cache))
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_array_equal(*pages)


def test_forward_stores_nothing_that_it_refuses(context, queue):
    layer = checks.Layer(context, queue, checks.Case("", [(9, 9)]))
    metadata = layer.builder.build(queue, layer.batch.metadata())
    key, query = layer.rows(9, 2, 1.0), layer.rows(9, 8, 1.0)
    before = checks.stored_pages(queue, layer.cache)
    for given, text in (
        ({"value": key}, "value: given without key"),
        ({"key": key, "value": key, "lse": np.empty((8, 8), np.float32)}, "lse"),
    ):
        with pytest.raises(clattn.InvalidArgument, match=text):
            layer.impl.forward(queue, query, np.empty_like(query), layer.cache, metadata, **given)
    np.testing.assert_array_equal(before, checks.stored_pages(queue, layer.cache))


@pytest.mark.parametrize("value_size", [32, 16])
def test_encoder_attends_to_its_keys(context, queue, random, value_size):
    config = clattn.AttentionConfig(
        num_heads=4, num_kv_heads=4, head_size=32, dtype="f32", attn_type="encoder_only"
    )
    config.head_size_v = value_size
    backend = clattn.get_attn_backend(config, context)
    impl = backend.make_impl(context, config)
    builder = backend.make_builder(context, config)
    batch = clattn.CommonAttentionMetadata(np.array([0, 7, 20]), np.array([7, 13]))
    query, key, value = random.standard_normal((3, 20, 4, 32), np.float32)
    value = np.ascontiguousarray(value[:, :, :value_size])
    output = np.empty_like(value)
    impl.forward_encoder(queue, query, key, value, output, builder.build(queue, batch))
    for rows in (slice(0, 7), slice(7, 20)):
        options = reference.Options(scale=32**-0.5, causal=False)
        given = (x[rows].astype(float) for x in (query, key, value))
        want, _ = reference.attention(*given, options)
        np.testing.assert_allclose(output[rows], want, atol=2e-5)


def test_custom_mask_hides_keys(context, queue, random):
    case = checks.Case("", [(6, 6)], {"custom_mask": True})
    layer = checks.Layer(context, queue, case)
    metadata = layer.builder.build(queue, layer.batch.metadata())
    key, value = layer.rows(6, 2, 1.0), layer.rows(6, 2, 1.0)
    query = layer.rows(6, 8, 1.0)
    layer.impl.write_kv_cache(queue, key, value, layer.cache, metadata)
    output = np.empty_like(query)
    only_itself = np.eye(6, dtype=bool)
    layer.impl.forward(queue, query, output, layer.cache, metadata, custom_mask=only_itself)
    np.testing.assert_allclose(output, np.repeat(value, 4, axis=1), atol=1e-6)
