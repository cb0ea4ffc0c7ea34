"""PyTorch's threads while a CPU's driver computes."""

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

#: Enough for a sem_t of any Linux.
_SEMAPHORE_BYTES = 64


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """The C library, and PyTorch's OpenMP runtime: GCC's, or LLVM's under GCC's names."""
    process = ctypes.CDLL(None)
    pytorch = Path(sys.modules["torch"].__file__).parent / "lib" / "libtorch_cpu.so"
    # A preloaded runtime is called in place of PyTorch's own.
    if hasattr(process, "GOMP_parallel_start"):
        return process, process
    with contextlib.suppress(OSError):
        runtime = ctypes.CDLL(str(pytorch))
        if hasattr(runtime, "GOMP_parallel_start"):
            return process, runtime
    return None


@contextlib.contextmanager
def openmp_asleep() -> Iterator[None]:
    """Lets the OpenMP threads of the calling thread sleep until the block ends.

    After each operation PyTorch's threads wait in a busy loop for the next one, for about ten
    milliseconds, on the cores that the threads of a CPU's OpenCL driver need. Use this around calls
    that compute on a CPU. It costs about 20 microseconds, and PyTorch's operations inside the block
    run on one thread. It does nothing without PyTorch, inside a parallel region, or outside Linux.
    """
    usable = sys.platform == "linux" and "torch" in sys.modules
    libraries = _libraries() if usable else None
    if libraries is None or libraries[1].omp_in_parallel():
        yield
        return
    c, openmp = libraries
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    c.sem_init(semaphore, 0, 0)
    # Every thread of the team but this one begins with sem_wait(semaphore).
    wait = ctypes.cast(c.sem_wait, ctypes.c_void_p)
    openmp.GOMP_parallel_start(wait, semaphore, openmp.omp_get_max_threads())
    sleeping = openmp.omp_get_num_threads() - 1
    try:
        yield
    finally:
        for _ in range(sleeping):
            c.sem_post(semaphore)
        openmp.GOMP_parallel_end()
