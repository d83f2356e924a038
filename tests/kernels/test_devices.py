"""Layers compute where their tensors lie: nothing mixes tensors of two devices, which only a GPU would refuse.

Tensors of torch's meta device stand for those of a GPU, and every operation is looked at.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.7")

from qconvert.kernels import linear as definition  # noqa: E402
from qconvert.kernels import weights as w  # noqa: E402
from qconvert.kernels.triton import chips, launch, launch_blocks, launch_grid, launch_rows  # noqa: E402
from qconvert.kernels.triton.ops import TritonOps  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

META = torch.device("meta")
#: What moves tensors between devices.
MOVES = ("_to_copy", "copy_", "to")


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices; single numbers may lie anywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
        name = func.overloadpacket.__name__
        assert len(devices) < 2 or name in MOVES, f"{name} mixes {devices}"
        return func(*args, **(kwargs or {}))


def test_the_check_finds_what_is_mixed() -> None:
    table, values = torch.arange(4.0), torch.empty(3, device=META)
    with OneDevice():
        torch.maximum(values, torch.tensor(1.0))
        with pytest.raises(AssertionError, match="searchsorted mixes"):
            torch.searchsorted(table, values)


def methods() -> dict[str, Any]:
    spec = spec_from_file_location("linears", Path(__file__).with_name("test_triton_linear.py"))
    assert spec is not None and spec.loader is not None
    module: ModuleType = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.METHODS
    return found


METHODS = methods()


def there(weight: w.Weight) -> w.Weight:
    fields = {name: value.to(META) for name, value in vars(weight).items() if isinstance(value, torch.Tensor)}
    return w.replace(weight, **fields)  # type: ignore[type-var]


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernels are launched with tensors of the meta device alone, and compute nothing."""
    if not chips.interpreted():
        pytest.skip("this process compiles kernels")
    launched: list[Any] = []

    def getitem(self: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            found = {a.device for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}
            assert found == {META}, f"{self.fn.__name__} is given tensors of {found}"
            launched.append(self.fn.__name__)

        return launch

    monkeypatch.setattr(InterpretedFunction, "__getitem__", getitem)
    return launched


@pytest.mark.parametrize("name", METHODS)
def test_forward(name: str, no_launch: list[Any]) -> None:
    make, activation, rotation, multiple = METHODS[name]
    weight = there(make(37, multiple * (2 if multiple > 1 else 97)))
    x = torch.empty(5, weight.k, dtype=torch.bfloat16, device=META)
    bias, scale = torch.empty(37, device=META), torch.empty((), device=META)
    index = torch.empty(2, 3, dtype=torch.int64, device=META)
    ops = TritonOps()
    ops.device = META
    with OneDevice():
        for run in (definition.linear, ops.linear):
            out = run(x, weight, activation, bias=bias, rotation=rotation, input_scale=scale)
            assert (out.device, out.dtype, out.shape) == (META, torch.bfloat16, (5, 37))
        for look in (definition.lookup, ops.lookup):
            rows = look(index, weight, rotation=0, dtype=torch.float16)
            assert (rows.device, rows.dtype, rows.shape) == (META, torch.float16, (2, 3, weight.k))
    assert no_launch


def test_quantising_and_back(no_launch: list[Any]) -> None:
    x = torch.empty(5, 256, device=META)
    one = torch.empty((), device=META)
    with OneDevice():
        launch.cast(x, "F32", "F16")
        launch.amax(x)
        launch.rotate(x, 64)
        for quality in ("fast", "best"):
            launch_blocks.dequantise_nvfp4(
                *launch_blocks.quantise_nvfp4(x, one, quality, True), one, swizzled=True
            )
            launch_rows.row_scale(x, "int8", quality)
            launch_rows.row_scale(x, "int4", quality)
            codes, s_rel, channel = launch_grid.quantise_grid(x, 16, None, 4, quality, 64)
            launch_grid.dequantise_grid(codes, s_rel, channel, None, 16, 4, rotation=64)
            launch_grid.quantise_grid(x, 16, None, 6, quality, 64)
        launch_blocks.dequantise_mxfp8(*launch_blocks.quantise_mxfp8(x, True), swizzled=True)
        for code in ("int8", "int4", "e4m3"):
            launch_rows.quantise_rows(x, code, 64)
        launch_rows.fp8_fitted_scale(x, torch.empty(5, device=META), "F8_E4M3")
    assert len(set(no_launch)) > 10
