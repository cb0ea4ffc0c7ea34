"""What the library refuses is an exception with its text."""

import clattn
import numpy as np
import pytest


def config(**changes):
    return clattn.AttentionConfig(
        **({"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "f32"} | changes)
    )


def test_invalid_argument_is_a_value_error():
    text = "dtype: 'f99' is not one of f32, f16"
    with pytest.raises(clattn.InvalidArgument, match=text) as raised:
        config(dtype="f99")
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, clattn.Error)
    assert raised.value.cl_code == 0


def test_unknown_field():
    with pytest.raises(clattn.InvalidArgument, match="AttentionConfig: no field 'heads'"):
        config(heads=3)


def test_unsupported_lists_reasons(context):
    with pytest.raises(clattn.Unsupported, match="head_size") as raised:
        clattn.get_attn_backend(config(head_size=513), context)
    assert isinstance(raised.value, NotImplementedError)


def test_no_such_device():
    with pytest.raises(clattn.InvalidArgument, match="no such device"):
        clattn.Context("no such device")


def test_driver_error_has_its_code(context):
    with pytest.raises(clattn.OpenCLError) as raised:
        context.create_queue().map(clattn.Context().allocate(64))
    assert raised.value.cl_code < 0


def test_batch_errors_name_request_and_field(context, queue):
    backend = clattn.get_attn_backend(config(), context)
    builder = backend.make_builder(context, config())
    batch = clattn.CommonAttentionMetadata(
        np.array([0, 1, 2]), np.array([1, 50]), np.array([[0], [1]])
    )
    with pytest.raises(clattn.InvalidArgument, match="request 1.*50"):
        builder.build(queue, batch)
    with pytest.raises(clattn.InvalidArgument, match="query_start_loc: 2 values.*3"):
        clattn.CommonAttentionMetadata(np.array([0, 1]), np.array([1, 50]))


def test_element_types_have_numpys_names():
    for name, types in (("f16", (np.float16, np.dtype("float16"), "half")), ("f32", (np.float32,))):
        for each in types:
            assert config(dtype=each).dtype == name


def test_tensor_errors(context, queue):
    impl = clattn.get_attn_backend(config(), context).make_impl(context, config())
    backend = clattn.get_attn_backend(config(), context)
    cache = clattn.make_kv_cache(context, queue, backend, config(), 2)
    batch = clattn.CommonAttentionMetadata(np.array([0, 1]), np.array([1]), np.array([[0]]))
    builder = backend.make_builder(context, config())
    metadata = builder.build(queue, batch)
    good = np.zeros((1, 8, 64), np.float32)
    with pytest.raises(clattn.InvalidArgument, match="query: element type is float64, legal: f32"):
        impl.forward(queue, good.astype(float), good, cache, metadata)
    shape = r"output: shape is \[1, 8, 32\], legal: rows of 512"
    with pytest.raises(clattn.InvalidArgument, match=shape):
        impl.forward(queue, good, np.zeros((1, 8, 32), np.float32), cache, metadata)
    with pytest.raises(clattn.InvalidArgument, match="query: .*gaps"):
        impl.forward(queue, np.zeros((1, 8, 128), np.float32)[:, :, ::2], good, cache, metadata)
    legal = "list, legal: an array of the host, a Buffer or a Tensor"
    with pytest.raises(clattn.InvalidArgument, match="output: " + legal):
        impl.forward(queue, good, good.tolist(), cache, metadata)
    with pytest.raises(clattn.InvalidArgument, match="query: list, legal: lists of numbers"):
        impl.forward(queue, [["a"]], good, cache, metadata)
    for name, given in (("query", [good[:0], good]), ("output", [good, good[:0]])):
        text = f"{name}: 0 rows, legal: at least 1, those of the step's tokens"
        with pytest.raises(clattn.InvalidArgument, match=text):
            impl.forward(queue, *given, cache, metadata)
    fixed = good.copy()
    fixed.flags.writeable = False
    with pytest.raises(clattn.InvalidArgument, match="output: read-only memory, legal: a writable"):
        impl.forward(queue, good, fixed, cache, metadata)
    with pytest.raises(clattn.InvalidArgument, match="access is 'rw', legal: read, write"):
        queue.map(cache.buffer, "rw")


def test_fields_of_another_type():
    for fields, text in (
        ({"num_heads": "8"}, "AttentionConfig.num_heads: '8', legal: int"),
        ({"sinks": 3}, r"AttentionConfig.sinks: 3, legal: .*float"),
    ):
        with pytest.raises(clattn.InvalidArgument, match=text):
            config(**fields)
    given = config()
    with pytest.raises(clattn.InvalidArgument, match="AttentionConfig.head_size: None, legal: int"):
        given.head_size = None
    with pytest.raises(AttributeError):
        given.heads = 3
    assert given.head_size == 64
    given.scale = None
