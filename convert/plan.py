"""Deciding from headers alone what becomes of every layer. Pure: no payload is read, nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qconvert.convert.actions import Action, ConstOut, CopyOut, Drop, Kind, PartOut, Plan, laid_anew
from qconvert.convert.as_stored import copied, refusal
from qconvert.convert.cut import cut_layers
from qconvert.convert.names import Names
from qconvert.convert.recipe import Recipe, Rule
from qconvert.convert.roles import RoleBook
from qconvert.formats.base import Codec, Part
from qconvert.formats.checkpoint import Checkpoint
from qconvert.formats.errors import UsageError
from qconvert.formats.layers import SENTINEL, Inventory, Layer
from qconvert.formats.marker import render_tensor, speaks_of_quantisation
from qconvert.formats.patterns import option_pattern
from qconvert.formats.registry import codec as get_codec
from qconvert.formats.tensors import Spec, TensorSpec
from qconvert.runtime.contracts.base import Contract
from qconvert.runtime.roles import is_embedding_name
from qconvert.runtime.targets import Options, Target, Wishes, get_target


@dataclass(frozen=True)
class PlanOptions:
    """What the user asked for beside the target."""

    keep: tuple[str, ...] = ()
    dtype: str = "BF16"
    wishes: Wishes = field(default_factory=Wishes)
    quantise_embedding: bool = False
    quality: Literal["fast", "best"] = "best"
    component: str | None = None
    keep_prefix: bool = False
    rename: tuple[tuple[str, str], ...] = ()
    #: Blocks of the main list that are kept; None for all.
    keep_layers: int | None = None
    #: Layer -> `keep`, or the target whose linear form it takes (`--plan`, `--budget`).
    forms: Mapping[str, str] = field(default_factory=dict)
    #: Rules for layers by name (`--recipe`).
    recipe: Recipe | None = None


def make_plan(
    checkpoint: Checkpoint,
    inventory: Inventory,
    target: Target,
    contracts: tuple[Contract, ...],
    options: PlanOptions,
) -> Plan:
    """The plan for one checkpoint. `contracts`: the main one first; the others are met where that costs nothing.

    Raises UsageError when a request makes no sense (a --keep that matches nothing, an all-in-one file without
    --component), QConvertError when a name would be written twice.
    """
    names = Names.decide(inventory, target, options.keep_prefix, options.component, options.rename)
    book = RoleBook(checkpoint, target, contracts)
    planner = _Planner(checkpoint, inventory, target, contracts, options, names, book)
    cut = cut_layers(inventory, options.keep_layers, names.selected)
    chosen = [
        layer
        for layer in inventory.layers.values()
        if names.selected(layer.prefix) and layer.prefix not in cut.layers
    ]
    planner.drops += [Drop(name, reason) for name, reason in cut.tensors.items()]
    if cut.note:
        planner.notes.append(cut.note)
    planner.notes += book.refuse_or_note(layer.prefix for layer in chosen)
    if target.sidecars is not None and not checkpoint.config:
        planner.notes.append(
            "the source has no config.json beside it: what is written holds the quantisation alone, "
            "and a loader also needs the model's own entries"
        )
    if options.recipe is not None:
        options.recipe.for_target(target)
        planner.rules = options.recipe.bind(layer.prefix for layer in chosen)
    actions = planner.actions(chosen)
    planner.check_keeps()
    loose = []
    for tensor in inventory.loose:
        if names.selected(tensor.name) and tensor.name not in cut.tensors:
            loose.append(CopyOut(names.rename(tensor.name), tensor.spec, tensor))
    for tensor in (t for t in inventory.sentinels if t.name not in cut.tensors):
        what = (
            "legacy fp8 sentinel"
            if tensor.name.endswith(SENTINEL)
            else "marker of a layer that does not exist"
        )
        planner.drops.append(Drop(tensor.name, f"{what}; layers carry their own markers"))
    entries = checkpoint.metadata.items()
    metadata = {key: value for key, value in entries if not speaks_of_quantisation(key, value)}
    names.check_unique(
        [out.name for action in actions for out in action.outputs] + [out.name for out in loose]
    )
    return Plan(
        target=target,
        contracts=contracts,
        config=target.config,
        actions=tuple(actions),
        loose=tuple(loose),
        drops=tuple(planner.drops),
        findings=tuple(inventory.all_findings()),
        metadata=metadata,
        notes=tuple(names.notes + planner.notes),
        strip=names.strip,
        quality=options.quality,
        dtype=options.dtype,
        families=book.family_ids,
        not_served=tuple(dict.fromkeys(book.not_served)),
    )


class _Planner:
    def __init__(
        self,
        checkpoint: Checkpoint,
        inventory: Inventory,
        target: Target,
        contracts: tuple[Contract, ...],
        options: PlanOptions,
        names: Names,
        book: RoleBook,
    ) -> None:
        self.checkpoint = checkpoint
        self.target, self.contracts, self.options = target, contracts, options
        self.names, self.book = names, book
        self.keeps = [(text, option_pattern(text, "--keep")) for text in options.keep]
        self.kept: set[str] = set()
        self.rules: Mapping[str, Rule] = {}
        #: How many stored layers the runtime fuses into the module that a layer becomes part of.
        self.partitions: dict[str, int] = {}
        self.any_quantised = any(layer.quantised for layer in inventory.layers.values())
        #: What the main contract says of a linear layer's marker and tensors.
        self.judged: dict[tuple[Any, ...], str | None] = {}
        self.drops: list[Drop] = []
        self.notes: list[str] = []

    def check_keeps(self) -> None:
        for text, _ in self.keeps:
            if text not in self.kept:
                raise UsageError(f"--keep {text!r} matches no layer")

    def actions(self, layers: list[Layer]) -> list[Action]:
        """One action a layer; layers that the runtime fuses take one form, or none of them is quantised."""
        groups = self.book.fused_groups(layer.prefix for layer in layers)
        self.partitions = {name: len(group) for group in groups for name in group}
        actions = {layer.prefix: self.action(layer) for layer in layers}
        for group in groups:
            forms = {
                (
                    action.codec.name,
                    str(action.codec.marker(action.options) or action.codec.layout(action.options)),
                )
                for action in (actions[name] for name in group)
            }
            if len(forms) < 2:
                continue
            reason = (
                f"fused at load with {', '.join(n.rpartition('.')[2] for n in group)}, which differ in form"
            )
            for name in group:
                layer = actions[name].layer
                self.drops = [drop for drop in self.drops if drop.tensor.rpartition(".")[0] != name]
                plain = self._decode if layer.quantised else self._keep
                actions[name] = plain(layer, actions[name].role, reason)
        return list(actions.values())

    def action(self, layer: Layer) -> Action:
        role = "other" if layer.bare else self.book.role(layer)
        protected = "no module's weight" if layer.bare else self._protected(layer)
        rule = self.rules.get(layer.prefix)
        if rule is not None and rule.plain is not None and not layer.bare:
            return self._retyped(layer, role, rule.words, rule.plain)
        if self.target.runtime == "none":
            return self._plain_target(layer, role)
        if protected and not layer.quantised:
            return self._keep(layer, role, protected)
        if not layer.quantised:
            return self._unquantised(layer, role)
        if protected:
            return self._decode(layer, role, protected)
        return self._quantised(layer, role)

    def _protected(self, layer: Layer) -> str | None:
        for text, pattern in self.keeps:
            if pattern.search(layer.prefix):
                self.kept.add(text)
                return f"--keep {text}"
        if self.options.forms.get(layer.prefix) == "keep":
            return "the plan keeps it"
        rule = self.rules.get(layer.prefix)
        if rule is not None and rule.keep:
            return rule.words
        return self.book.runtime_keeps(layer)

    def _retyped(self, layer: Layer, role: str, reason: str, dtype: str) -> Action:
        """A layer that a recipe gives a type of its own."""
        if layer.quantised:
            return self._decode(layer, role, reason, dtype)
        if layer.options["dtype"] == dtype:
            return self._keep(layer, role, reason)
        return self._to_plain(layer, role, "cast", reason, dtype)

    def _dtype(self, layer: Layer) -> str:
        """The type that the layer takes where it is not quantised."""
        rule = self.rules.get(layer.prefix)
        return (rule.header_dtype if rule else None) or self.options.dtype

    def _wishes(self, layer: Layer) -> Wishes:
        rule = self.rules.get(layer.prefix)
        return rule.wishes(self.options.wishes) if rule else self.options.wishes

    def _plain_target(self, layer: Layer, role: str) -> Action:
        dtype = self.target.dtype or self._dtype(layer)
        if layer.quantised:
            return self._decode(layer, role, f"target {self.target.name}", dtype)
        if layer.ndim < 2 or layer.options["dtype"] == dtype:
            return self._keep(layer, role, "norms and buffers stay" if layer.ndim < 2 else f"already {dtype}")
        return self._to_plain(layer, role, "cast", f"{layer.options['dtype']} to {dtype}", dtype)

    def _unquantised(self, layer: Layer, role: str) -> Action:
        rule = self.rules.get(layer.prefix)
        if rule is not None and rule.form is not None:
            return self._asked_for(layer, rule)
        if self.any_quantised and not (role == "embedding" and self.options.quantise_embedding):
            return self._keep(layer, role, "the source leaves it unquantised")
        why = self.book.protected(layer)
        if why:
            return self._keep(layer, role, why)
        if role == "embedding" and not self.options.quantise_embedding:
            return self._keep(layer, role, "embeddings stay (--embedding int8 quantises them)")
        if role not in ("linear", "embedding"):
            return self._keep(layer, role, "not a linear layer")
        chosen = self._choose(layer, role)
        if isinstance(chosen, str):
            return self._keep(layer, role, chosen)
        return self._encode(
            layer, role, "quantise", f"{layer.options['dtype']} to {self._goal(layer)}", *chosen
        )

    def _asked_for(self, layer: Layer, rule: Rule) -> Action:
        """A recipe names the form of a layer: neither the source's habits nor the family's advice keep it from it."""
        role = "embedding" if is_embedding_name(layer.prefix) else "linear" if layer.ndim == 2 else "other"
        chosen = self._choose(layer, role) if role != "other" else "not a linear layer"
        if isinstance(chosen, str):
            return self._keep(layer, role, f"{rule.words}, but {chosen}")
        return self._encode(
            layer, role, "quantise", f"{rule.words}, {layer.options['dtype']} to {rule.form}", *chosen
        )

    def _form(self, layer: Layer) -> str | None:
        """The target whose form the layer takes in place of the output's own."""
        rule = self.rules.get(layer.prefix)
        return self.options.forms.get(layer.prefix) or (rule.form if rule else None)

    def _goal(self, layer: Layer) -> str:
        return self._form(layer) or self.target.name

    def _quantised(self, layer: Layer, role: str) -> Action:
        if layer.experts or "padded" in layer.options:
            kept = self._as_stored(layer, role)
            if kept is not None:
                return kept
        chosen = self._choose(layer, role)
        if isinstance(chosen, str):
            return self._decode(layer, role, chosen)
        codec, options = chosen
        # Codes can only be moved as they are: a factor that has to go into the weight calls for encoding anew.
        if (
            codec.family == layer.codec.family
            and codec.carries(layer.options, options)
            and not self._folds(layer, role, codec)
        ):
            return self._move(layer, role, codec, options)
        rule = self.rules.get(layer.prefix)
        because = f"{rule.words}, " if rule and rule.form else ""
        reason = f"{because}{layer.word} becomes {codec.name}"
        return self._encode(layer, role, "requantise", reason, codec, options)

    def _as_stored(self, layer: Layer, role: str) -> Action | None:
        """A bank or a padded weight for ComfyUI: copied where it reads such a one, else decoded; None elsewhere."""
        if self.target.runtime != "comfyui" or role != "linear":
            return None
        codec = get_codec(self.target.linear)
        wanted = next(iter(self.target.linear_options(layer, self._wishes(layer))), None)
        prefix = self.names.rename_layer(layer.prefix)
        if wanted is None or self._folds(layer, role, codec):
            return None
        got = copied(layer, prefix, codec, wanted, self.contracts[0])
        if isinstance(got, str):
            return self._decode(layer, role, got) if layer.experts else None
        outputs, marker = got
        reason = f"already {layer.word}"
        rest = self._marker_out(prefix, marker) + self._companions(layer, prefix, codec, layer.options)
        exact = marker == layer.marker and "comfy_quant" in layer.tensors
        kind: Kind = "copy" if exact else "retag"
        return Action(kind, reason, layer, prefix, role, codec, layer.options, (*outputs, *rest))

    def _choose(self, layer: Layer, role: str) -> tuple[Codec, Options] | str:
        """Codec and options that both the format and every contract accept, or why there are none."""
        table = role == "embedding"
        rule = self.rules.get(layer.prefix)
        form = (rule.form if rule else None) if table else self._form(layer)
        target = get_target(form) if form else self.target
        name = target.embedding if table else target.linear
        maker = target.embedding_options if table else target.linear_options
        if name is None or maker is None:
            return f"{target.name} takes no quantised embedding"
        codec = get_codec(name)
        if layer.experts:
            return "a bank of experts"
        if not (layer.n and layer.k):
            return "holds no values"
        if layer.ndim != 2:
            if layer.codec is codec and target.runtime == "comfyui":
                for options in maker(layer, self._wishes(layer)):
                    if codec.carries(layer.options, options):
                        return codec, options | {"shape": layer.options["shape"]}
            return f"a {layer.ndim}-D weight; only 2-D ones are served"
        reasons = []
        for options in maker(layer, self._wishes(layer)):
            if options.get("full_precision") and self._only_native(layer, codec):
                options = options | {"full_precision": False}
            reason = codec.refusal(layer.n, layer.k, options) or self._contract_refusal(
                layer, role, codec, options
            )
            if reason is None:
                return codec, options
            reasons.append(reason)
        return reasons[0] if reasons else f"K = {layer.k} is a multiple of no ConvRot group that is served"

    def _only_native(self, layer: Layer, codec: Codec) -> bool:
        """Whether the layer is served without the full-precision key only (nvfp4 then needs other hardware: no)."""
        fused_fp8 = codec.name == "float8" and self.partitions.get(layer.prefix, 1) > 1
        return fused_fp8 or self.book.no_full_precision(layer) is not None

    def _contract_refusal(self, layer: Layer, role: str, codec: Codec, options: Options) -> str | None:
        if not self.contracts:
            return None
        # The older contract's rules for embeddings hang on the scale, which no marker states.
        written = codec.marker(options)
        marker = {**(written or {}), "scale": options.get("scale")}
        marker["partitions"] = self.partitions.get(layer.prefix, 1)
        kind: Literal["linear", "embedding"] = "embedding" if role == "embedding" else "linear"
        main = self.contracts[0]
        why = main.layer_refusal(
            self.target.config, kind, str(marker.get("format", codec.name)), layer.n, layer.k, marker
        )
        if why is not None or written is None or kind == "embedding":
            return why
        # What neither kind nor marker tells (6 bits, the type of group scales) the tensors do.
        specs = {part.suffix: part.spec for part in codec.parts(layer.n, layer.k, options)}
        key = (render_tensor(written), *specs.items())
        if key not in self.judged:
            self.judged[key] = refusal(main, self.names.rename_layer(layer.prefix), specs, written)
        return self.judged[key]

    # ---- what the chosen form means in tensors

    def _keep(self, layer: Layer, role: str, reason: str) -> Action:
        prefix = self.names.rename_layer(layer.prefix)
        outputs: list[CopyOut | ConstOut | PartOut] = []
        for suffix, tensor in layer.tensors.items():
            if suffix in layer.owned or suffix == "bias":
                outputs.append(CopyOut(f"{prefix}.{suffix}", tensor.spec, tensor))
            elif self._stray(layer, suffix):
                self.drops.append(Drop(tensor.name, self._stray(layer, suffix) or ""))
            else:
                outputs.append(CopyOut(f"{prefix}.{suffix}", tensor.spec, tensor))
        return Action("keep", reason, layer, prefix, role, layer.codec, layer.options, tuple(outputs))

    @staticmethod
    def _stray(layer: Layer, suffix: str) -> str | None:
        """Why a tensor beside an unquantised weight goes; None when it is the model's own."""
        if suffix == "comfy_quant":
            return "marker on an unquantised weight"
        if suffix in ("input_scale", "scale_input", "scale_weight", "pre_quant_scale"):
            return "belongs to a quantised weight; this one is not"
        if suffix.startswith("weight_"):
            return "scale of another recipe; the weight is not quantised"
        return None

    def _decode(self, layer: Layer, role: str, reason: str, dtype: str | None = None) -> Action:
        return self._to_plain(layer, role, "decode", reason, dtype or self._dtype(layer))

    def _to_plain(self, layer: Layer, role: str, kind: Kind, reason: str, dtype: str) -> Action:
        same = ("float8", "int8", "plain", "gguf", "bnb4")
        shape = tuple(layer.options.get("shape", ())) if layer.codec.name in same else ()
        if not shape:
            shape = (layer.experts, layer.n, layer.k) if layer.experts else (layer.n, layer.k)
        options: Options = {"dtype": dtype, "shape": shape}
        return self._encode(layer, role, kind, reason, get_codec("plain"), options)

    def _move(self, layer: Layer, role: str, codec: Codec, options: Options) -> Action:
        """Same codes: the bytes as they are where the layout agrees, otherwise bits moved."""
        parts = codec.parts(layer.n, layer.k, {**options, **_shape_of(layer, options)})
        sources = {part.suffix: _source_suffix(layer, part) for part in parts}
        same_layout = layer.codec.layout(layer.options) == codec.layout(options)
        sized = all(
            sources[part.suffix] in layer.tensors
            and layer.tensors[sources[part.suffix]].nbytes == part.spec.nbytes
            for part in parts
        )
        if not (same_layout and sized):
            return self._encode(layer, role, "repack", laid_anew(layer, codec, options), codec, options)
        prefix = self.names.rename_layer(layer.prefix)
        outputs: list[CopyOut | ConstOut | PartOut] = []
        exact = True
        for part in parts:
            tensor = layer.tensors[sources[part.suffix]]
            exact = exact and part.spec == tensor.spec and sources[part.suffix] == part.suffix
            outputs.append(CopyOut(f"{prefix}.{part.suffix}", part.spec, tensor))
        marker = codec.marker(options)
        exact = exact and marker == layer.marker and (marker is None or "comfy_quant" in layer.tensors)
        kind: Kind = "copy" if exact else "retag"
        reason = f"already {layer.word}" if exact else f"{layer.word}: marker or types mended"
        outputs += self._marker_out(prefix, marker) + self._companions(layer, prefix, codec, options)
        return Action(kind, reason, layer, prefix, role, codec, options, tuple(outputs))

    def _encode(
        self, layer: Layer, role: str, kind: Kind, reason: str, codec: Codec, options: Options
    ) -> Action:
        prefix = self.names.rename_layer(layer.prefix)
        fold = self._folds(layer, role, codec)
        if kind != "repack" and options.get("input"):
            # An activation scale belongs to the codes it was calibrated with.
            options = options | {"input": False}
        parts = codec.parts(layer.n, layer.k, options)
        outputs: list[CopyOut | ConstOut | PartOut] = [
            PartOut(prefix if layer.bare else f"{prefix}.{part.suffix}", part) for part in parts
        ]
        outputs += self._marker_out(prefix, codec.marker(options))
        outputs += self._companions(layer, prefix, codec, options, fold)
        return Action(kind, reason, layer, prefix, role, codec, options, tuple(outputs), fold)

    def _folds(self, layer: Layer, role: str, codec: Codec) -> bool:
        """Whether pre_quant_scale has to be multiplied into the weight: the output cannot carry it."""
        carried = "pre_quant_scale" in self.target.companions and codec.name == self.target.linear
        return "pre_quant_scale" in layer.tensors and not (carried and role == "linear")

    @staticmethod
    def _marker_out(prefix: str, marker: dict[str, Any] | None) -> list[ConstOut | CopyOut | PartOut]:
        if marker is None:
            return []
        data = render_tensor(marker)
        return [ConstOut(f"{prefix}.comfy_quant", Spec("U8", (len(data),)), data)]

    def _companions(
        self, layer: Layer, prefix: str, codec: Codec, options: Options, fold: bool = False
    ) -> list[CopyOut | ConstOut | PartOut]:
        """Bias and what else belongs beside the weight; everything refused is listed with its reason."""
        outputs: list[CopyOut | ConstOut | PartOut] = []
        for suffix, tensor in layer.tensors.items():
            if suffix in layer.codec.activation_scales:
                if options.get("input"):
                    continue
            elif suffix in layer.owned:
                continue
            reason = self._companion_refusal(layer, suffix, codec, options, fold)
            if reason is None:
                name = "input_scale" if suffix == "scale_input" else suffix
                outputs.append(CopyOut(f"{prefix}.{name}", tensor.spec, tensor))
            elif suffix != "comfy_quant" or layer.marker is None:
                self.drops.append(Drop(tensor.name, reason))
        return outputs

    def _is_one(self, tensor: TensorSpec) -> bool:
        """Legacy files write 1.0 for "no activation scale"; the one payload value that planning looks at."""
        if tensor.dtype != "F32" or tensor.nbytes != 4:
            return False
        return bool(self.checkpoint.read(tensor.name).reshape(-1)[0] == 1.0)

    def _companion_refusal(
        self, layer: Layer, suffix: str, codec: Codec, options: Options, fold: bool
    ) -> str | None:
        if suffix == "bias":
            return None
        if suffix == "comfy_quant":
            return "placeholder or unreadable marker; a fresh one is written where the layer is quantised"
        if suffix == "pre_quant_scale":
            return "multiplied into the weight" if fold else None
        if suffix in layer.codec.activation_scales:
            if codec.name == "plain":
                return "the layer is no longer quantised"
            if "input_scale" not in self.target.companions:
                return f"{self.target.name} has no such parameter"
            if codec.name != layer.codec.name:
                return f"made for {layer.codec.name} activations"
            if options.get("full_precision"):
                return "the layer asks for full-precision matmul"
            if layer.tensors[suffix].dtype != "F32":
                return f"{layer.tensors[suffix].dtype}, expected F32"
            if suffix == "scale_input" and self._is_one(layer.tensors[suffix]):
                return "equal to 1.0: no static activation scale"
            return None
        if codec.name == "plain" and not suffix.startswith("weight_") and suffix not in ("scale_weight",):
            return None
        return f"no part of {codec.name}: left over from another recipe"


def _shape_of(layer: Layer, options: Options) -> Options:
    """Convolutions and banks keep their own weight shape when their codes move."""
    return {"shape": layer.options["shape"]} if layer.ndim > 2 and "shape" in layer.options else {}


def _source_suffix(layer: Layer, part: Part) -> str:
    """The source tensor that holds a part: under its own name, or under the name the source gives its scale."""
    if part.suffix in layer.owned:
        return part.suffix
    source = layer.options.get("source")
    return source if isinstance(source, str) and part.suffix.startswith("weight_s") else part.suffix
