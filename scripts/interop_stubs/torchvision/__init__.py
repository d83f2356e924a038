"""Stands in for torchvision while sglang is imported on a CPU.

The published torchvision is built against a GPU torch and cannot be loaded beside the CPU one. Nothing that the
comparison runs uses it; sglang and transformers only name some of its classes and functions when they are imported.
So every submodule exists here, and everything in one is a class that refuses to be made.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    """Used as dictionary keys at import, so these must be real values."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _refuse(self: object, *_: object, **__: object) -> NoReturn:
    raise NotImplementedError(f"torchvision's {type(self).__name__} is not here: this is a stand-in")


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return InterpolationMode
        made = type(name, (), {"__init__": _refuse, "__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
