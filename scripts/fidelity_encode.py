"""What `bench_fidelity` compares: each format as qconvert, comfy-kitchen and convert_to_quant write it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from qconvert.formats.calibrated import Moments, encode_calibrated
from qconvert.formats.registry import codec as get_codec
from qconvert.kernels.select import get_backend

F32 = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]
#: ConvRot groups that runtimes serve; the largest that divides K is used.
GROUPS = (256, 64, 16)


@dataclass(frozen=True)
class Form:
    """A format as the tables name it: codec, its options, and the arguments of the others' converters."""

    title: str
    codec: str
    rotated: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    #: None: it has no such format.
    kitchen: Mapping[str, Any] | None = field(default_factory=dict)
    peer: tuple[str, ...] | None = None

    def group(self, k: int) -> int:
        return max((g for g in GROUPS if k % g == 0), default=0) if self.rotated else 0


_W4A8 = {"bits": 4, "group": 16, "codebook": True, "correction": False, "grid": True, "signed": False}
FORMS = (
    Form("fp8 scalar", "float8", False, {"kind": "F8_E4M3", "scale": "scalar"}, {"scale": "recalculate"}, ()),
    Form("fp8 row", "float8", False, {"kind": "F8_E4M3", "scale": "row"}, None, ("--scaling_mode", "row")),
    Form("int8 row", "int8", False, {"scale": "row"}, {"per_channel": True, "scale": "recalculate"},
         ("--int8", "--scaling_mode", "row")),
    Form("int8 ConvRot", "int8", True, {"scale": "row"},
         {"per_channel": True, "convrot": True, "scale": "recalculate"},
         ("--int8", "--scaling_mode", "row", "--convrot")),
    Form("nvfp4", "nvfp4", False, {"nibbles": "high", "scales": "swizzled"}, {}, ("--nvfp4",)),
    Form("mxfp8", "mxfp8", False, {"scales": "swizzled", "source": "weight_scale"}, {}, ("--mxfp8",)),
    Form("w4a4 ConvRot", "w4a4", True, {"linear_dtype": "int4"}, {}, None),
    Form("w4a8 ConvRot", "w4a8", True, _W4A8 | {"srel_dtype": "F8_E4M3", "source": "weight_s_rel"}, {}, None),
)  # fmt: skip


def ours(form: Form, w: F32, quality: Literal["fast", "best"], moments: F32 | None = None) -> Tensors:
    """The layer's tensors as qconvert's codec writes them in one piece; `moments` of its inputs: calibrated."""
    backend, codec, group = get_backend("cpu"), get_codec(form.codec), form.group(w.shape[1])
    options = {**form.options, "rotation": group, "shape": w.shape}
    x = backend.rotate(w, group) if group else w
    statistic: Any = {"none": None, "amax": backend.amax(x), "sample": x}[codec.statistic(options)]
    common = codec.prepare(statistic, options, backend, quality)
    if quality == "best" and codec.fits(options):
        common = codec.fit(common, x, options, backend)
    if moments is None:
        codes = codec.encode(x, common, options, backend, quality)
    else:
        known = Moments.of(moments, group, backend)
        codes = encode_calibrated(codec, x, common, options, backend, quality, known)
    return codec.store(codes, options, w.shape[1])


def kitchen(form: Form, w: F32) -> Tensors:
    """The same from comfy-kitchen's layouts, given float32 (its formulas round less there than in bfloat16)."""
    import comfy_kitchen.tensor as ck
    import torch

    assert form.kitchen is not None

    layout: Any = {
        "float8": ck.TensorCoreFP8Layout,
        "int8": ck.TensorWiseINT8Layout,
        "nvfp4": ck.TensorCoreNVFP4Layout,
        "mxfp8": ck.TensorCoreMXFP8Layout,
        "w4a4": ck.TensorCoreConvRotW4A4Layout,
        "w4a8": ck.AsymW4A8Int8Layout,
    }[form.codec]
    group = {"convrot_groupsize": form.group(w.shape[1])} if form.rotated else {}
    q, p = layout.quantize(torch.from_numpy(w), **form.kitchen, **group)
    tensors = {"weight": q, "weight_scale": p.scale}
    if form.codec == "nvfp4":
        tensors = {"weight": q, "weight_scale": p.block_scale, "weight_scale_2": p.scale}
    elif form.codec == "w4a8":
        assert p.correction is None
        tensors = {"weight": q, "weight_s_rel": p.scale, "weight_s_channel": p.s_channel}
        tensors["weight_codebook"] = p.codebook
    return {name: _numpy(tensor) for name, tensor in tensors.items()}


def _numpy(tensor: Any) -> NDArray[Any]:
    import torch

    tensor = tensor.detach().cpu().contiguous()
    array: NDArray[Any] = (tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.element_size() == 1
                           else tensor).numpy()  # fmt: skip
    return array


# ---- safetensors, read and written without qconvert

_TYPES = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "I8": np.int8, "U8": np.uint8}
_TYPES |= {"F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I64": np.int64}


def read_file(path: Path) -> Tensors:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    out = {}
    for name, entry in header.items():
        if name != "__metadata__":
            a, b = entry["data_offsets"]
            raw = np.frombuffer(data, np.uint8, b - a, 8 + size + a)
            out[name] = raw.view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    return out


def write_file(path: Path, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        for _, array in tensors.values():
            out.write(np.ascontiguousarray(array).tobytes())


def to_bf16(w: F32) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(w, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


#: Iterations of convert_to_quant's learned rounding (its default is 4,000: hours for these tables on a CPU).
ITERATIONS = 50


def peer(
    form: Form, weights: Mapping[str, F32], python: str, learned: bool
) -> dict[str, tuple[Tensors, int]] | str:
    """convert_to_quant on one file of all weights: layer -> (tensors, ConvRot group it states).

    `learned`: its learned rounding, cut short; otherwise its quick mode.
    """
    if form.peer is None:
        return "has no such format"
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.safetensors", Path(folder) / "out.safetensors"
        names = {name: f"blocks.{i}.linear" for i, name in enumerate(weights)}
        write_file(source, {f"{names[n]}.weight": ("BF16", to_bf16(w)) for n, w in weights.items()})
        command = [python, "-P", "-c", "from convert_to_quant.cli.main import main; main()"]
        command += ["-i", str(source), "-o", str(output), "--comfy_quant", "--device", "cpu"]
        command += ["--num_iter", str(ITERATIONS)] if learned else ["--simple"]
        run = subprocess.run([*command, *form.peer], capture_output=True, text=True, cwd=folder)
        if not output.exists():
            return (run.stderr or run.stdout).strip().splitlines()[-1]
        tensors = read_file(output)
    out = {}
    for name, prefix in names.items():
        own = {
            key.removeprefix(prefix + "."): t for key, t in tensors.items() if key.startswith(prefix + ".")
        }
        marker = json.loads(own.pop("comfy_quant").tobytes()) if "comfy_quant" in own else {}
        marker |= marker.get("params", {})
        out[name] = (own, int(marker.get("convrot_groupsize", 256)) if marker.get("convrot") else 0)
    return out
