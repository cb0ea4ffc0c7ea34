"""PyTorch's threads while a CPU's driver computes."""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

#: Enough for a sem_t of any Linux.
_SEMAPHORE_BYTES = 64


#: Threads do not survive a fork, which the runtime does not know.
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _libraries(pytorch: str) -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """The C library, and PyTorch's OpenMP runtime: GCC's, or LLVM's under GCC's names."""
    process = ctypes.CDLL(None)
    # A preloaded runtime is called in place of PyTorch's own.
    if hasattr(process, "GOMP_parallel_start"):
        return process, process
    with contextlib.suppress(OSError):
        runtime = ctypes.CDLL(str(Path(pytorch).parent / "lib" / "libtorch_cpu.so"))
        if hasattr(runtime, "GOMP_parallel_start"):
            return process, runtime
    return None


def _usable() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    pytorch = getattr(sys.modules.get("torch"), "__file__", None)
    if sys.platform != "linux" or _forked or pytorch is None:
        return None
    return _libraries(pytorch)


@contextlib.contextmanager
def openmp_asleep() -> Iterator[None]:
    """Lets the OpenMP threads of the calling thread sleep until the block ends.

    After each operation PyTorch's threads wait in a busy loop for the next one, for about ten
    milliseconds, on the cores that the threads of a CPU's OpenCL driver need. Use this around calls
    that compute on a CPU. It costs about 20 microseconds, and PyTorch's operations inside the block
    run on one thread. It does nothing without PyTorch, inside a parallel region, in a process that
    was forked, or outside Linux.
    """
    libraries = _usable()
    if libraries is None or libraries[1].omp_in_parallel():
        yield
        return
    c, openmp = libraries
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    c.sem_init(semaphore, 0, 0)
    # Every thread of the team but this one begins with sem_wait(semaphore).
    wait = ctypes.cast(c.sem_wait, ctypes.c_void_p)
    sleeping = None
    try:
        openmp.GOMP_parallel_start(wait, semaphore, openmp.omp_get_max_threads())
        sleeping = openmp.omp_get_num_threads() - 1
        yield
    finally:
        if sleeping is not None:
            for _ in range(sleeping):
                c.sem_post(semaphore)
            openmp.GOMP_parallel_end()
