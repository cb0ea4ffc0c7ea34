"""Paged attention for every OpenCL device.

A Context opens a device; a backend makes an AttentionImpl and a builder for an AttentionConfig; the
builder turns each step's CommonAttentionMetadata into AttentionMetadata, with which every layer
writes its cache and attends. Tensors are NumPy arrays, DLPack arrays of the host (PyTorch's) or
Buffers; CPUs work on arrays in place.
"""

from clattn import _clattn
from clattn._clattn import *  # noqa: F403
from clattn.checks import check
from clattn.errors import Error, FileError, InvalidArgument, OpenCLError, OutOfBlocks, Unsupported
from clattn.functions import attention, paged_attention
from clattn.layers import explain, warm_up
from clattn.openmp import openmp_asleep
from clattn.progress import ProgressBar

__version__ = _clattn.__version__  # the library's

__all__ = [name for name in dir(_clattn) if not name.startswith("_")] + [
    "Error",
    "FileError",
    "InvalidArgument",
    "OpenCLError",
    "OutOfBlocks",
    "ProgressBar",
    "Unsupported",
    "attention",
    "check",
    "explain",
    "openmp_asleep",
    "paged_attention",
    "warm_up",
]
