"""Every kind of work against attention in double precision."""

import clattn
import numpy as np
import pytest
from clattn import checks, reference


@pytest.mark.parametrize("case", checks.CASES, ids=lambda case: case.name)
def test_case(context, queue, case):
    result = checks.run(context, queue, case)
    assert result.passed, result


SPANS = [[(60, 77)], [(0, 5), (5, 17)], [], [(100, 120), (150, 200)]]


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("rule", ["whole", "clip_left", "clip_both"])
def test_spans_by_each_rule(context, queue, rule, window):
    options = {"use_spans": True, "span_rule": rule, "sliding_window": window}
    said = [reference.Request(spans=spans) for spans in SPANS]
    result = checks.run(context, queue, checks.Case(rule, checks.MIXED, options, said=said))
    assert result.passed, result


@pytest.mark.parametrize("direction", [reference.BOTH_WAYS, reference.CAUSAL, reference.CANVAS])
@pytest.mark.parametrize("sides", [(-1, -1), (3, -1), (3, 2)])
def test_directions(context, queue, direction, sides):
    options = {"use_directions": True, "window_left": sides[0], "window_right": sides[1]}
    said = [reference.Request(direction)] * len(checks.CHUNKED)
    result = checks.run(context, queue, checks.Case("", checks.CHUNKED, options, said=said))
    assert result.passed, result


def test_first_keys_may_hide_all(context, queue):
    said = [reference.Request(first_key=key) for key in (77, 18, 0, 155)]
    options = {"use_first_keys": True, "sinks": [0.5] * 8}
    result = checks.run(context, queue, checks.Case("", checks.MIXED, options, said=said))
    assert result.passed, result


def test_keep_keys_escape_the_window(context, queue):
    said = [reference.Request(keep_keys=keys) for keys in (5, 18, 0, 155)]
    options = {"use_keep_keys": True, "sliding_window": 9}
    result = checks.run(context, queue, checks.Case("", checks.MIXED, options, said=said))
    assert result.passed, result


def test_layers_refuse_what_they_do_not_look_at(context, queue):
    layer = checks.Layer(context, queue, checks.Case("", [(2, 2)]))
    for given, text in (
        ({"direction": [0]}, "direction holds 1 elements, legal without use_directions: none"),
        ({"first_keys": [1]}, "first_keys holds 1 elements, legal without use_first_keys: none"),
        ({"keep_keys": [99]}, "request 0: keep_keys is 99, legal: 0 … "),
        ({"spans": [(1, 0)], "span_start_loc": [0, 1]}, "request 0: spans.0. is 1 … 0, legal"),
        ({"spans": [(0, 1)]}, "span_start_loc holds 0 elements, legal: 2"),
    ):
        with pytest.raises(clattn.InvalidArgument, match=text):
            batch = clattn.CommonAttentionMetadata([0, 2], [2], [[0]], **given)
            layer.builder.build(queue, batch)


def test_the_reference_has_the_rows_of_the_rules():
    def rows(seq_len, tokens, request, **options):
        named = reference.Options(scale=1, **options)
        key, query = np.zeros((seq_len, 1, 1)), np.zeros((tokens, 1, 1))
        output, lse = reference.attention(
            query, key, np.eye(seq_len)[:, None], named, request
        )
        np.testing.assert_allclose(lse[:, 0], np.log((output[:, 0] > 0).sum(axis=1)))
        seen = [np.flatnonzero(row).tolist() for row in output[:, 0]]
        assert all(keys == list(range(keys[0], keys[-1] + 1)) for keys in seen)
        return [f"{keys[0]}-{keys[-1]}" for keys in seen]

    image = reference.Request(spans=[(2, 6)])
    assert rows(8, 8, image) == "0-0 0-1 0-5 0-5 0-5 0-5 0-6 0-7".split()
    window = {"sliding_window": 2}
    assert rows(8, 8, image, **window) == "0-0 0-1 1-5 2-5 2-5 2-5 5-6 6-7".split()
    window["span_rule"] = "clip_left"
    assert rows(8, 8, image, **window) == "0-0 0-1 1-5 2-5 3-5 4-5 5-6 6-7".split()
    window["span_rule"] = "clip_both"
    assert rows(8, 8, image, **window) == "0-0 0-1 1-3 2-4 3-5 4-5 5-6 6-7".split()
    chunk = {"attention_chunk_size": 4, "span_rule": "clip_left"}
    assert rows(8, 8, image, **chunk) == "0-0 0-1 0-3 0-3 4-5 4-5 4-6 4-7".split()
    sides = {"window_left": 3, "window_right": 3}
    canvas = reference.Request(reference.CANVAS)
    assert rows(12, 4, canvas, **sides) == ["5-11"] * 4
    assert rows(12, 4, reference.Request(reference.BOTH_WAYS), **sides) == (
        "5-11 6-11 7-11 8-11".split()
    )
    assert rows(10, 2, reference.Request(first_key=3)) == ["3-8", "3-9"]


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


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("int8_per_token_head", 0.1), ("fp8_per_token_head", 0.1), ("uint4_per_token_head", 0.4)],
)
def test_each_row_of_a_cache_has_a_scale_of_its_own(context, queue, name, allowed):
    outputs = []
    for options in ({}, {"kv_cache_dtype": name}):
        layer = checks.Layer(context, queue, checks.Case("", [(9, 9)], options))
        metadata = layer.builder.build(queue, layer.batch.metadata())
        key, value, query = layer.rows(9, 2, 1.0), layer.rows(9, 2, 1.0), layer.rows(9, 8, 1.0)
        value *= np.array([1, 1e-5, 1e4, 1e-2, 1, 1e3, 1e-9, 10, 1e-3], np.float32)[:, None, None]
        outputs.append(np.empty_like(query))
        layer.impl.forward(queue, query, outputs[-1], layer.cache, metadata, key=key, value=value)
    assert layer.config.kv_cache_dtype == name
    # Values and weights by 1/28 at most, of the largest value that a row sees; codes of 4 bits lose
    # 1/15 of a value, and weights follow logits.
    seen = np.maximum.accumulate(np.abs(value).max(axis=(1, 2)))[:, None, None]
    assert np.all(np.abs(outputs[1] - outputs[0]) <= allowed * seen)
    assert np.any(outputs[1] != outputs[0])


def test_pages_of_four_bits_hold_two_codes_a_byte(context, queue):
    options = {"head_size": 8, "kv_cache_dtype": "uint4_per_token_head"}
    cache = checks.Layer(context, queue, checks.Case("", [(1, 1)], options)).cache
    assert (cache.dtype, cache.format) == ("uint4x2", "uint4_per_token_head")
    assert (cache.head_size, cache.shape[-1]) == (8, 4)
    assert cache.key_at(0, 0, 0, 6) == cache.key_at(0, 0, 0, 7) == cache.key_at(0, 0, 0, 0) + 3
    with pytest.raises(clattn.Unsupported, match="no kernel rotates queries"):
        clattn.AttentionConfig(kv_cache_dtype="int4_per_token_head")


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
        ({"value": key}, "only value is given, legal: both or none"),
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


def test_encoder_with_a_mask(context, queue, random):
    config = clattn.AttentionConfig(
        num_heads=4, num_kv_heads=4, head_size=32, dtype="f32", attn_type="encoder_only",
        custom_mask=True,
    )  # fmt: skip
    backend = clattn.get_attn_backend(config, context)
    impl = backend.make_impl(context, config)
    builder = backend.make_builder(context, config)
    metadata = builder.build(queue, clattn.CommonAttentionMetadata([0, 6], [6]))
    query, key, value = random.standard_normal((3, 6, 4, 32), np.float32)
    output = np.empty_like(value)
    mask = np.eye(6, dtype=bool)
    impl.forward_encoder(queue, query, key, value, output, metadata, custom_mask=mask)
    np.testing.assert_allclose(output, value, atol=1e-6)
    mask = np.ones((6, 6), bool).tolist()
    impl.forward_encoder(queue, query, key, value, output, metadata, custom_mask=mask)
    given = (x.astype(float) for x in (query, key, value))
    want, _ = reference.attention(*given, reference.Options(scale=32**-0.5, causal=False))
    np.testing.assert_allclose(output, want, atol=2e-5)


@pytest.mark.parametrize("scale", [0.125, [0.125], np.array([0.125], np.float32)])
def test_output_in_fp8(context, queue, scale):
    layer = checks.Layer(context, queue, checks.Case("", [(9, 9)], {"output_fp8": True}))
    metadata = layer.builder.build(queue, layer.batch.metadata())
    key, query = layer.rows(9, 2, 1.0), layer.rows(9, 8, 1.0)
    output, stored, launches = np.empty_like(query), np.zeros(query.shape, np.uint8), []
    layer.impl.forward(
        queue, query, output, layer.cache, metadata, key=key, value=key, output_fp8=stored,
        output_scale=scale, launches=launches,
    )  # fmt: skip
    got = 0.125 * reference.decode(stored, "fp8_e4m3")
    np.testing.assert_allclose(got, output, rtol=2.0**-4, atol=0.125 * 2.0**-9)
    assert [launch.kernel for launch in launches] and all(launch.tasks for launch in launches)
    with pytest.raises(clattn.InvalidArgument, match="output_fp8"):
        layer.impl.forward(queue, query, output, layer.cache, metadata)
