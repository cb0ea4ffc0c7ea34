"""What python -m clattn shows: the devices, whether the best one is right, and how fast it is."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from clattn import _clattn, checks, reference
from clattn.errors import Error
from clattn.progress import ProgressBar

#: Llama 3 8B's.
LAYER = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "f16"}
#: A batch is shortened until its launch takes no longer.
LAUNCH_S = 0.3
#: How long a run of consecutive launches takes, and how many runs there are.
RUN_S = 0.2
RUNS = 5
#: After this time, what is left is measured once, and at the probe's length.
HURRY_S = 40
#: The length from which the time of the whole one is estimated.
PROBE_LENGTH = 256
#: Compared with the reference before anything is measured: decodes, a prompt and chunks together.
CASES = [case for case in checks.CASES if case.name in ("mixed", "f16")]


@dataclass(frozen=True)
class Work:
    """A step of requests of one length; of a prompt every token is new."""

    name: str
    requests: int
    length: int
    is_prompt: bool = False

    @property
    def new_tokens(self) -> int:
        return self.length if self.is_prompt else 1

    def rate(self, config: _clattn.AttentionConfig, seconds: float) -> str:
        """Operations of both products over the keys that a token sees, or bytes of K and V."""
        if self.is_prompt:
            seen = self.requests * self.length * (self.length + 1) // 2
            operations = 4 * seen * config.num_heads * config.head_size
            return f"{operations / seconds / 1e12:8.3g} TFLOP/s"
        elements = 2 * self.requests * self.length * config.num_kv_heads * config.head_size
        return f"{elements * 2 / seconds / 1e9:8.3g} GB/s"


WORKS = [
    Work("decode", 1, 4096),
    Work("decode", 16, 4096),
    Work("prompt", 1, 1024, is_prompt=True),
]


class Layer:
    """A layer's kernels, compiled."""

    def __init__(self, context: _clattn.Context) -> None:
        self.context, self.queue = context, context.create_queue()
        self.config = _clattn.AttentionConfig(**LAYER)
        self.backend = _clattn.get_attn_backend(self.config, context)
        self.impl = self.backend.make_impl(context, self.config)
        self.impl.warm_up(self.queue)
        self.random = np.random.default_rng(3)
        # Repeated where a cache is larger; an odd number, so that pages do not repeat with it.
        self.elements = self.values((1 << 20) - 1)

    def values(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, np.float32).astype(np.float16)

    def kernels(self) -> list[str]:
        return [
            f"{kernel.role:8} {kernel.name:26} tiles of {kernel.block_rows} rows and "
            f"{kernel.block_kv} keys, groups of {kernel.work_group_size}"
            for kernel in self.impl.kernels()
            if kernel.role in ("decode", "prefill")
        ]


class Step:
    """A step in device memory: its cache is full, and its pages follow each other."""

    def __init__(self, layer: Layer, work: Work) -> None:
        self.layer, self.work = layer, work
        context, queue, config = layer.context, layer.queue, layer.config
        self.pages = -(-work.length // config.block_size)
        blocks = work.requests * self.pages
        self.cache = _clattn.make_kv_cache(context, queue, layer.backend, config, blocks)
        self.stored = np.resize(layer.elements, self.cache.buffer.size_bytes // 2)
        queue.write(self.cache.buffer, self.stored)
        rows = work.requests * work.new_tokens
        self.query = layer.values(rows, config.num_heads, config.head_size)
        self.input = context.allocate(self.query.nbytes)
        self.output = context.allocate(self.query.nbytes)
        queue.write(self.input, self.query)
        queue.write(self.output, np.full_like(self.query, np.nan))  # what is left out shows
        self.builder = layer.backend.make_builder(context, config)
        self.metadata = self.builder.build(
            queue,
            _clattn.CommonAttentionMetadata(
                np.arange(work.requests + 1) * work.new_tokens,
                np.full(work.requests, work.length),
                np.arange(blocks).reshape(work.requests, self.pages),
            ),
        )

    def seconds(self, launches: int) -> float:
        """Of one launch of several."""
        queue, impl = self.layer.queue, self.layer.impl
        start = time.perf_counter()
        for _ in range(launches):
            impl.forward(queue, self.input, self.output, self.cache, self.metadata)
        queue.finish()
        return (time.perf_counter() - start) / launches

    def fault(self) -> str | None:
        """Why the last launch's output is wrong: all of it is looked at, some rows compared."""
        config = self.layer.config
        output = np.empty_like(self.query)
        self.layer.queue.read(self.output, output)
        if not np.isfinite(output).all():
            return "the output is not finite everywhere"
        pages = slice(-self.pages, None)  # the last request's, and of its rows the last
        key, value = (
            side[pages].reshape(-1, *side.shape[2:])[: self.work.length].astype(np.float64)
            for side in checks.pages_of(self.stored, self.cache)
        )
        rows = slice(-min(self.work.new_tokens, 2), None)
        query = self.query[rows].astype(np.float64)
        options = reference.Options(scale=config.head_size**-0.5)
        wanted, _ = reference.attention(query, key, value, options)
        # Twice what rounding the output and, in some kernels, the weights may change.
        sizes, _ = reference.attention(query, key, np.abs(value), options)
        weights = any(kernel.rounds_probabilities for kernel in self.layer.impl.kernels())
        allowed = 2 * (1 + weights) * reference.ROUNDOFF[config.dtype] * sizes + 2e-5
        share = float((np.abs(output[rows] - wanted) / allowed).max())
        return f"the error is {share:.2g} times what is allowed" if share > 1 else None


def _fitting(layer: Layer, work: Work, hurry: float) -> Step:
    """The work, or, where a launch of it would take too long, the same of a shorter length."""
    probe = Step(layer, replace(work, length=min(work.length, PROBE_LENGTH)))
    probe.seconds(1)  # drivers may have something left to do at the first one
    once = probe.seconds(1)
    largest = layer.context.capabilities.max_alloc_bytes
    length, cache_bytes = probe.work.length, probe.cache.buffer.size_bytes
    while length < work.length:
        once *= 4 if work.is_prompt else 2
        cache_bytes *= 2
        if once > LAUNCH_S or 2 * cache_bytes > largest:
            break
        length *= 2
    if length == probe.work.length or time.monotonic() > hurry:
        return probe
    return Step(layer, replace(work, length=min(length, work.length)))


def _measured(layer: Layer, work: Work, hurry: float) -> tuple[Work, float | str]:
    """What was measured, and a launch's seconds or why it is wrong."""
    step = _fitting(layer, work, hurry)
    step.seconds(1)
    fault = step.fault()
    if fault is not None:
        return step.work, fault
    launches = min(max(int(RUN_S / step.seconds(1)), 1), 1000)
    times = [step.seconds(launches)]
    while len(times) < RUNS and time.monotonic() < hurry:
        times.append(step.seconds(launches))
    return step.work, statistics.median(times)


def _line(config: _clattn.AttentionConfig, work: Work, found: float | str) -> str:
    name = f"{work.name}, {work.requests} x {work.length} tokens"
    if isinstance(found, str):
        return f"  {name:28} FAILED: {found}"
    return f"  {name:28} {found * 1e3:9.3f} ms {work.rate(config, found)}"


def device_lines() -> list[str]:
    """What is known of each device; one that its driver cannot open does not hide the others."""
    lines = []
    for device in _clattn.devices():
        try:
            found = _clattn.Context(device).capabilities
        except Error as error:
            lines.append(f"  {device.selector:5} not usable: {str(error).splitlines()[0]}")
            continue
        lines.append(
            f"  {device.selector:5} {found.kind}  {found.name} ({found.platform_name}), "
            f"{found.compute_units} compute units, {found.global_mem_bytes / 2**30:.1f} GiB"
        )
    return lines


def show(say: Callable[[str], object] = print) -> int:
    """Lists the devices, checks and measures the best one; 1 if a result was wrong."""
    hurry = time.monotonic() + HURRY_S
    say("Devices:")
    for line in device_lines():
        say(line)
    chosen = _clattn.select_device()
    context = _clattn.Context(chosen)
    with ProgressBar("compiling") as progress:
        progress(0, 1)
        layer = Layer(context)
        progress(1, 1)
    say(f"On {chosen.selector} (CLATTN_DEVICE chooses another), a layer of Llama 3 8B's shape, 32")
    say("query heads on 8 KV heads of 128 in f16, runs by (python -m clattn explain says why):")
    for line in layer.kernels():
        say(f"  {line}")
    results, measured = [], []
    with ProgressBar("checking and measuring") as progress:
        total = len(CASES) + len(WORKS)
        progress(0, total)
        for case in CASES:
            results.append(checks.run(context, layer.queue, case))
            progress(len(results), total)
        for work in WORKS:
            measured.append(_measured(layer, work, hurry))
            progress(len(results) + len(measured), total)
    say("Compared with NumPy in double precision (python -m clattn check compares more):")
    for result in results:
        say(f"  {result}")
    say("Measured, each result compared first:")
    for work, found in measured:
        say(_line(layer.config, work, found))
    say(f"ms: one forward() among equal ones in a queue, the median of up to {RUNS} runs.")
    say("GB/s: keys and values in the cache, read once; the device's caches may hold small ones.")
    say("TFLOP/s: both products of a prompt, over the keys that each token sees.")
    if any(work not in WORKS for work, _ in measured):
        say("Lengths are below 4096 and 1024 where a launch would take too long or much memory.")
    right = all(result.passed for result in results)
    return 0 if right and not any(isinstance(found, str) for _, found in measured) else 1
