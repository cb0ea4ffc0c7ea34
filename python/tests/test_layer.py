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
    backend, config = model[0].backend, model[0].config
    assert backend.validate_layout(backend.preferred_layout(context), config, context) == []
    odd = clattn.AttentionConfig(
        num_heads=8, num_kv_heads=2, head_size=64, block_size=5, dtype="f32"
    )
    assert backend.validate_layout("HDN", odd, context)
    assert backend.validate_configuration(odd, context) == []


def test_scales(context):
    registry = clattn.LayerRegistry()
    options = clattn.AttentionOptions(
        num_heads=8,
        head_size=64,
        prefix="layers.2",
        cache_config=clattn.CacheConfig(cache_dtype="fp8_e4m3"),
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


def test_plan_of_a_step(context, queue, model, random):
    batch = checks.Batch([(1, 100), (20, 20)], 16, random)
    builder = model[0].backend.make_builder(context, model[0].config)
    launches = clattn.planned_launches(builder.build(queue, batch.metadata()))
    assert launches and all(launch.items > 0 for launch in launches)
