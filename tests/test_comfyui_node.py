"""The ComfyUI node: loaded as ComfyUI loads a pack, asked what its executor asks, run on files in stubbed folders."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError
from qconvert.runtime.targets import TARGETS

import qconvert

save = pytest.importorskip("safetensors.numpy").save_file
PACK = Path(__file__).resolve().parents[1] / "scripts" / "comfyui_node"


class Cancelled(Exception):
    """What ComfyUI raises when the user presses cancel."""


class Comfy:
    """ComfyUI as far as a node sees it: model folders, a progress bar, cancelling."""

    def __init__(self, root: Path) -> None:
        self.root, self.bars, self.cancel_after = root, [], None  # type: tuple[Path, list[Any], int | None]
        for folder in ("diffusion_models", "checkpoints", "text_encoders", "vae"):
            (root / "models" / folder).mkdir(parents=True)
        (root / "custom_nodes").mkdir()

    def folder(self, name: str) -> Path:
        return self.root / "models" / name

    def modules(self) -> dict[str, ModuleType]:
        paths, comfy, utils, management = map(
            ModuleType, ("folder_paths", "comfy", "comfy.utils", "comfy.model_management")
        )
        outer = self

        def full(folder: str, name: str) -> str:
            path = outer.folder(folder) / name
            if not path.is_file():
                raise FileNotFoundError(f"Model in folder '{folder}' with filename '{name}' not found.")
            return str(path)

        class ProgressBar:
            def __init__(self, total: int, node_id: Any = None) -> None:
                self.total, self.current = total, 0
                outer.bars.append(self)

            def update(self, value: int) -> None:
                self.current = min(self.total, self.current + value)

        def throw_exception_if_processing_interrupted() -> None:
            if outer.cancel_after is not None and outer.bars[-1].current >= outer.cancel_after:
                raise Cancelled

        files: dict[str, Any] = {
            "get_filename_list": lambda name: sorted(path.name for path in outer.folder(name).iterdir()),
            "get_folder_paths": lambda name: [str(outer.folder(name))],
            "get_full_path_or_raise": full,
            "get_output_directory": lambda: str(outer.root / "output"),
        }
        for name, function in files.items():
            setattr(paths, name, function)
        utils.ProgressBar = ProgressBar  # type: ignore[attr-defined]
        management.throw_exception_if_processing_interrupted = (  # type: ignore[attr-defined]
            throw_exception_if_processing_interrupted
        )
        comfy.utils, comfy.model_management = utils, management  # type: ignore[attr-defined]
        return {
            "folder_paths": paths, "comfy": comfy, "comfy.utils": utils, "comfy.model_management": management,
        }  # fmt: skip

    def load(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """As `load_custom_node` does with a folder in custom_nodes: the path, dots replaced, is the module's name."""
        folder = self.root / "custom_nodes" / "comfyui-qconvert"
        shutil.copytree(PACK, folder, ignore=shutil.ignore_patterns("__pycache__"))
        name = str(folder).replace(".", "_x_")
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module


@pytest.fixture
def comfy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comfy:
    made = Comfy(tmp_path / "ComfyUI")
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    rng = np.random.default_rng(7)
    tensors = {f"blocks.{i}.fc.weight": rng.standard_normal((256, 256)).astype(np.float32) for i in range(8)}
    save(
        tensors | {"norm.weight": np.ones(256, np.float32)},
        made.folder("diffusion_models") / "tiny.safetensors",
    )
    return made


@pytest.fixture
def node(comfy: Comfy, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    module = comfy.load(monkeypatch)
    assert list(module.NODE_CLASS_MAPPINGS) == list(module.NODE_DISPLAY_NAME_MAPPINGS)
    (cls,) = module.NODE_CLASS_MAPPINGS.values()
    assert isinstance(cls, type)
    return cls


@pytest.fixture
def run(node: type[Any]) -> Callable[..., Any]:
    """The node's function with defaults for what is not given, as the executor calls it."""

    def call(**given: Any) -> Any:
        asked = node.INPUT_TYPES()
        values: dict[str, Any] = {}
        for name, (kind, *rest) in (asked["required"] | asked["optional"]).items():
            values[name] = kind[0] if isinstance(kind, list) else rest[0]["default"]
        values["source"] = "diffusion_models/tiny.safetensors"
        assert set(given) <= set(values)
        for name, value in given.items():
            kind = (asked["required"] | asked["optional"])[name][0]
            assert not isinstance(kind, list) or value in kind
        return getattr(node(), node.FUNCTION)(**values | given)

    return call


def test_it_is_what_comfyui_takes_for_a_node(node: type[Any]) -> None:
    asked = node.INPUT_TYPES()
    assert list(asked["required"]) == ["source", "target", "family", "quality"]
    for kind, *rest in (asked["required"] | asked["optional"]).values():
        assert kind in ("STRING", "BOOLEAN") or (isinstance(kind, list) and kind and all(map(str, kind)))
        assert all(isinstance(extra, dict) and extra["tooltip"] for extra in rest)
    # The list goes to the browser.
    assert json.loads(json.dumps(asked)) == json.loads(json.dumps(asked))
    assert node.RETURN_TYPES == ("STRING", "STRING")
    assert len(node.RETURN_NAMES) == len(node.OUTPUT_TOOLTIPS) == len(node.RETURN_TYPES)
    assert node.OUTPUT_NODE is True and node.CATEGORY and callable(getattr(node, node.FUNCTION))
    assert asked["required"]["source"][0] == ["diffusion_models/tiny.safetensors"]
    files = [target.name for target in TARGETS if target.sidecars is None]
    names = asked["required"]["target"][0]
    assert sorted(names) == sorted(files)
    assert all(name.startswith("comfyui:") for name in names[:8])
    assert "Wan" in asked["required"]["family"][0]


def test_converts_beside_the_source_with_progress(run: Callable[..., Any], comfy: Comfy) -> None:
    done = run(target="comfyui:int8_tensorwise", keep="blocks.0\n\n  blocks.7 \n")
    path, summary = done["result"]
    out = comfy.folder("diffusion_models") / "tiny.comfyui-int8_tensorwise.safetensors"
    assert Path(path) == out
    assert "accepted by comfyui" in summary and "SQNR" in summary
    assert done["ui"]["text"] == [f"{path}\n{summary}"]
    with opened(out) as checkpoint:
        kinds = {name: checkpoint.tensors[f"blocks.{name}.fc.weight"].dtype for name in (0, 1, 7)}
    assert kinds == {0: "F32", 1: "I8", 7: "F32"}
    (bar,) = comfy.bars
    assert bar.current == bar.total > 0
    # The same again is found, not made.
    before = out.stat().st_mtime_ns
    assert (
        "was there already" in run(target="comfyui:int8_tensorwise", keep="blocks.0\nblocks.7")["result"][1]
    )
    assert out.stat().st_mtime_ns == before
    # Another conversion under that name is asked about first.
    with pytest.raises(QConvertError, match="already exists"):
        run(target="comfyui:int8_tensorwise")
    run(target="comfyui:int8_tensorwise", overwrite=True)
    assert out.stat().st_mtime_ns > before


def test_files_for_others_go_to_the_output_folder(run: Callable[..., Any], comfy: Comfy) -> None:
    path = Path(run(target="comfy_nvfp4", quality="fast")["result"][0])
    assert path == comfy.root / "output" / "tiny.comfy_nvfp4.safetensors" and path.is_file()


def test_cancelling_leaves_nothing(run: Callable[..., Any], comfy: Comfy) -> None:
    comfy.cancel_after = 1
    with pytest.raises(Cancelled):
        run(target="comfyui:nvfp4")
    assert [path.name for path in comfy.folder("diffusion_models").iterdir()] == ["tiny.safetensors"]
    comfy.cancel_after = None
    assert run(target="comfyui:nvfp4")["result"]


def test_another_family_than_the_file_is_refused(run: Callable[..., Any], comfy: Comfy) -> None:
    with pytest.raises(QConvertError, match=r"is not Wan .found an unknown model"):
        run(target="comfyui:nvfp4", family="Wan")
    assert len(list(comfy.folder("diffusion_models").iterdir())) == 1


def test_a_changed_source_runs_again(node: type[Any], comfy: Comfy) -> None:
    source = "diffusion_models/tiny.safetensors"
    first = node.IS_CHANGED(source=source, target="x", family="detect", quality="best")
    assert first == node.IS_CHANGED(source=source, target="y")
    with (comfy.folder("diffusion_models") / "tiny.safetensors").open("ab") as file:
        file.write(b" ")
    assert node.IS_CHANGED(source=source) != first


def test_without_comfyuis_progress_bar(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comfy.utils", None)
    assert run(target="comfyui:mxfp8")["result"]


def test_without_the_package_the_pack_says_what_to_install(
    comfy: Comfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "qconvert", None)
    with pytest.raises(ImportError, match="-m pip install qconvert"):
        comfy.load(monkeypatch)


def test_the_packs_own_metadata() -> None:
    document = tomllib.loads((PACK / "pyproject.toml").read_text())
    assert document["project"]["version"] == qconvert.__version__
    assert (
        document["project"]["dependencies"] == (PACK / "requirements.txt").read_text().split() == ["qconvert"]
    )
    assert {"PublisherId", "DisplayName"} <= set(document["tool"]["comfy"])
