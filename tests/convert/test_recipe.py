"""Recipes: ordered rules for layers, their mistakes, what is stored of them, and the one that `init` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skeletons as s
from click.testing import CliRunner
from qconvert.convert.actions import Plan
from qconvert.convert.cli import cli
from qconvert.convert.job import Request, contracts_for, plan_job
from qconvert.convert.plan import PlanOptions, make_plan
from qconvert.convert.recipe import Recipe, read_recipe
from qconvert.convert.recipe_init import starting_point
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.layers import take_inventory
from qconvert.formats.patterns import MAX_PATTERNS
from qconvert.formats.tensors import Spec
from qconvert.runtime.families import detect
from qconvert.runtime.targets import get_target

save = pytest.importorskip("safetensors.numpy").save_file


LAYERS = [f"blocks.{i}.{name}" for i in range(3) for name in ("attn.q", "mlp.up")]


def recipe_of(folder: Path, rules: str) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(f"qconvert_recipe = 1\n{rules}")
    return read_recipe(path)


def rule(**says: Any) -> str:
    return "[[rule]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in says.items())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Unquantised: six linears, a table, a norm."""
    rng = np.random.default_rng(3)
    tensors = {f"{name}.weight": rng.standard_normal((256, 256)).astype(np.float32) for name in LAYERS}
    tensors["embed_tokens.weight"] = rng.standard_normal((64, 256)).astype(np.float32)
    tensors["norm.weight"] = np.ones(256, np.float32)
    save(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def plan(model: Path, tmp_path: Path) -> Callable[..., Plan]:
    def make(rules: str, to: str = "comfyui:nvfp4", **options: Any) -> Plan:
        request = Request(model, to, plan=PlanOptions(recipe=recipe_of(tmp_path, rules), **options))
        with opened(model) as checkpoint:
            return plan_job(request, checkpoint)[0]

    return make


def forms(plan: Plan) -> dict[str, str]:
    return {action.layer.prefix: action.method for action in plan.actions}


def test_the_first_rule_that_matches_decides(plan: Callable[..., Plan]) -> None:
    made = plan(
        rule(glob="blocks.0.*", keep=True, why="the first block")
        + rule(regex=r"blocks\.\d\.attn\.q", to="comfyui:float8_e4m3fn")
        + rule(glob="blocks.2.mlp.up", to="fp16")
        + rule(glob="blocks.1.*", dtype="fp32", keep=True)
        + rule(glob="embed_tokens", to="comfyui:nvfp4")
    )
    found = forms(made)
    assert found["blocks.0.attn.q"] == found["blocks.0.mlp.up"] == "F32"
    assert found["blocks.1.attn.q"] == found["blocks.2.attn.q"] == "float8_e4m3fn"
    assert found["blocks.2.mlp.up"] == "F16"
    assert found["blocks.1.mlp.up"] == "F32"
    assert found["embed_tokens"] == "int8_tensorwise"
    reasons = {action.layer.prefix: action.reason for action in made.actions}
    assert reasons["blocks.0.attn.q"] == "recipe rule 1: the first block"
    assert reasons["blocks.1.attn.q"] == "recipe rule 2, F32 to comfyui:float8_e4m3fn"
    assert reasons["norm"] == "not a linear layer"


def test_options_of_a_rule(plan: Callable[..., Plan]) -> None:
    made = plan(rule(glob="*.attn.q", full_precision=True), to="comfy_fp8")
    full = {a.layer.prefix: a.options.get("full_precision") for a in made.actions if a.codec.name == "float8"}
    assert full == {name: name.endswith("attn.q") for name in LAYERS}
    made = plan(rule(glob="blocks.1.*", native_fp4=True), to="comfy_nvfp4")
    full = {a.layer.prefix: a.options["full_precision"] for a in made.actions if a.codec.name == "nvfp4"}
    assert full == {name: not name.startswith("blocks.1") for name in LAYERS}


def test_types_for_a_target_without_formats(plan: Callable[..., Plan]) -> None:
    found = forms(plan(rule(glob="blocks.0.*", to="fp32") + rule(glob="norm", to="fp16"), to="bf16"))
    assert found["blocks.0.attn.q"] == "F32" and found["blocks.1.attn.q"] == "BF16" and found["norm"] == "F16"


def test_what_a_rule_asks_for_and_cannot_have_is_said(plan: Callable[..., Plan]) -> None:
    made = plan(rule(glob="norm", to="comfyui:nvfp4"))
    (action,) = [action for action in made.actions if action.layer.prefix == "norm"]
    assert (action.kind, action.reason) == ("keep", "recipe rule 1, but not a linear layer")


def test_a_rule_outranks_the_sources_habits_and_the_familys_advice(tmp_path: Path) -> None:
    """Modulation is kept by default, and so is whatever a quantised file leaves unquantised."""
    header, payload = s.fp8(s.skeleton("flux2_klein_4b"), lambda layer: layer.startswith("double_blocks.0."))
    path = s.sparse(tmp_path / "m.safetensors", header, payload)
    rules = rule(glob="double_stream_modulation_img.lin", to="comfyui:float8_e4m3fn")
    rules += rule(glob="single_blocks.*.linear1", to="comfyui:float8_e4m3fn")
    rules += rule(glob="double_blocks.0.img_attn.qkv", keep=True)
    with opened(path) as checkpoint:
        inventory = take_inventory(checkpoint)
        target = get_target("comfyui:float8_e4m3fn")
        options = PlanOptions(recipe=recipe_of(tmp_path, rules))
        made = make_plan(checkpoint, inventory, target, contracts_for(target, None), options)
    kinds = {action.layer.prefix: action.kind for action in made.actions}
    assert kinds["double_stream_modulation_img.lin"] == "quantise"
    assert kinds["single_blocks.7.linear1"] == "quantise"
    assert kinds["single_blocks.7.linear2"] == "keep"
    assert kinds["double_blocks.0.img_attn.qkv"] == "decode"
    assert kinds["double_blocks.0.txt_attn.qkv"] == "copy"


def test_what_the_runtime_cannot_serve_side_by_side_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(QConvertError, match="would not take the result"):
        plan(rule(glob="blocks.0.*", to="modelopt_fp8"), to="modelopt_nvfp4")


MISTAKES = [
    ("[[rule]]\nglob = 'norm'", "rule 1: says nothing"),
    (rule(keep=True), "which layers is not said"),
    (rule(glob="a", regex="a", keep=True), "which layers is not said"),
    (rule(glob="norm", keep=True, to="bf16"), "exclude each other"),
    (rule(glob="norm", kepp=True), r"unknown key 'kepp'; did you mean keep\?"),
    (rule(glob="norm", keep="yes"), "keep is 'yes' .expected true or false"),
    (rule(glob="norm", keep=1), "keep is 1"),
    (rule(glob="norm", to="comfy_nvfp5"), "rule 1: unknown target 'comfy_nvfp5'; did you mean comfy_nvfp4"),
    (rule(glob="norm", dtype="bf17"), "dtype is 'bf17'"),
    (rule(glob="norm", to="bf16", full_precision=True), "is a type, which takes no options"),
    (rule(glob="blocks.?", keep=True), "only . is special in a glob"),
    (rule(regex="(a", keep=True), r"rule 1: regex '\(a'"),
    (rule(regex="a(?=b)", keep=True), "rule 1: regex"),
    ("rules = 1", "unknown key 'rules'"),
    ("rule = 1", "rule is no list of tables"),
    ("[[rule]", "is not valid TOML"),
    (rule(glob="norm", keep=True) * (MAX_PATTERNS + 1), f"{MAX_PATTERNS + 1} rules"),
]


@pytest.mark.parametrize(("text", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes_are_usage_errors(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        recipe_of(tmp_path, text)
    assert str(tmp_path / "recipe.toml") in caught.value.line()


def test_a_recipe_says_its_version(tmp_path: Path) -> None:
    for text in ("", "qconvert_recipe = 2", "qconvert_recipe = true", "qconvert_recipe = '1'"):
        (tmp_path / "r.toml").write_text(text)
        with pytest.raises(UsageError, match="is no recipe"):
            read_recipe(tmp_path / "r.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "r.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not valid TOML"):
        read_recipe(tmp_path / "r.toml")


IDLE = [
    (rule(glob="block.*", keep=True), r"rule 1 \(block.\*\) matches no layer"),
    (
        rule(glob="blocks.*", keep=True) + rule(glob="blocks.2.*", to="bf16"),
        r"rule 2 \(blocks.2.\*\) is never reached: rule 1 decides all 2 layers",
    ),
    (
        rule(glob="*.q", keep=True) + rule(glob="*.up", keep=True) + rule(regex="blocks.*", to="bf16"),
        r"rule 3 \(blocks.\*\) is never reached: rule 1 and rule 2 decides all 6 layers",
    ),
]


@pytest.mark.parametrize(("rules", "words"), IDLE)
def test_rules_that_decide_nothing_are_errors(rules: str, words: str, plan: Callable[..., Plan]) -> None:
    with pytest.raises(UsageError, match=words):
        plan(rules)


def test_forms_of_another_runtime_and_other_ways_to_plan_are_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(UsageError, match="rule 1: comfy_fp8 is for sglang, the output is for comfyui"):
        plan(rule(glob="norm", to="comfy_fp8"))
    with pytest.raises(UsageError, match="the output is for no runtime"):
        plan(rule(glob="norm", to="comfy_fp8"), to="bf16")


def test_stored_in_the_output_and_part_of_the_command_line(model: Path, tmp_path: Path) -> None:
    recipe_of(tmp_path, rule(glob="blocks.0.*", keep=True, why="w") + rule(regex="blocks.1.*", to="fp16"))
    run = CliRunner().invoke(
        cli,
        [str(model), "--to", "comfyui:nvfp4", "--recipe", str(tmp_path / "recipe.toml"), "--jobs", "1"],
        catch_exceptions=False,
    )
    assert run.exit_code == 0, run.output
    assert "recipe rule 1: w" in run.output
    with opened(tmp_path / "model.comfyui-nvfp4.safetensors") as checkpoint:
        told = json.loads(checkpoint.metadata["qconvert"])["recipe"]
        assert checkpoint.tensors["blocks.1.mlp.up.weight"].dtype == "F16"
        assert checkpoint.tensors["blocks.2.mlp.up.weight"].dtype == "U8"
    assert told["file"] == "recipe.toml"
    assert told["rules"] == [
        {"glob": "blocks.0.*", "keep": True, "why": "w"},
        {"regex": "blocks.1.*", "to": "fp16"},
    ]
    with pytest.raises(UsageError, match="leave --budget"):
        CliRunner().invoke(
            cli,
            [
                str(model), "--to", "comfyui:nvfp4", "--recipe", str(tmp_path / "recipe.toml"),
                "--budget", "8",
            ],
            catch_exceptions=False,
        )  # fmt: skip


def test_in_a_jobs_file(model: Path, tmp_path: Path) -> None:
    from qconvert.convert.jobsfile import read_jobs

    recipe_of(tmp_path, rule(glob="blocks.0.*", keep=True))
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[[job]]\nsource = "model.safetensors"\ntarget = "bf16"\nrecipe = "recipe.toml"\n')
    (request,) = read_jobs(jobs, {})
    assert request.plan.recipe is not None and request.plan.recipe.path == tmp_path / "recipe.toml"


#: First and last blocks, one rule for several names, names under a prefix, blocks in no regular grid, a table.
MODELS = (
    "flux1_dev",
    "ltx2_3",
    "anima",
    "sdxl",
    "qwen3vl_8b",
    "sd35_medium",
    "minimax_h3_pruned_diffusers",
    "clip_l",
)


def decisions(plan: Plan) -> list[tuple[str, ...]]:
    return [(a.layer.prefix, a.kind, a.role, a.method) for a in plan.actions]


@pytest.mark.parametrize("name", MODELS)
def test_init_writes_what_happens_anyway(name: str, tmp_path: Path) -> None:
    """The recipe of a family changes no plan; with the comments taken away it is a recipe, too."""
    with opened(s.sparse(tmp_path / "m.safetensors", s.skeleton(name))) as checkpoint:
        inventory = take_inventory(checkpoint)
        text = starting_point(checkpoint, inventory)
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        target = get_target("gguf:q4_0")
        made = [
            make_plan(checkpoint, inventory, target, (), PlanOptions(recipe=recipe))
            for recipe in (None, read_recipe(path))
        ]
        assert decisions(made[0]) == decisions(made[1])
        assert detect(checkpoint.specs)[0].title in text
        # Every matrix of a layer is named: active where it is kept, in a comment where it is quantised.
        awake = [line.removeprefix("# ") if line.startswith(("# [[rule]]", "# glob", "# regex", "# keep", "# to ="))
                 else line for line in text.splitlines()]  # fmt: skip
        path.write_text("\n".join(awake))
        bound = read_recipe(path).bind(inventory.layers)
        quantised = {a.layer.prefix for a in made[0].actions if a.kind == "quantise"}
        assert quantised <= set(bound)
        assert all(bound[layer].keep for layer in quantised)


def test_init_of_a_quantised_file_leaves_what_it_quantises_quantised(tmp_path: Path) -> None:
    header, payload = s.fp8(s.skeleton("flux2_klein_4b"), lambda layer: layer.endswith((".lin", ".qkv")))
    with opened(s.sparse(tmp_path / "m.safetensors", header, payload)) as checkpoint:
        inventory = take_inventory(checkpoint)
        path = tmp_path / "recipe.toml"
        path.write_text(starting_point(checkpoint, inventory))
        target = get_target("comfyui:nvfp4")
        made = [
            make_plan(checkpoint, inventory, target, contracts_for(target, None), PlanOptions(recipe=recipe))
            for recipe in (None, read_recipe(path))
        ]
    assert decisions(made[0]) == decisions(made[1])
    assert any(a.kind == "requantise" and a.layer.prefix.endswith(".lin") for a in made[1].actions)


def test_init_of_strange_names(tmp_path: Path) -> None:
    """Names are not ours: no recipe may break out of its strings and comments, none may name what it does not mean."""
    names = ["a\n[[rule]]\nb", 'say "x"', "back\\slash", "it's\\d", "sta*r", "que?ry[0]", "x.1.y", "x.1.z.y"]
    header = {f"{name}.weight": Spec("BF16", (64, 64)) for name in names}
    header["x.2.embed_tokens.weight"] = Spec("BF16", (64, 64))
    path = s.sparse(tmp_path / "m.safetensors", header)
    out = tmp_path / "r.toml"
    run = CliRunner().invoke(cli, ["recipe", "init", str(path), "-o", str(out)], catch_exceptions=False)
    assert run.exit_code == 0 and "an unknown model (generic rules)" in out.read_text()
    assert read_recipe(out).rules == ()
    told = json.loads(CliRunner().invoke(cli, ["recipe", "init", str(path), "--json"]).output)
    assert told == {"families": [], "output": None, "recipe": out.read_text()}
    text = out.read_text()
    head, _, rest = text.partition("# What --to TARGET")
    rest = rest.partition("\n")[2].replace("\n# ", "\n")
    out.write_text(head + "\n".join(line for line in rest.splitlines() if not line[:1].isdigit()))
    bound = read_recipe(out).bind([name.removesuffix(".weight") for name in header])
    assert len(bound) == len(header) and len({r.number for r in bound.values()}) == len(header)
    with pytest.raises(UsageError, match="already exists"):
        CliRunner().invoke(cli, ["recipe", "init", str(path), "-o", str(out)], catch_exceptions=False)
