"""Objects of PyOpenCL: used as they are."""

import clattn
import numpy as np
import pyopencl as cl
import pytest
from clattn import checks


@pytest.fixture
def native():
    device = cl.get_platforms()[0].get_devices()[0]
    context = cl.Context([device])
    return context, device, cl.CommandQueue(context)


def test_adopted_objects_run_a_step(native):
    cl_context, device, cl_queue = native
    context = clattn.Context.adopt(cl_context, device)
    queue = clattn.Queue.adopt(cl_queue)
    assert context.capabilities.name == device.name.strip("\0")
    layer = checks.Layer(context, queue, checks.Case("", checks.DECODE))
    metadata = layer.builder.build(queue, layer.batch.metadata())
    tokens = len(layer.batch.requests)
    query, key, value = (layer.rows(tokens, heads, 1.0) for heads in (8, 2, 2))
    queue.write(layer.cache.buffer, np.zeros(layer.cache.buffer.size_bytes, np.uint8))
    want = np.empty_like(query)
    layer.impl.write_kv_cache(queue, key, value, layer.cache, metadata)
    layer.impl.forward(queue, query, want, layer.cache, metadata)

    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    given = [cl.Buffer(cl_context, flags, hostbuf=x) for x in (query, key, value)]
    output = cl.Buffer(cl_context, cl.mem_flags.READ_WRITE, query.nbytes)
    buffers = [clattn.Buffer.adopt(x) for x in (*given, output)]
    layer.impl.write_kv_cache(queue, buffers[1], buffers[2], layer.cache, metadata)
    layer.impl.forward(queue, buffers[0], buffers[3], layer.cache, metadata)
    got = np.empty_like(query)
    cl.enqueue_copy(cl_queue, got, output)  # the same in-order queue
    np.testing.assert_array_equal(got, want)


def test_a_buffer_goes_to_pyopencl(context, queue):
    buffer = context.allocate(64)
    queue.write(buffer, np.arange(16, dtype=np.float32))
    assert cl.MemoryObject.from_int_ptr(buffer.int_ptr, retain=True).size == 64
