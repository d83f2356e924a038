"""Offsets beyond 2^31: flat kernels are launched in parts, all others count rows and tiles in 64 bit.

Nothing of that size is allocated: a file with a hole in it stands for the memory between two rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.7")

from qconvert.kernels import reference as ref  # noqa: E402
from qconvert.kernels.triton import elementwise, launch, launch_blocks, launch_rows  # noqa: E402
from qconvert.kernels.triton.launch_linear import Operand, multiply  # noqa: E402

Tensor = Any
FAR = (1 << 31) + 4096


@pytest.mark.parametrize("size", [1, 255, 256, 257, 768, 1000])
def test_flat_kernels_are_launched_in_parts(device: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 256 values a launch, whatever the size: every value once, in its place."""
    monkeypatch.setattr(launch, "FLAT_LIMIT", 256)
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    sizes: list[int] = []

    class Counted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def run(part: Tensor, out: Tensor, count: int, **rest: Any) -> Any:
                sizes.append(count)
                return self.kernel[grid](part, out, count, **rest)

            return run

    for name in ("cast", "largest_bits", "rotate"):
        monkeypatch.setattr(elementwise, name, Counted(getattr(elementwise, name)))
    there = x.to(device)
    assert torch.equal(launch.cast(there, "F32", "F16").cpu(), x.to(torch.float16))
    parts = [256] * (size // 256) + [size % 256] * (size % 256 > 0)
    assert sizes == parts
    assert float(launch.amax(there)) == float(x.abs().max())
    assert sizes == parts * 2
    if size % 16 == 0:
        assert torch.equal(launch.rotate(there, 16).cpu(), ref.rotate(x, 16))
        assert sizes == parts * 3


def test_the_limit_keeps_offsets_in_32_bits() -> None:
    """The last offset of a part, rounded up to a block, and parts that hold whole groups of a rotation."""
    assert launch.FLAT_LIMIT + 8192 < 1 << 31
    assert launch.FLAT_LIMIT % 1024 == 0


def holes(path: Path, count: int, dtype: Any) -> Tensor:
    """`count` zeros that take no memory before they are touched."""
    size = count * torch.empty(0, dtype=dtype).element_size()
    with path.open("wb") as file:
        file.truncate(size)
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype)


@pytest.fixture
def interpreted_only(device: Any) -> None:
    if device.type != "cpu":
        pytest.skip("memory that is not there is for the interpreter")


def test_rows_far_apart(interpreted_only: None, tmp_path: Path) -> None:
    """Row 1 begins more than 2^31 values after row 0."""
    k = 64
    memory = holes(tmp_path / "f16", FAR + k, torch.float16)
    x = torch.randn(2, k, generator=torch.Generator().manual_seed(1)).to(torch.float16)
    memory[:k], memory[FAR:] = x[0], x[1]
    far = torch.as_strided(memory, (2, k), (FAR, 1))
    wide = x.float()
    q, scale = launch_rows.quantise_rows(far, "int8", 16)
    want = ref.rotate(wide, 16)
    assert torch.equal(scale, ref.int8_row_scale(want, "fast"))
    assert torch.equal(q, ref.int8_encode(want, scale))
    for ours, theirs in zip(
        launch_blocks.quantise_nvfp4(far, torch.tensor(0.001), "fast", False),
        ref.nvfp4_encode(wide, torch.tensor(0.001), "fast"),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(launch_blocks.quantise_mxfp8(far), ref.mxfp8_encode(wide), strict=True):
        assert torch.equal(ours, theirs)


def test_a_table_of_more_than_2_31_values(interpreted_only: None, tmp_path: Path) -> None:
    k = 64
    rows = math.ceil(FAR / k)
    memory = holes(tmp_path / "table", rows * k, torch.int8)
    table = memory.reshape(rows, k)
    index = torch.tensor([0, rows - 1, rows // 2, rows - 1])
    values = torch.randint(-127, 128, (3, k), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    table[index[:3]] = values
    scale = torch.tensor(0.125)
    found = launch_rows.dequantise_rows(table, scale, "I8", 0, "F32", index)
    assert torch.equal(found, (values * scale)[[0, 1, 2, 1]])


def test_tiles_of_a_product_far_apart(interpreted_only: None, tmp_path: Path) -> None:
    """Tile 1 of the weight begins more than 2^31 values after tile 0: 32 rows of 2^26 + 128 values between them."""
    k, n, stride = 64, 48, (1 << 26) + 128
    memory = holes(tmp_path / "weight", (n - 1) * stride + k, torch.int8)
    weight = torch.as_strided(memory, (n, k), (stride, 1))
    values = torch.randint(-127, 128, (n, k), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    weight.copy_(values)
    assert (n - 16) * stride > 1 << 31
    x = torch.randint(-127, 128, (3, k), generator=torch.Generator().manual_seed(4), dtype=torch.int8)
    out = multiply(
        Operand(x, "I8", factor=torch.ones(3)), Operand(weight, "I8", factor=torch.ones(n)), k, None, "F32"
    )
    assert torch.equal(out, (x.double() @ values.double().T).float())
