"""The command that serves an output, once it is made."""

from __future__ import annotations

import os
import shlex

from qconvert.convert.actions import Plan
from qconvert.formats.checkpoint import INDEX_SUFFIX
from qconvert.formats.remote import Place
from qconvert.runtime.families import FamilyMatch

#: Where ComfyUI looks for each part, below its own folder.
COMFYUI_FOLDERS = {
    "diffusion": "models/diffusion_models",
    "text_encoder": "models/text_encoders",
    "vae": "models/vae",
}
#: sglang's name of each part of a pipeline.
_SGLANG_PARTS = {"diffusion": "transformer", "text_encoder": "text_encoder", "vae": "vae"}


def component_of(matches: tuple[FamilyMatch, ...], prefixes: set[str]) -> str | None:
    """The part of a pipeline that layers with these names are; "all" for several, None for an unknown model."""
    found = {match.component for match in matches if any(match.owns(prefix) for prefix in prefixes)}
    if not found:
        return None
    return found.pop() if len(found) == 1 else "all"


def serving(plan: Plan, path: Place, component: str | None) -> list[str]:
    """Lines that say how the output is served; none for targets whose libraries are called from Python."""
    if plan.not_served:
        return [f"not by this version: {why}" for why in plan.not_served]
    folder = plan.target.sidecars is not None
    # Shards are loaded by the folder they lie in: an index is no file of weights.
    within = folder or path.name.endswith(INDEX_SUFFIX)
    if plan.target.runtime == "comfyui":
        where = COMFYUI_FOLDERS.get(component or "", "models/checkpoints")
        if component is None:
            where = " or ".join(list(COMFYUI_FOLDERS.values())[:2])
        return [f"put it into ComfyUI's {where}"]
    if plan.target.container == "gguf" or plan.target.runtime in ("sglang", "none"):
        return _sglang(str(path.parent if within else path), component, folder, plan)
    return []


def _sglang(path: str, component: str | None, folder: bool, plan: Plan) -> list[str]:
    if component == "all":
        return []
    part = _SGLANG_PARTS[component or "diffusion"]
    if folder:
        option = "--transformer-path" if part == "transformer" else f"--component-paths.{part}"
    elif part == "transformer":
        option = "--transformer-weights-path"
    else:
        option = f"--component-weights-paths.{part}"
    common = ["--model-path", "MODEL", option, path]
    about = f"MODEL: the pipeline's folder or hub name{_of(plan)}"
    lines = [_joined(["sglang", "serve", *common])]
    if part == "transformer":
        lines.append(_joined(["sglang", "generate", *common, "--prompt", "..."]))
    if component is None:
        about += "; for a text encoder: --component-weights-paths.text_encoder"
    return [*lines, f"({about})"]


def _of(plan: Plan) -> str:
    return f", for {' and '.join(plan.families)}" if plan.families else ""


def _joined(words: list[str]) -> str:
    if os.name == "nt":
        from subprocess import list2cmdline

        return list2cmdline(words)
    return shlex.join(words)
