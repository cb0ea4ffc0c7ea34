"""The process's device, and what its layers share."""

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import clattn

#: Variables that set a CPU driver's number of threads: PoCL's up to 4, PoCL's since, Intel's.
THREAD_VARIABLES = ("POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT", "DPCPP_CPU_NUM_CUS")
_CORES = r"(\d+(?:[ ,]\d+)*)"
#: Where vLLM says to which cores OpenMP binds a worker's threads, each in its own syntax.
_BINDINGS = {
    "GOMP_CPU_AFFINITY": re.compile(_CORES),
    "KMP_AFFINITY": re.compile(rf".*\bproclist=\[{_CORES}\].*"),
    "OMP_PLACES": re.compile(rf"\{{{_CORES}\}}"),
}


@dataclass
class Device:
    """A context with the queue on which every step of the process runs in order."""

    context: clattn.Context
    queue: clattn.Queue
    workspace: clattn.AttentionWorkspace = field(default_factory=clattn.AttentionWorkspace)


def bound_cores(environment: Mapping[str, str] = os.environ) -> set[int]:
    """The cores that vLLM gave this worker; empty: none, or something else than a plain list."""
    for name, syntax in _BINDINGS.items():
        if name in environment:
            cores = syntax.fullmatch(environment[name])
            return {int(core) for core in re.split("[ ,]", cores[1])} if cores else set()
    return set()


@contextlib.contextmanager
def threads_on(cores: set[int]) -> Iterator[None]:
    """Starts the driver's threads on these cores.

    OpenMP has bound the calling thread to one of them, and new threads inherit that.
    Without this, workers that share a machine would each use all of it, or one core of their own.
    """
    if not cores:
        yield
        return
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, str(len(cores)))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@functools.cache
def device() -> Device:
    """Opened by the first layer, so after any fork of vLLM's processes.

    The cache and all tensors are memory of the host, so the device is a CPU unless CLATTN_DEVICE
    names another one.
    """
    with threads_on(bound_cores()):
        context = clattn.Context(os.environ.get("CLATTN_DEVICE", "cpu"))
    return Device(context, context.create_queue())
