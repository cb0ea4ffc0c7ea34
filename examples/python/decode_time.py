#!/usr/bin/env python3
"""Plots decode time by context length on every OpenCL device of the machine.

    pip install build/python/wheels/clattn-*.whl matplotlib    # ./dev python builds the wheel
    examples/python/decode_time.py --batch 4 --output decode_time.png
"""

import argparse

import clattn
import numpy as np

BLOCK_SIZE = 16


def decode_ms(context, config, batch_size, length, repeats):
    """Milliseconds of one layer's forward() for requests of this length: the least of some."""
    queue = context.create_queue(profiling=True)
    backend = clattn.get_attn_backend(config, context)
    impl = backend.make_impl(context, config)
    pages = -(-length // BLOCK_SIZE)
    cache = clattn.make_kv_cache(context, queue, backend, config, batch_size * pages)
    batch = clattn.CommonAttentionMetadata(
        np.arange(batch_size + 1),
        np.full(batch_size, length),
        np.arange(batch_size * pages).reshape(batch_size, pages),
    )
    builder = backend.make_builder(context, config)
    metadata = builder.build(queue, batch)
    bytes_of_rows = batch_size * config.num_heads * config.head_size * 2
    query, output = context.allocate(bytes_of_rows), context.allocate(bytes_of_rows)
    queue.write(query, np.zeros(bytes_of_rows, np.uint8))
    with clattn.ProgressBar("compiling") as progress:
        clattn.warm_up(queue, [impl], progress)
    times = []
    for _ in range(repeats):
        event = impl.forward(queue, query, output, cache, metadata)
        queue.finish()
        times.append(event.duration_ns() / 1e6)
    return min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1, help="requests of a step")
    parser.add_argument("--longest", type=int, default=16384, help="tokens of the longest context")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", default="decode_time.png")
    arguments = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    config = clattn.AttentionConfig(
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        head_size=arguments.head_size,
        block_size=BLOCK_SIZE,
        dtype="f16",
    )
    lengths = [2**i for i in range(8, arguments.longest.bit_length())]
    figure, axes = pyplot.subplots()
    for device in clattn.devices():
        context = clattn.Context(device)
        times = [
            decode_ms(context, config, arguments.batch, length, arguments.repeats)
            for length in lengths
        ]
        for length, time in zip(lengths, times, strict=True):
            print(f"{context.capabilities.name}: {length:6} tokens {time:9.3f} ms")
        axes.loglog(lengths, times, marker="o", base=2, label=context.capabilities.name)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("ms per layer and step")
    axes.set_title(f"Decode, {arguments.batch} requests, f16")
    axes.legend()
    figure.savefig(arguments.output, dpi=150)
    print(f"plotted in {arguments.output}")


if __name__ == "__main__":
    main()
