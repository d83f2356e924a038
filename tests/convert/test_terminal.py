"""What is printed where: colours, folded tables and a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from qconvert.convert.cli import cli, main

save = pytest.importorskip("safetensors.numpy").save_file
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: A name that clears the screen, if a terminal is let see it.
HOSTILE = "blocks.9.\x1b[2Jfc"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    names = [*(f"blocks.{i}.attn.to_q" for i in range(3)), HOSTILE]
    tensors = {f"{name}.weight": rng.standard_normal((256, 256)).astype(np.float32) for name in names}
    save(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def on_terminal(tmp_path: Path) -> Callable[..., str]:
    """Runs the command with a pseudo-terminal of 80 columns as its output and errors."""
    fcntl, pty, termios = map(pytest.importorskip, ("fcntl", "pty", "termios"))

    def run(*words: object, columns: int = 80, **environment: str) -> str:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [sys.executable, "-m", "qconvert", *map(str, words)]
        settings = {"COLUMNS": str(columns), "TERM": "xterm-256color", **environment}
        with subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path, env=os.environ | settings
        ) as process:
            os.close(slave)
            text = b""
            while True:
                try:
                    got = os.read(master, 65536)
                except OSError:
                    break
                if not got:
                    break
                text += got
            process.wait(60)
        os.close(master)
        assert process.returncode == 0, text
        return text.decode().replace("\r\n", "\n")

    return run


def test_colours_and_folded_tables_on_a_terminal(on_terminal: Callable[..., str], model: Path) -> None:
    text = on_terminal(model.name, "--to", "comfyui:int8_tensorwise", "--keep", "blocks.1", "--jobs", "1")
    coloured = {
        ANSI.sub("", line).split()[0] for line in text.splitlines() if re.match(r"\x1b\[32m\x1b\[1m", line)
    }
    assert {"done", "accepted", "proof"} <= coloured
    table = [line for line in ANSI.sub("", text).splitlines() if re.match(r" {10}(keep|quantise)\b", line)]
    assert len(table) == 2 and all(len(line) <= 80 for line in table)
    folded = " ".join(ANSI.sub("", text).partition("quantise")[2].partition("output")[0].split())
    assert "F32tocomfyui:int8_tensorwise" in "".join(folded.split())
    # In a window with no room for the last column, lines run on as they do in a file.
    narrow = on_terminal(model.name, "--to", "comfyui:int8_tensorwise", "--dry-run", columns=40)
    assert re.search(r"-> int8_tensorwise  .*F32 to comfyui:int8_tensorwise\n", narrow)
    # A bar with bytes, rate and time left was drawn, and taken away.
    assert re.search(r"\d+%\|.*\| .*/.*\[\d\d:\d\d<.*, .*B/s\]", text)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colours_where_none_are_wanted(
    environment: dict[str, str], on_terminal: Callable[..., str], model: Path
) -> None:
    text = on_terminal(model.name, "--to", "comfyui:int8_tensorwise", "--dry-run", **environment)
    assert "\x1b[" not in text and "quantise" in text


def test_nothing_in_a_file_acts_on_the_terminal(on_terminal: Callable[..., str], model: Path) -> None:
    text = on_terminal(model.name, "--to", "comfyui:int8_tensorwise", "--verbose", "--dry-run")
    assert "\x1b[2J" not in text and "\\u001b[2Jfc" in text


def test_a_terminal_that_knows_ascii_only(on_terminal: Callable[..., str], tmp_path: Path) -> None:
    save({"bl\u00f6cke.0.fc.weight": np.ones((256, 256), np.float32)}, tmp_path / "u.safetensors")
    words = ["u.safetensors", "--to", "comfyui:int8_tensorwise", "--keep", "bl\u00f6cke", "-v", "--dry-run"]
    assert "--keep bl\\xf6cke" in on_terminal(*words, PYTHONIOENCODING="ascii")


def test_plain_when_piped(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qconvert", model.name, "--to", "comfyui:int8_tensorwise", "--dry-run"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and run.stderr == ""
    assert "\x1b" not in run.stdout
    assert re.search(
        r"^ {10}quantise  4  linear  -> int8_tensorwise  .*F32 to comfyui:int8_tensorwise$", run.stdout, re.M
    )


def test_quiet_prints_nothing_but_errors(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = "model.comfyui-int8_tensorwise.safetensors"
    (tmp_path / "jobs.toml").write_text('[[job]]\nsource = "model.safetensors"\ntarget = "bf16"\n')
    for words in (
        [model.name, "--to", "comfyui:int8_tensorwise", "--quiet"],
        ["verify", model.name, out, "-q"],
        ["batch", "jobs.toml", "--quiet"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(words)
        captured = capsys.readouterr()
        assert (caught.value.code, captured.out, captured.err) == (0, "", "")
    with pytest.raises(SystemExit) as caught:
        main([model.name, "--to", "comfyui:int8_tensorwise", "--quiet"])
    assert caught.value.code == 2 and "already exists" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([model.name, "--to", "bf16", "--quiet", "--verbose"])
    assert "exclude each other" in capsys.readouterr().err
    # JSON was asked for: it is no chatter.
    run = CliRunner().invoke(cli, [model.name, "--to", "fp16", "--quiet", "--json", "--dry-run"])
    assert json.loads(run.output)["target"] == "fp16"


def test_verbose_prints_every_layer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(
        cli, [model.name, "--to", "comfyui:int8_tensorwise", "-v"], catch_exceptions=False
    )
    planned = "layer     blocks.0.attn.to_q: F32 -> int8_tensorwise, quantise, F32 to comfyui:int8_tensorwise"
    assert planned in run.output
    assert re.search(r"^layer     blocks\.2\.attn\.to_q: SQNR \d+\.\d\d dB$", run.output, re.M)
    # The more often worst layers are listed, the more there are.
    for words, count in (([], 4), (["-v"], 4)):
        told = (
            CliRunner()
            .invoke(cli, ["verify", model.name, "model.comfyui-int8_tensorwise.safetensors", *words])
            .output
        )
        assert told.count("worst     ") == count


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_as_documented(shell: str) -> None:
    environment = os.environ | {"_QCONVERT_COMPLETE": f"{shell}_source"}
    program = Path(sys.executable).with_name("qconvert")
    if not program.exists():
        pytest.skip("the command is not installed beside this Python")
    run = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "_QCONVERT_COMPLETE" in run.stdout


def test_completion_completes(tmp_path: Path) -> None:
    from click.shell_completion import ShellComplete

    def words(args: list[str], start: str) -> list[str]:
        return [item.value for item in ShellComplete(cli, {}, "qconvert", "_X").get_completions(args, start)]

    assert words([], "ver") == ["verify"]
    assert "--recipe" in words(["convert"], "--re")
    assert words(["convert", "--to"], "comfy_") == ["comfy_nvfp4", "comfy_fp8", "comfy_mxfp8"]
    assert words(["check", "--runtime"], "sglang-0.5") == ["sglang-0.5.23"]


def test_help_needs_nothing_heavy() -> None:
    """Rich and the planner are for those who convert."""
    code = (
        "import sys; from qconvert.convert.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('rich', 'numpy', 'numba', 'tqdm', 'jinja2', 're2') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(os.name == "nt", reason="needs a shell's pipe")
def test_a_reader_that_has_gone_is_no_fault(tmp_path: Path) -> None:
    """`qconvert targets | head -1`, with a reader that reads nothing at all."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "qconvert", "targets"]
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        os.close(write)
        _, errors = process.communicate(timeout=60)
    assert errors == b"" and process.returncode == 1


@pytest.mark.parametrize("words", [[], ["recipe"]])
def test_no_command_at_all_shows_the_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    captured = capsys.readouterr()
    assert caught.value.code == 2 and captured.out == ""
    assert captured.err.startswith("Usage:") and len(captured.err.splitlines()) > 5


def test_the_first_conversion_says_that_it_compiles(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    words = [model.name, "--to", "comfyui:int8_tensorwise", "--force"]
    for compiled in (False, True):
        found = iter([Path("x.nbi")] if compiled else [])
        monkeypatch.setattr(Path, "glob", lambda self, pattern, found=found: found)
        run = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert ("compiles its kernels" in run.output) == (not compiled)
