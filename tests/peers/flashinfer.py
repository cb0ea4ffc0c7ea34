"""A module named flashinfer over clattn.flashinfer, for FlashInfer's own tests.

Names that clattn.flashinfer does not have are there, but raise clattn.Unsupported when called.
"""

import sys
import types
from typing import Any

import clattn
from clattn import flashinfer as names

PARTS = """activation attention cascade cudnn decode fp4_quantization jit jit.attention jit.utils
jit.attention.variants mla norm page prefill quantization rope sampling sparse testing triton utils
"""


def _absent(name: str) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise clattn.Unsupported(f"{name}: clattn.flashinfer has no such name")

    return call


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(names, name, None) or _absent(f"{self.__name__}.{name}")


class _Utils(_Module):
    """Questions about CUDA devices, answered so that tests take the plainest kernels."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *_, **__: False
        return super().__getattr__(name)

    @staticmethod
    def has_flashinfer_jit_cache() -> bool:  # nothing is to be compiled before
        return True

    @staticmethod
    def get_compute_capability(_: Any) -> tuple[int, int]:
        return 8, 0


__path__: list[str] = []
for _part in PARTS.split():
    _name = f"flashinfer.{_part}"
    sys.modules[_name] = (_Utils if _part == "utils" else _Module)(_name)
    sys.modules[_name].__path__ = []
    _owner = sys.modules[_name.rpartition(".")[0]]
    setattr(_owner, _part.rpartition(".")[2], sys.modules[_name])


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(names, name, None) or _absent(f"flashinfer.{name}")
