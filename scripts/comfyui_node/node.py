"""The node: a checkpoint out of ComfyUI's model folders becomes one for a target, beside the others of its kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import folder_paths  # type: ignore[import-not-found]
from qconvert.convert.command import class_errors
from qconvert.convert.identity import is_finished
from qconvert.convert.job import Outcome, Request, default_output, execute_plan, final_output, plan_job
from qconvert.convert.plan import PlanOptions
from qconvert.convert.text import db, size
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import UsageError
from qconvert.runtime.families import detect, load_families
from qconvert.runtime.targets import TARGETS, get_target

#: ComfyUI's folders that hold checkpoints, in the order of the list.
FOLDERS = ("diffusion_models", "checkpoints", "text_encoders", "vae")
DETECT = "detect"


def sources() -> list[str]:
    """Every model file as FOLDER/NAME."""
    return [f"{folder}/{name}" for folder in FOLDERS for name in folder_paths.get_filename_list(folder)]


def targets() -> list[str]:
    """What can be made: ComfyUI's own formats first."""
    ordered = sorted(TARGETS, key=lambda target: target.runtime != "comfyui")
    return [target.name for target in ordered if target.sidecars is None]


def families() -> list[str]:
    """`detect`, and the families that the file can be held to be."""
    return [DETECT, *sorted(family.title for family in load_families())]


class ConvertCheckpoint:
    """Convert a checkpoint and return where the new one lies. Runs on the CPU; a finished output is not made again."""

    CATEGORY = "qconvert"
    FUNCTION = "convert"
    OUTPUT_NODE = True
    RETURN_TYPES = ("STRING", "STRING")
    RETURN_NAMES = ("path", "summary")
    DESCRIPTION = (
        "Convert a quantised or unquantised checkpoint into another format, with the error measured."
    )
    OUTPUT_TOOLTIPS: ClassVar[tuple[str, ...]] = (
        "The file that was written.",
        "Sizes, closeness, who accepts it.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """What the node asks for, in ComfyUI's notation."""
        return {
            "required": {
                "source": (sources(), {"tooltip": "A file in ComfyUI's model folders."}),
                "target": (targets(), {"tooltip": "The format and the runtime it is for."}),
                "family": (families(), {"tooltip": "The model; anything but 'detect' is checked against the file."}),
                "quality": (["best", "fast"], {"tooltip": "How hard scales are searched for."}),
            },
            "optional": {
                "keep": (
                    "STRING",
                    {"default": "", "multiline": True,
                     "tooltip": "Layers to leave unquantised: regular expressions, one a line."},
                ),
                "overwrite": ("BOOLEAN", {"default": False, "tooltip": "Replace a file of the output's name."}),
            },
        }  # fmt: skip

    @classmethod
    def IS_CHANGED(cls, source: str, **_: Any) -> str:
        """Another value makes ComfyUI run the node again."""
        state = _path(source).stat()
        return f"{state.st_size}:{state.st_mtime_ns}"

    def convert(
        self, source: str, target: str, family: str, quality: str, keep: str = "", overwrite: bool = False
    ) -> dict[str, Any]:
        """Run the conversion. Raises QConvertError with one line that says what is wrong."""
        path = _path(source)
        output = _folder(source, target) / default_output(path, get_target(target)).name
        patterns = tuple(line.strip() for line in keep.splitlines() if line.strip())
        plan = PlanOptions(keep=patterns, quality="best" if quality == "best" else "fast")
        request = Request(path, target, output, plan=plan, force=overwrite)
        begun = time.monotonic()
        with opened(path) as checkpoint:
            found = [match.family.title for match in detect(checkpoint.specs)]
            if family not in (DETECT, *found):
                raise UsageError(
                    f"is not {family}", file=str(path), found=", ".join(found) or "an unknown model"
                )
            plan_made, laid = plan_job(request, checkpoint)
            written = final_output(request, checkpoint, plan_made)
            if is_finished(written, laid, checkpoint):
                summary = "was there already, made from the same file in the same way"
            else:
                advance = _progress(sum(action.layer.nbytes for action in plan_made.actions))
                summary = _summary(execute_plan(request, checkpoint, plan_made, laid, advance, begun))
        return {"ui": {"text": [f"{written}\n{summary}"]}, "result": (str(written), summary)}


def _path(source: str) -> Path:
    folder, _, name = source.partition("/")
    return Path(folder_paths.get_full_path_or_raise(folder, name))


def _folder(source: str, target: str) -> Path:
    """Files for ComfyUI lie where its loaders look; the others where its outputs are."""
    folder = source.partition("/")[0]
    own = get_target(target).runtime == "comfyui"
    where = Path(folder_paths.get_folder_paths(folder)[0] if own else folder_paths.get_output_directory())
    where.mkdir(parents=True, exist_ok=True)
    return where


def _progress(total: int) -> Callable[[int], None]:
    """Bytes done -> ComfyUI's progress bar, which also tells whether the user pressed cancel."""
    try:
        from comfy.model_management import (  # type: ignore[import-not-found]
            throw_exception_if_processing_interrupted as stop_if_cancelled,
        )
        from comfy.utils import ProgressBar  # type: ignore[import-not-found]
    except ImportError:
        return lambda done: None
    bar = ProgressBar(max(total, 1))

    def advance(done: int) -> None:
        stop_if_cancelled()
        bar.update(done)

    return advance


def _summary(outcome: Outcome) -> str:
    lines = [f"{size(outcome.source_bytes)} -> {size(outcome.output_bytes)} in {outcome.seconds:.1f} s"]
    lines += [f"{cls}: {count} layers, SQNR {db(sqnr)}" for cls, count, sqnr in class_errors(outcome)]
    lines += [f"accepted by {verdict.runtime}" for verdict in outcome.verdicts if verdict.accepted]
    return "\n".join(lines)
