"""Long calls let other threads run, and what the library says reaches Python."""

import sys
import threading
import time

import clattn
import pytest


@pytest.fixture
def layer(context):
    registry = clattn.LayerRegistry()
    options = clattn.AttentionOptions(num_heads=4, head_size=40, dtype="f32", prefix="layers.0")
    return clattn.Attention(context, registry, options)


def test_warm_up_releases_the_gil(context, queue):
    config = clattn.AttentionConfig(num_heads=4, num_kv_heads=4, head_size=40, dtype="f32")
    impl = clattn.get_attn_backend(config, context).make_impl(context, config)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    usual = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    thread.start()
    sys.setswitchinterval(1000)  # a thread that waits gets the interpreter if it is released alone
    try:
        before, start = len(ticks), time.monotonic()
        while time.monotonic() - start < 0.3:
            impl.warm_up(queue)
        during = len(ticks) - before
    finally:
        sys.setswitchinterval(usual)
        stop.set()
        thread.join()
    assert during >= 5


def test_warm_up_tells_its_progress(context, queue, layer):
    told = []
    config = layer.config
    backend = layer.backend
    impls = [backend.make_impl(context, config) for _ in range(2)]
    clattn.warm_up(queue, impls, progress=lambda *step: told.append(step))
    assert told == [(0, 2), (1, 2), (2, 2)]


def test_log_reaches_a_function(context):
    said = []
    clattn.set_log("debug", lambda level, text: said.append((level, text)))
    try:
        clattn.explain(context, num_heads=3, head_size=24, dtype="f32", prefix="layers.0")
    finally:
        clattn.set_log("off")
    assert {level for level, _ in said} <= {"info", "debug"} and said
    assert any("decode" in text for _, text in said)
    with pytest.raises(clattn.InvalidArgument, match="level is 'loud', legal: off, info"):
        clattn.set_log("loud")


def test_a_sink_that_raises_does_no_harm(context, monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: unraisable.append(error.exc_value))
    clattn.set_log("debug", lambda level, text: 1 / 0)
    try:
        clattn.explain(context, num_heads=5, head_size=24, dtype="f32", prefix="layers.0")
    finally:
        clattn.set_log("off")
    assert unraisable and all(isinstance(error, ZeroDivisionError) for error in unraisable)
