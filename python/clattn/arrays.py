"""What callers give, as the arrays that the compiled part takes."""

from typing import Any

import numpy as np

from clattn.errors import InvalidArgument


def _array(given: Any, name: str) -> np.ndarray:
    try:
        if isinstance(given, np.ndarray) or not hasattr(given, "__dlpack__"):
            return np.asarray(given)
        return np.from_dlpack(given)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise InvalidArgument(
            f"{name}: {type(given).__name__}, legal: an array: {reason}"
        ) from None


def numbers(given: Any, dtype: str, dims: int, name: str) -> np.ndarray:
    """An array, or lists in one another, as a contiguous array of a type of the same values."""
    array, wanted = _array(given, name), np.dtype(dtype)
    if array.size == 0 and array.ndim != dims:
        array = np.empty((0,) * dims, wanted)
    kinds = "buif" if wanted.kind == "f" else "bui" if wanted.itemsize == 1 else "ui"
    if array.ndim != dims or (array.size > 0 and array.dtype.kind not in kinds):
        found = f"{array.dtype} {list(array.shape)}"
        if array.dtype.kind == "O":
            found = type(given).__name__
        what = "numbers" if wanted.kind == "f" else "integers"
        legal = f"a list or array of {what}" if dims == 1 else f"{what} of {dims} dimensions"
        raise InvalidArgument(f"{name}: {found}, legal: {legal}")
    converted = np.ascontiguousarray(array, wanted)
    if wanted.kind != "f" and array.dtype != wanted and (converted != array).any():
        bounds = np.iinfo(wanted)
        value = array[converted != array][0]
        raise InvalidArgument(f"{name}: {value}, legal: {bounds.min} ... {bounds.max}")
    return converted


def rows(given: Any, dtype: str, name: str) -> np.ndarray:
    """Lists in one another as an array of f32, f16 or bf16."""
    from clattn import reference

    array = _array(given, name)
    if array.dtype.kind not in "uif":
        raise InvalidArgument(f"{name}: {type(given).__name__}, legal: lists of numbers")
    if dtype not in ("f32", "f16", "bf16"):
        raise InvalidArgument(f"{name}: a list, legal: an array of {dtype}")
    return reference.encode(array, dtype)


def same_allocation(key: Any, value: Any) -> bool | None:
    """Whether two arrays are known to be views of one allocation, or of two; None: not known."""
    owners = [_owner(array) for array in (key, value)]
    return None if None in owners else owners[0] == owners[1]


def _owner(array: Any) -> int | None:
    while not hasattr(array, "untyped_storage"):  # which PyTorch's tensors have
        if getattr(array, "base", None) is None:
            return id(array) if isinstance(array, np.ndarray) else None
        array = array.base
    return array.untyped_storage().data_ptr()
