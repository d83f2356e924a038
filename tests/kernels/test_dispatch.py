"""Which operations run a forward pass, and what is said about the choice; numpy to the device and back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from qconvert.kernels import linear as definition  # noqa: E402
from qconvert.kernels import reference as ref  # noqa: E402
from qconvert.kernels import weights as w  # noqa: E402
from qconvert.kernels.dispatch import Dispatch  # noqa: E402
from qconvert.kernels.select import BackendUnavailable, backend_report, get_backend  # noqa: E402

Tensor = Any


def int8() -> w.Int8Weight:
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    scale = ref.int8_row_scale(x, "fast")
    return w.Int8Weight(ref.int8_encode(x, scale), scale)


def forward(ops: Dispatch, weight: w.Weight, activation: Any, device: Any = "cpu") -> Tensor:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).to(device)
    return ops.linear(x, weight, activation, bias=None, rotation=0, input_scale=None).cpu()


def test_torch_computes_on_the_cpu_and_says_why() -> None:
    ops = Dispatch()
    index = torch.tensor([0, 3])
    want = definition.lookup(index, int8(), rotation=0, dtype=torch.float32)
    assert torch.equal(ops.lookup(index, int8(), rotation=0, dtype=torch.float32), want)
    assert torch.equal(forward(ops, int8(), "int8"), forward(Dispatch("torch"), int8(), "int8"))
    first, second = ops.report()
    assert first.startswith("torch: 1 x lookup Int8Weight (triton: ")
    assert second.startswith("torch: 1 x linear Int8Weight, activations int8 (triton: ")
    with pytest.raises(ValueError, match="unknown operations 'abacus'"):
        Dispatch("abacus")


def test_forced_kernels(device: Any) -> None:
    ops = Dispatch("triton")
    weight = int8()
    there = w.Int8Weight(weight.q.to(device), weight.scale.to(device))
    for _ in range(2):
        assert torch.equal(forward(ops, there, "int8", device), forward(Dispatch("torch"), weight, "int8"))
    index = torch.tensor([0, 3], device=device)
    ops.lookup(index, there, rotation=0, dtype=torch.float32)
    assert ops.report() == [
        "triton: 2 x linear Int8Weight, activations int8",
        "triton: 1 x lookup Int8Weight",
    ]
    plain = w.PlainWeight(torch.zeros(8, 64, device=device))
    with pytest.raises(BackendUnavailable, match="PlainWeight has no matrix kernel"):
        forward(ops, plain, "none", device)
    blocked = w.Fp8Weight(
        torch.zeros(8, 64, dtype=torch.uint8, device=device), torch.ones(1, 1, device=device)
    )
    with pytest.raises(BackendUnavailable, match="128 x 128"):
        ops.lookup(index, blocked, rotation=0, dtype=torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_forced_kernels_without_a_gpu() -> None:
    pytest.importorskip("triton", minversion="3.7")
    code = """
from qconvert.kernels.dispatch import Dispatch
from qconvert.kernels.select import BackendUnavailable, backend_report
try:
    Dispatch("triton")
except BackendUnavailable as error:
    print(error)
print(*backend_report(), sep=", ")
print(*backend_report(ask=True), sep=", ")
"""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    forced, before, after = ran.stdout.splitlines()
    assert forced.startswith("backend 'triton' cannot run here: no GPU")
    assert before == "cpu: not asked for, reference: not asked for, triton: not asked for"
    assert after.startswith("cpu: ready, reference: ready, triton: refused (no GPU")


def test_report_knows_what_was_made() -> None:
    get_backend("cpu")
    assert "cpu: ready" in {str(state) for state in backend_report()}


@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (5, 7, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16", "uint8", "int8", "float64", "int32"])
def test_arrays_come_back_as_they_went(device: Any, dtype: str, shape: tuple[int, ...]) -> None:
    from qconvert.kernels.triton.lanes import Lanes

    lanes = Lanes(device)
    a = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    with lanes.entered() as lane:
        back = lane.download(lane.upload(a))
    assert back.shape == a.shape and back.tobytes() == a.tobytes()
    assert back.dtype == ("int16" if dtype == "uint16" else dtype)


def test_uploads_keep_their_values_while_buffers_are_used_again(device: Any) -> None:
    """Growing, shrinking, strided, read-only; each upload owns its copy, each download too."""
    from qconvert.kernels.triton.lanes import STEP, Lanes

    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(size).astype(np.float32) for size in (5, STEP, 3, STEP // 2, 7, 2 * STEP)]
    arrays += [arrays[1][::3], arrays[0][::-1], np.broadcast_to(np.float32(2.5), (4, 6))]
    with Lanes(device).entered() as lane:
        there = [lane.upload(a) for a in arrays]
        back = [lane.download(t) for t in there]
    for a, b in zip(arrays, back, strict=True):
        np.testing.assert_array_equal(a, b)
        assert b.flags.owndata or b.base is not None
    back[0][:] = 0
    np.testing.assert_array_equal(back[2], arrays[2])


def test_threads_have_lanes_of_their_own(device: Any) -> None:
    """Many threads at the same backend: the same codes as one."""
    pytest.importorskip("triton", minversion="3.7")
    from qconvert.kernels.triton.backend import TritonBackend

    backend, rng = TritonBackend(), np.random.default_rng(2)
    chunks = [rng.standard_normal((2, 64)).astype(np.float32) for _ in range(6)]
    want = [get_backend("reference").mxfp8_encode(x, "fast") for x in chunks]
    found: dict[int, Any] = {}
    lanes = set()

    def work(numbers: range) -> None:
        for i in numbers:
            found[i] = backend.mxfp8_encode(chunks[i], "fast")
        lanes.add(backend.lanes.lane())

    threads = [threading.Thread(target=work, args=(range(start, 6, 3),)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(lanes) == 3
    for i, (q, scales) in enumerate(want):
        np.testing.assert_array_equal(found[i][0], q)
        np.testing.assert_array_equal(found[i][1], scales)
