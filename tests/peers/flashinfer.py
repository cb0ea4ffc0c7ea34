"""A module named flashinfer over clattn.flashinfer, for FlashInfer's own tests.

Any other name, and any module in it, is there, too, but raises clattn.Unsupported when called.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import clattn
from clattn import flashinfer as names


class _Part(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "flashinfer.utils":  # questions about CUDA devices
            if name.startswith("is_"):
                return lambda *_, **__: False
            answers = {"get_compute_capability": (8, 0), "has_flashinfer_jit_cache": True}
            if name in answers:
                return lambda *_, **__: answers[name]
        found = getattr(names, name, None)
        own = found is not None and not isinstance(found, types.ModuleType)
        return found if own else _Part(f"{self.__name__}.{name}")

    def __or__(self, _: Any) -> Any:  # in annotations
        return Any

    def __call__(self, *_: Any, **__: Any) -> None:
        raise clattn.Unsupported(f"{self.__name__}: clattn.flashinfer has no such name")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("flashinfer."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> _Part:
        return _Part(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is to be run."""


sys.meta_path.append(_Finder())
sys.modules[__name__] = _Part("flashinfer")
