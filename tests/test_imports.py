"""Who may import whom, and what the quick commands must not load."""

from __future__ import annotations

import ast
import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: From the bottom up: a package may import itself and what comes before it.
ORDER = ("kernels", "formats", "runtime", "convert")
DOTTED = re.compile(r"qconvert\.[A-Za-z_][\w.]*")


def python_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    if "scripts" in folders:
        files += [
            path
            for path in (ROOT / "scripts").iterdir()
            if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3")
        ]
    return sorted(files)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, inside functions and as strings for lazy imports too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield node.lineno, base
            if base == "qconvert":
                for name in node.names:
                    yield node.lineno, f"qconvert.{name.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            yield node.lineno, node.value


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_down(package: str) -> None:
    files = python_files(package)
    assert files
    above = ORDER[ORDER.index(package) + 1 :]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for line, name in imported(path)
        if name.startswith("qconvert.") and name.split(".")[1] in above
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_folders_as_top_level_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files(*ORDER, "src", "tests", "scripts")
        for line, name in imported(path)
        if name.split(".")[0] in ORDER or (name.startswith(".") and path.is_relative_to(ROOT / "tests"))
    ]
    assert not wrong, "\n".join(wrong)


def test_relative_imports_stay_inside_their_package() -> None:
    """The build maps the folders to packages, so a relative import upwards would read well and mislead."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files(*ORDER)
        for line, name in imported(path)
        if name.startswith("..")
    ]
    assert not wrong, "\n".join(wrong)


def test_formats_and_contracts_import_no_heavy_library() -> None:
    """Formats compute through the backend they are handed; contracts see headers only.

    One module may: torch's own files are opened by torch.load alone, and only when there is one to open.
    """
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files("formats", "runtime/contracts")
        if path.relative_to(ROOT).as_posix() != "formats/pickle_container.py"
        for line, name in imported(path)
        if name.split(".")[0] in ("torch", "numba", "triton", "safetensors")
        and path.name != "pickle_container.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_numpy_is_imported_when_something_is_computed() -> None:
    """Headers and plans need no numbers: modules that they load take numpy from kernels/arrays.py, which waits."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files("formats", "runtime", "convert")
        # Layers are torch's modules; torch imports numpy itself.
        if not path.is_relative_to(ROOT / "runtime" / "layers")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if (isinstance(node, ast.Import) and any(name.name.split(".")[0] == "numpy" for name in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "numpy")
    ]
    assert not wrong, "\n".join(wrong)


def write_plain(path: Path) -> None:
    """A small file without any quantised layer: two linears and a norm."""
    tensors = {f"blocks.{i}.attn.to_q.weight": ("BF16", [64, 256], bytes(2 * 64 * 256)) for i in range(2)}
    write_tensors(path, tensors | {"blocks.0.norm.weight": ("F32", [256], bytes(4 * 256))})


def write_file(path: Path) -> None:
    """A small file that the default contract accepts: one nvfp4 layer with all its tensors, one norm."""
    marker = json.dumps({"format": "nvfp4", "full_precision_matrix_mult": True}).encode()
    prefix = "model.layers.0.mlp.up_proj"
    tensors: dict[str, tuple[str, list[int], bytes]] = {
        f"{prefix}.weight": ("U8", [128, 32], bytes(128 * 32)),
        f"{prefix}.weight_scale": ("F8_E4M3", [128, 4], bytes([0x38]) * 512),
        f"{prefix}.weight_scale_2": ("F32", [], struct.pack("<f", 0.01)),
        f"{prefix}.comfy_quant": ("U8", [len(marker)], marker),
        "model.layers.0.input_layernorm.weight": ("BF16", [64], bytes(128)),
    }
    write_tensors(path, tensors)


def write_tensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header: dict[str, object] = {}
    payload = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(payload), len(payload) + len(data)],
        }
        payload += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)


#: Runs the command line in this process and then says which heavy libraries it has loaded.
PROBE = """
import sys
code = 0
try:
    from qconvert.convert.cli import main
    main()
except SystemExit as stop:
    code = stop.code or 0
loaded = sorted({"torch", "numba", "triton", "safetensors", "numpy"} & set(sys.modules))
print("PROBE", code, *loaded, file=sys.stderr)
"""


def loaded(arguments: tuple[str, ...], file: Path) -> set[str]:
    """The heavy libraries that a command has loaded by its end; it must succeed and say something."""
    words = [str(file) if word == "FILE" else word for word in arguments]
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, cwd=file.parent, timeout=120
    )
    probe, code, *names = run.stderr.splitlines()[-1].split()
    assert (probe, code) == ("PROBE", "0"), run.stdout + run.stderr
    assert run.stdout.strip()
    return set(names)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("convert", "--help"),
        ("inspect", "FILE"),
        ("check", "FILE"),
        ("targets",),
    ],
    ids=" ".join,
)
def test_quick_commands_load_neither_torch_nor_numba(arguments: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file)
    assert loaded(arguments, file) <= {"numpy"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("convert", "--help"),
        ("targets",),
        ("inspect", "FILE"),
        ("inspect", "FILE", "--json"),
        ("check", "FILE", "--runtime", "comfyui"),
        ("FILE", "--to", "bf16", "--dry-run"),
        ("FILE", "--to", "comfy_nvfp4", "--dry-run"),
        ("FILE", "--to", "convrot_int8", "--dry-run", "--json"),
        ("FILE", "--to", "auto_gptq", "--dry-run"),
        ("FILE", "--to", "gguf:q8_0", "--dry-run"),
    ],
    ids=" ".join,
)
def test_a_plain_header_needs_no_numpy(arguments: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_plain(file)
    assert not loaded(arguments, file)


def test_markers_and_headers_of_quantised_files_are_read_without_numpy(tmp_path: Path) -> None:
    """numpy comes when values are looked at, which not every format needs."""
    marker = json.dumps({"format": "convrot_w4a4", "convrot_groupsize": 256, "quant_group_size": 64}).encode()
    file, prefix = tmp_path / "model.safetensors", "blocks.0.attn.to_q"
    write_tensors(
        file,
        {
            f"{prefix}.weight": ("I8", [64, 128], bytes(64 * 128)),
            f"{prefix}.weight_scale": ("F32", [64], struct.pack("<f", 0.01) * 64),
            f"{prefix}.comfy_quant": ("U8", [len(marker)], marker),
        },
    )
    assert not loaded(("inspect", "FILE"), file)
    assert not loaded(("check", "FILE"), file)
