"""The documents: pages made from the code are current, every command line in them runs, every link leads somewhere."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import numpy as np
import pytest
from qconvert.convert.cli import cli, main
from qconvert.formats.registry import CODECS
from qconvert.runtime.contracts.registry import contract_names

save = pytest.importorskip("safetensors.numpy").save_file
ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "scripts").rglob("*.md"),
    ]
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
#: Kinds of block with other things than commands that can be tried here: set-up, clusters.
UNTRIED = ("sh", "bash")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    for found in BLOCK.finditer(path.read_text("utf-8")):
        yield found[1], found[2]


def commands(path: Path) -> list[str]:
    """What stands behind a `$` in console blocks."""
    return [
        line.removeprefix("$ ")
        for kind, text in blocks(path)
        if kind == "console"
        for line in text.splitlines()
        if line.startswith("$ ")
    ]


def script(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(f"qconvert_scripts_{name}", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's sample files, from small random weights under the same names."""
    folder = tmp_path_factory.mktemp("sample")
    rng = np.random.default_rng(11)
    width, hidden = 128, 256
    tensors = {
        "embeddings.word_embeddings.weight": rng.standard_normal((512, width)),
        "embeddings.position_embeddings.weight": rng.standard_normal((64, width)),
        "embeddings.LayerNorm.weight": np.ones(width),
        "pooler.dense.weight": rng.standard_normal((width, width)),
    }
    for i in range(3):
        layer = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            tensors[f"{layer}.attention.{part}.weight"] = rng.standard_normal((width, width))
        tensors[f"{layer}.intermediate.dense.weight"] = rng.standard_normal((hidden, width))
        tensors[f"{layer}.output.dense.weight"] = rng.standard_normal((width, hidden))
        tensors[f"{layer}.output.dense.bias"] = rng.standard_normal(width)
    save({name: value.astype(np.float32) for name, value in tensors.items()}, folder / "weights.safetensors")
    command = [
        sys.executable,
        ROOT / "scripts" / "make_sample",
        folder,
        "--weights",
        folder / "weights.safetensors",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def scratch(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the documents assume it: the sample, a jobs file, the recipe of docs/recipes.md."""
    (tmp_path / "sample").mkdir()
    for path in sample.glob("minilm_*"):
        shutil.copy(path, tmp_path / "sample")
    (recipe,) = (text for kind, text in blocks(ROOT / "docs" / "recipes.md") if kind == "toml")
    (tmp_path / "mixed.toml").write_text(recipe)
    jobs = '[[job]]\nsource = "sample/minilm_fp8.safetensors"\ntarget = ["comfy_nvfp4", "bf16"]\n'
    (tmp_path / "jobs.toml").write_text(jobs)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if commands(path)], ids=name_of)
def test_command_lines_run(path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, in one folder a document; `# exits with N` behind a command says what else than 0 is right."""
    pytest.importorskip("jinja2")
    for line in commands(path):
        words = shlex.split(line, comments=True)
        assert words[0] == "qconvert", f"{line}: only qconvert's own commands are tried"
        expected = int(found[1]) if (found := re.search(r"# exits with (\d)", line)) else 0
        with pytest.raises(SystemExit) as caught:
            main(words[1:])
        captured = capsys.readouterr()
        assert caught.value.code == expected, f"{line}\n{captured.out}\n{captured.err}"


def test_the_worked_example_prints_what_the_readme_shows(
    scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line by line the same words, whatever the numbers."""
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = next(text for kind, text in blocks(ROOT / "README.md") if kind == "text" and "closeness" in text)
    with pytest.raises(SystemExit):
        main(["sample/minilm_fp8.safetensors", "--to", "comfy_nvfp4"])
    printed = {word_of(line) for line in capsys.readouterr().out.splitlines()}
    for line in shown.splitlines():
        assert word_of(line) in printed, line
    assert "qconvert sample/minilm_fp8.safetensors --to comfy_nvfp4" in readme


def word_of(line: str) -> str:
    return " ".join(re.sub(r"\(.*\)|[\d.,]+ ?(MB|kB|dB|B|s|MB/s)?\b|->", "", line).split())


def test_no_command_line_stands_where_it_is_not_tried() -> None:
    for path in DOCUMENTS:
        for kind, text in blocks(path):
            for line in text.splitlines():
                if re.match(r"\s*(\$ )?qconvert ", line) and kind not in ("console", *UNTRIED):
                    pytest.fail(f"{name_of(path)}: {line!r} in a block of kind {kind!r}")


def test_options_that_are_spoken_of_exist() -> None:
    """Commands within sentences have placeholders and cannot run; their options can be looked up."""
    spoken = [
        (path, text)
        for path in DOCUMENTS
        for text in re.findall(r"`(qconvert [^`]+)`", path.read_text("utf-8").replace("\n", " "))
    ]
    assert len(spoken) > 10
    for path, text in spoken:
        words = text.split()[1:]
        command: click.Command = (
            cli.commands[words[0]] if words[0] in cli.commands else cli.commands["convert"]
        )
        if isinstance(command, click.Group) and len(words) > 1:
            command = command.commands[words[1]]
        known = {opt for param in (*command.params, *cli.params) for opt in param.opts} | {"--help", "-h"}
        asked = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert asked <= known, f"{name_of(path)}: {text}"


def test_options_named_alone_exist() -> None:
    """`--something` in a sentence of a document about the command is an option of some command or script."""
    known = {opt for command in every_command(cli) for param in command.params for opt in param.opts} | {
        "--help"
    }
    others = {"--runtime", "--diagonal", "--num-cpus"}
    for path in DOCUMENTS:
        if path.parent.name in ("contracts", "formats") or path.name in ("CHANGELOG.md", "CONTRIBUTING.md"):
            continue
        text = BLOCK.sub("", path.read_text("utf-8"))
        for option in re.findall(r"`(--[a-z][a-z0-9-]+)", text):
            in_scripts = any(
                option in file.read_text("utf-8", "ignore")
                for file in (ROOT / "scripts").iterdir()
                if file.is_file()
            )
            assert option in known | others or in_scripts, f"{name_of(path)}: {option}"


def every_command(group: click.Group) -> Iterator[click.Command]:
    yield group
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from every_command(command)
        else:
            yield command


def test_pages_made_from_the_code_are_current() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_docs", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, f"run scripts/make_docs\n{run.stdout}{run.stderr}"


def test_every_format_contract_and_command_has_its_page() -> None:
    document = tomllib.loads((ROOT / "docs" / "pages.toml").read_text("utf-8"))
    assert sorted(name for page in document["format"] for name in page["codecs"]) == sorted(
        c.name for c in CODECS
    )
    assert sorted(page["name"] for page in document["contract"]) == sorted(contract_names())
    assert sorted(page["name"] for page in document["command"]) == sorted(cli.commands)
    for page in document["contract"]:
        assert (ROOT / "docs" / "contracts" / f"{page['name']}.md").is_file()


def test_rules_on_the_pages_are_those_of_the_code() -> None:
    """A rule's message is the one of its own call, not of another above it."""
    rules = set(script("make_docs").rules_in(ROOT / "runtime" / "contracts" / "sglang_rules.py"))
    assert ("refuse", "w4a4-linear-dtype", "linear_dtype of a w4a4 layer must be int4 or int8") in rules
    assert all(severity in ("refuse", "trap", "environment", "note") for severity, _, _ in rules)


def test_extras_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = {
        extra
        for path in DOCUMENTS
        for group in re.findall(r"(?:qconvert|\.)\[([a-z,-]+)\]", path.read_text("utf-8"))
        for extra in group.split(",")
    }
    assert {"report", "remote", "ray"} <= named <= set(extras)


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{name_of(path)}: {target}"


def test_every_document_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        path = ahead.pop()
        if path in seen or path.suffix != ".md" or not path.is_file():
            continue
        seen.add(path)
        ahead += [
            (path.parent / target).resolve()
            for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text("utf-8"))
            if "://" not in target
        ]
    missing = {path for path in DOCUMENTS if path.parent.name != "comfyui_node"} - seen
    assert not missing, [name_of(path) for path in missing]
