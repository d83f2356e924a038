"""Names in the output: a prefix stripped where the runtime wants none, components chosen, the user's renames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.layers import Inventory
from qconvert.formats.patterns import Pattern, option_rule
from qconvert.runtime.targets import Target

DIFFUSION_PREFIX = "model.diffusion_model."
#: Where all-in-one files keep their parts. The prefix goes when the part becomes a file of its own.
COMPONENTS = {
    "diffusion": (DIFFUSION_PREFIX,),
    "text_encoder": ("text_encoders.", "cond_stage_model.", "conditioner.embedders."),
    "vae": ("first_stage_model.", "vae."),
}


@dataclass
class Names:
    """`strip` is taken off the front of every selected name, then `rules` are applied in order."""

    strip: str = ""
    component: str | None = None
    rules: list[tuple[Pattern, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def decide(
        cls,
        inventory: Inventory,
        target: Target,
        keep_prefix: bool,
        component: str | None,
        rename: tuple[tuple[str, str], ...],
    ) -> Names:
        """Raises UsageError for an all-in-one file without --component, or a component that is not there."""
        every = [name for layer in inventory.layers.values() for name in (f"{layer.prefix}.weight",)]
        every += [tensor.name for tensor in inventory.loose]
        parts = {part: [n for n in every if n.startswith(prefixes)] for part, prefixes in COMPONENTS.items()}
        present = [part for part, found in parts.items() if found]
        names = cls()
        if component is not None:
            if component not in present:
                there = ", ".join(present) or "no component prefixes"
                raise UsageError(f"--component {component}: not in this file", found=there)
            names.component = component
        elif len(present) > 1 and (target.runtime == "sglang" or target.container == "gguf"):
            raise UsageError(
                f"an all-in-one file ({', '.join(present)}); {target.name} is loaded one component at a time",
                hint="choose with " + " or ".join(f"--component {part}" for part in present),
            )
        if (target.runtime == "sglang" or target.container == "gguf") and not keep_prefix:
            reader = "GGUF readers" if target.container == "gguf" else "sglang"
            names._strip_prefix([n for n in every if names.selected(n)], reader)
        names.rules = [option_rule(text, replacement, "--rename") for text, replacement in rename]
        return names

    def _strip_prefix(self, selected: list[str], reader: str) -> None:
        if selected and all(name.startswith(DIFFUSION_PREFIX) for name in selected):
            self.strip = DIFFUSION_PREFIX
            self.notes.append(
                f"prefix {DIFFUSION_PREFIX!r} stripped from {len(selected)} layers and tensors "
                f"({reader} map{'' if reader.endswith('s') else 's'} no such names; --keep-prefix keeps it)"
            )

    def selected(self, name: str) -> bool:
        """Whether a tensor or layer is part of the chosen component."""
        return self.component is None or name.startswith(COMPONENTS[self.component])

    def rename(self, name: str) -> str:
        """A tensor's name in the output."""
        name = name.removeprefix(self.strip) if self.strip else name
        for pattern, replacement in self.rules:
            name = pattern.sub(replacement, name)
        return name

    def rename_layer(self, prefix: str) -> str:
        """A layer's prefix in the output; rules see the full name of its weight."""
        renamed = self.rename(f"{prefix}.weight")
        if not renamed.endswith(".weight"):
            raise UsageError(
                f"--rename turns {prefix}.weight into {renamed!r}", expected="a name that ends in .weight"
            )
        return renamed.removesuffix(".weight")

    @staticmethod
    def check_unique(names: Iterable[str]) -> None:
        """Raise when two tensors would be written under one name."""
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise QConvertError(
                f"two tensors would be named {twice[0]!r} in the output", hint="mend the --rename rules"
            )
