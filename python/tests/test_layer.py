"""Layers: the cache, scales and choices that Attention adds to an impl."""

import json
import os
import subprocess
import sys

import clattn
import numpy as np
import pytest
from clattn import checks


@pytest.fixture
def model(context, queue):
    """Two layers, the second of which attends to the first one's cache."""
    registry = clattn.LayerRegistry()
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "f32"}
    first = clattn.Attention(
        context, registry, clattn.AttentionOptions(**shape, prefix="layers.0.attn")
    )
    second = clattn.Attention(
        context,
        registry,
        clattn.AttentionOptions(
            **shape, prefix="layers.1.attn", kv_sharing_target_layer_name="layers.0.attn"
        ),
    )
    first.bind_kv_cache(clattn.make_kv_cache(context, queue, first.backend, first.config, 8))
    assert len(registry) == 2 and registry.names == ["layers.0.attn", "layers.1.attn"]
    return first, second


def test_forward_stores_attends_and_zeroes(context, queue, model, random):
    batch = checks.Batch([(3, 3), (2, 2)], 16, random)
    builder = model[0].backend.make_builder(context, model[0].config)
    metadata = builder.build(queue, batch.metadata())
    assert (metadata.num_actual_tokens, metadata.num_prefills, metadata.num_decodes) == (5, 2, 0)
    query = random.standard_normal((5, 8, 64), np.float32)
    key, value = random.standard_normal((2, 5, 2, 64), np.float32)
    outputs = [np.full_like(query, np.nan) for _ in model]
    lse = np.empty((5, 8), np.float32)
    model[0].forward(queue, query, key, value, outputs[0], metadata, lse=lse)
    model[1].forward(queue, query, None, None, outputs[1], metadata)
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_allclose(outputs[0][0], np.repeat(value[0], 4, axis=0), atol=1e-6)
    assert np.isfinite(lse).all()


def test_explain_and_repr(context, model):
    candidates = model[0].explain()
    assert {c.role for c in candidates} >= {"backend", "decode", "prefill"}
    assert [c.name for c in candidates if c.role == "backend" and c.chosen] == ["FLASHINFER"]
    assert all(c.chosen or c.reason for c in candidates)
    assert "head_size=64, num_heads=8" in repr(model[0])
    assert "FLASHINFER" in clattn.explain(context, num_heads=8, head_size=64, dtype="f32")


def test_layouts_are_judged(context, model):
    backend = model[0].backend
    assert backend.validate_layout(backend.preferred_layout(context)) == []
    dense = clattn.get_attn_backend(
        clattn.AttentionConfig(num_heads=8, num_kv_heads=2, head_size=64, dtype="f16"),
        context,
        "XFORMERS",
    )
    assert dense.validate_layout("HND") == [
        "layout HND not supported by XFORMERS: NHD is"
    ]


def test_scales(context):
    registry = clattn.LayerRegistry()
    options = clattn.AttentionOptions(
        num_heads=8,
        head_size=64,
        prefix="layers.2",
        kv_cache_dtype="fp8_e4m3",
    )
    layer = clattn.Attention(context, registry, options)
    assert layer.config.kv_cache_dtype == "fp8_e4m3"
    assert layer.load_kv_scales(k_scale=0.5, v_scale=0.25) == []
    with pytest.raises(clattn.InvalidArgument, match="k_scale"):
        layer.load_kv_scales(k_scale=0.0, v_scale=1.0)


def test_scales_of_a_cache_with_one_of_queries(context, queue):
    """Heads of 64 are never multiplied in 8 bits, so the scale of queries changes nothing."""
    options = {"kv_cache_dtype": "fp8_e4m3", "fp8_products": True}
    outputs = []
    for scales, per_head, query in (
        ([0.03, 0.02], False, False),
        ([0.03, 0.02, 0.5], False, True),
        ([0.03, 0.03, 0.02, 0.02], True, False),
        ([0.03, 0.03, 0.02, 0.02, 0.5], True, True),
    ):
        layer = checks.Layer(context, queue, checks.Case("", [(40, 90), (1, 7)], options))
        layer.cache.set_scales(context, np.array(scales, np.float32))
        assert (layer.cache.scales_per_head, layer.cache.scales_query) == (per_head, query)
        outputs.append(layer.step()[1])
        np.testing.assert_array_equal(outputs[0], outputs[-1])
    for count in (0, 1, 6, 7):
        with pytest.raises(clattn.InvalidArgument, match=f"scales: {count} values, legal: 2 or 4"):
            layer.cache.set_scales(context, np.ones(count, np.float32))


def test_the_scale_of_queries_reaches_the_call(tmp_path):
    """CPU kernels ignore it, but the case of a captured call records it."""
    program = """
import clattn, numpy
from clattn import checks
context = clattn.Context()
queue = context.create_queue()
options = {"kv_cache_dtype": "fp8_e4m3", "fp8_products": True}
for scales in [0.03, 0.02, 0.5], [0.03, 0.02], [0.03, 0.04, 0.02, 0.01, 0.25]:
    layer = checks.Layer(context, queue, checks.Case("", [(40, 90)], options))
    layer.cache.set_scales(context, numpy.array(scales, numpy.float32))
    layer.step()
"""
    environment = {**os.environ, "CLATTN_CAPTURE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    cases = [json.loads(case.read_text()) for case in sorted(tmp_path.glob("*-attention/*.json"))]
    assert [case.get("q_scale") for case in cases] == [0.5, None, 0.25]


def test_scales_are_for_caches_of_8_bits(context, queue):
    layer = checks.Layer(context, queue, checks.Case("", [(1, 40)], {"dtype": "f16"}))
    text = "scales: the cache stores f16, legal: None, or a cache of 8 bits"
    with pytest.raises(clattn.InvalidArgument, match=text):
        layer.cache.set_scales(context, [0.5, 0.5])
    layer.step()
    quantized = checks.Layer(context, queue, checks.Case("", [(1, 9)], {"kv_cache_dtype": "int8"}))
    quantized.cache.set_scales(context, None)
    assert not quantized.cache.scales
    with pytest.raises(clattn.InvalidArgument, match="scale"):
        quantized.step()


@pytest.mark.parametrize("as_buffer", [False, True])
def test_profile_run_zeroes_all_rows(context, queue, model, as_buffer):
    query = np.ones((5, 8, 64), np.float32)
    output = np.full_like(query, np.nan)
    given = output
    if as_buffer:
        given = context.allocate(output.nbytes)
        queue.write(given, output)
    if as_buffer:
        with pytest.raises(clattn.InvalidArgument, match="num_rows: none in a profile run, legal"):
            model[0].forward(queue, query, None, None, given, None)
    rows = 5 if as_buffer else None
    model[0].forward(queue, query, None, None, given, None, num_rows=rows)
    if as_buffer:
        queue.read(given, output)
    assert not output.any()


def test_padding_rows_are_zeroed(context, queue, model, random):
    batch = checks.Batch([(3, 3)], 16, random)
    metadata = (
        model[0].backend.make_builder(context, model[0].config).build(queue, batch.metadata())
    )
    query = random.standard_normal((5, 8, 64), np.float32)
    key = random.standard_normal((5, 2, 64), np.float32)
    output = np.full_like(query, np.nan)
    model[0].forward(queue, query, key, key, output, metadata)
    assert output[:3].all() and not output[3:].any()
    output[:] = np.nan
    model[0].forward(queue, query, key, key, output, metadata, num_rows=4)
    assert not output[3].any() and np.isnan(output[4]).all()


def test_layer_takes_masks(context, queue, random):
    registry = clattn.LayerRegistry()
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "f32"}
    options = clattn.AttentionOptions(**shape, prefix="layers.0", custom_mask=True)
    layer = clattn.Attention(context, registry, options)
    layer.bind_kv_cache(clattn.make_kv_cache(context, queue, layer.backend, layer.config, 8))
    batch = checks.Batch([(3, 3)], 16, random)
    metadata = layer.backend.make_builder(context, layer.config).build(queue, batch.metadata())
    query = random.standard_normal((3, 8, 64), np.float32)
    key, value = random.standard_normal((2, 3, 2, 64), np.float32)
    output = np.empty_like(query)
    layer.forward(queue, query, key, value, output, metadata, custom_mask=np.eye(3, dtype=bool))
    np.testing.assert_allclose(output, np.repeat(value, 4, axis=1), atol=1e-6)
    assert layer.impl.kernels() and layer.options.prefix == "layers.0" and not layer.has_sink


def test_backends_by_name_or_object(context):
    options = clattn.AttentionOptions(num_heads=2, head_size=64, dtype="f16")
    assert options.attn_backend is None
    options.attn_backend = "XFORMERS"
    assert options.attn_backend.name == "XFORMERS"
    layer = clattn.Attention(context, clattn.LayerRegistry(), options)
    assert layer.backend.name == "XFORMERS" and layer.config.num_kv_heads == 2
    options.attn_backend = clattn.find_attn_backend("FLASHINFER")
    assert options.attn_backend.name == "FLASHINFER"
    with pytest.raises(clattn.InvalidArgument, match="NONE"):
        options.attn_backend = "NONE"
    options.attn_backend = None
    assert options.attn_backend is None


def test_scales_of_checkpoints_and_batches(context, queue, random):
    found = clattn.load_kv_scales("fp8_e4m3", k_scale=0.5)
    assert (found.k_scale, found.v_scale, found.q_scale) == (0.5, 0.5, 1) and found.warnings == []
    assert clattn.load_kv_scales("fp8_e4m3", k_scale=0.5, fnuz=True).k_scale == 1
    registry = clattn.LayerRegistry()
    options = clattn.AttentionOptions(
        num_heads=2, head_size=64, dtype="f32", prefix="layers.0",
        kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True,
    )  # fmt: skip
    layer = clattn.Attention(context, registry, options)
    layer.bind_kv_cache(clattn.make_kv_cache(context, queue, layer.backend, layer.config, 2))
    query, key, value = random.standard_normal((3, 4, 2, 64), np.float32)
    layer.calc_kv_scales(queue, query, key, value, 4)
    scales = np.empty(3, np.float32)
    queue.read(layer.scales, scales)
    # CLATTN_K_SCALE_CONSTANT and CLATTN_V_SCALE_CONSTANT are 200 and 100.
    want = [np.abs(key).max() / 200, np.abs(value).max() / 100]
    np.testing.assert_allclose(scales[:2], want, rtol=1e-6)
    assert clattn.Attention(context, clattn.LayerRegistry(), options).kv_cache is None
    clattn.process_weights_after_loading(layer, "f32")
    with pytest.raises(clattn.InvalidArgument):
        clattn.process_weights_after_loading(layer, "f16")
    assert clattn.extra_repr(layer).startswith("head_size=64, num_heads=2")


def test_plan_of_a_step(context, queue, model, random):
    batch = checks.Batch([(1, 100), (20, 20)], 16, random)
    builder = model[0].backend.make_builder(context, model[0].config)
    launches = clattn.planned_launches(builder.build(queue, batch.metadata()))
    assert launches and all(launch.items > 0 for launch in launches)
