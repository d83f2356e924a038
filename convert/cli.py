"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from qconvert.convert.terminal import Terminated, guarded, harmless
from qconvert.formats.errors import QConvertError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class DefaultGroup(click.Group):
    """`qconvert FILE ...` is `qconvert convert FILE ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h", "--version"):
            args = ["convert", *args]
        return super().parse_args(ctx, args)


class PlaceType(click.ParamType[Any]):
    """A path or a URL."""

    name = "path"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from qconvert.formats.remote import place

        return place(value) if isinstance(value, str) else value


def complete_target(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from qconvert.runtime.targets import TARGETS

    return [target.name for target in TARGETS if target.name.startswith(incomplete)]


def complete_runtime(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from qconvert.runtime.contracts.registry import contract_names

    return [name for name in contract_names() if name.startswith(incomplete)]


class Decibels(click.ParamType[Any]):
    """A number: NaN would be neither above nor below any layer's."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(click.FLOAT.convert(value, param, ctx))
        if number != number:
            self.fail(f"{value!r} is not a number of decibels.", param, ctx)
        return number


PLACE = PlaceType()
BACKEND = click.option(
    "--backend",
    type=click.Choice(["cpu", "reference", "triton"]),
    help="What computes (default: cpu); all give the same bytes.",
)
DEVICE = click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where; cuda: Triton's kernels.")
QUIET = click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Print a line for every layer, too.")
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from qconvert.convert.backends import print_version

        print_version()
        ctx.exit()


@click.group(cls=DefaultGroup, context_settings=CONTEXT)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=show_version,
    help="Versions of qconvert and of what its backends need.",
)
def cli() -> None:
    """Convert quantised checkpoints into the file that a serving runtime loads, and prove it.

    The main job: qconvert IN.safetensors --to comfy_nvfp4
    """


@cli.command()
@click.argument("source", type=PLACE)
@click.option(
    "--to",
    "target",
    required=True,
    metavar="TARGET",
    shell_complete=complete_target,
    help="What to make; see `qconvert targets`.",
)
@click.option("-o", "--output", type=PLACE, metavar="DST", help="File or folder to write, or a URL.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    help="Where it runs; ray: on the cluster at $RAY_ADDRESS.",
)
@click.option(
    "--staging",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where outputs for a URL are made first.",
)
@click.option(
    "--runtime",
    metavar="NAME",
    shell_complete=complete_runtime,
    help="Contract to meet first, e.g. sglang-0132848.",
)
@click.option("--keep", multiple=True, metavar="REGEX", help="Layers to leave unquantised (repeatable).")
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", help="Type of decoded layers."
)
@click.option(
    "--embedding", type=click.Choice(["keep", "int8"]), default="keep", help="Unquantised embeddings."
)
@click.option(
    "--quality", type=click.Choice(["fast", "best"]), default="best", help="How hard to search scales."
)
@click.option(
    "--native-fp4", is_flag=True, help="nvfp4 without the full-precision key (capability 10.0 and up)."
)
@click.option("--full-precision", is_flag=True, help="fp8, mxfp8: ask for full-precision matmul.")
@click.option("--keep-layers", type=click.IntRange(1), metavar="N", help="Leave out blocks from number N on.")
@click.option(
    "--component", type=click.Choice(["diffusion", "text_encoder", "vae"]), help="Part of an all-in-one file."
)
@click.option("--keep-prefix", is_flag=True, help="Keep a model.diffusion_model. prefix for sglang targets.")
@click.option("--rename", multiple=True, metavar="REGEX=NEW", help="Rename tensors (repeatable).")
@click.option(
    "--assume", multiple=True, metavar="REGEX=FORMAT[,KEY=VALUE]", help="What layers are, over all findings."
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Threads (default: all cores).")
@click.option("--memory", default="512MiB", metavar="SIZE", help="Buffers, e.g. 128MiB (default 512MiB).")
@BACKEND
@DEVICE
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Recorded inputs of the layers, see docs/calibration.md.",
)
@click.option(
    "--budget", metavar="BPW", help="Bits per weight, e.g. 4.8bpw: a form per layer by measured error."
)
@click.option(
    "--min-sqnr", type=Decibels(), metavar="DB", help="Per layer the smallest form that is this close."
)
@click.option("--plan", type=click.Path(path_type=Path), metavar="FILE", help="Forms as a saved plan says.")
@click.option(
    "--plan-out", type=click.Path(path_type=Path), metavar="FILE", help="Save the plan of --budget."
)
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Rules for layers, see docs/recipes.md; `qconvert recipe init SRC` writes one to start from.",
)
@click.option("--shard-size", metavar="SIZE", help="Several files of at most SIZE (e.g. 5GB) and an index.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a report: .html (one page), .json or .csv (a line a layer).",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--strict", is_flag=True, help="Refuse anything that had to be guessed.")
@click.option("--resume", is_flag=True, help="Continue an interrupted conversion.")
@click.option("--force", is_flag=True, help="Overwrite an existing output.")
@QUIET
@VERBOSE
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def convert(
    source: Path, target: str, output: Path | None, as_json: bool, dry_run: bool, **options: Any
) -> None:
    """Convert SOURCE (a .safetensors file, or a folder with shards and index; hf://, s3://, https:// too)."""
    from qconvert.convert.command import run_convert

    run_convert(source, target, output, as_json, dry_run, options)


@cli.command()
@click.argument("jobs_file", metavar="JOBS.toml", type=click.Path(path_type=Path))
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Threads (default: all cores).")
@click.option("--memory", metavar="SIZE", help="Buffers, e.g. 128MiB (default 512MiB).")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    help="Where it runs; ray: on the cluster at $RAY_ADDRESS.",
)
@click.option(
    "--staging",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where outputs for a URL are made first.",
)
@click.option("--dry-run", is_flag=True, help="Print all plans and stop.")
@click.option("--force", is_flag=True, default=None, help="Overwrite outputs that were made otherwise.")
@QUIET
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def batch(jobs_file: Path, dry_run: bool, as_json: bool, quiet: bool, **given: Any) -> None:
    """Convert every source in JOBS.toml into every target; run again, it does what is left."""
    from qconvert.convert.batch import run_batch

    overrides = {key: value for key, value in given.items() if value is not None}
    run_batch(jobs_file, as_json, dry_run, overrides, "quiet" if quiet else "normal")


@cli.command()
@click.argument("file", type=PLACE)
@click.option("--json", "as_json", is_flag=True)
def inspect(file: Path, as_json: bool) -> None:
    """What FILE holds: formats, markers, findings, and which runtimes take it as it is."""
    from qconvert.convert.inspection import run_inspect

    run_inspect(file, as_json)


@cli.command()
@click.argument("file", type=PLACE)
@click.option(
    "--runtime",
    metavar="NAME",
    shell_complete=complete_runtime,
    help="Contract to check against (default: the newest sglang).",
)
@click.option("--tp", type=click.IntRange(1), default=1, metavar="N", help="Tensor-parallel ranks.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="CONFIG_OR_KEYS",
    help="Check names against a model: its weights, index.json, a JSON list of names, or config.json.",
)
@click.option("--json", "as_json", is_flag=True)
def check(file: Path, runtime: str | None, tp: int, model: Path | None, as_json: bool) -> None:
    """What a runtime would do with each layer of FILE; exit code 1 if it would refuse or misread it."""
    from qconvert.convert.checking import run_check

    run_check(file, runtime, tp, model, as_json)


@cli.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--sample", type=click.IntRange(1), metavar="ROWS", help="Compare values of this many rows.")
@click.option("--json", "as_json", is_flag=True)
def diff(a: Path, b: Path, sample: int | None, as_json: bool) -> None:
    """What changed from A to B in each layer; exit code 0 the same, 1 different, 2 trouble."""
    from qconvert.convert.diff import run_diff

    run_diff(a, b, sample, as_json)


@cli.command()
@click.argument("source", type=PLACE)
@click.argument("target", type=click.Path(path_type=Path), required=False)
@click.option(
    "--digest", is_flag=True, help="Compare every bit with what was recorded; also of one file alone."
)
@click.option(
    "--min-sqnr", type=Decibels(), metavar="DB", help="Threshold for every layer (default: by format)."
)
@click.option("--sample", type=click.IntRange(1), metavar="ROWS", help="Only this many rows of each layer.")
@click.option(
    "--activations", type=click.Path(path_type=Path), metavar="FILE", help="Recorded inputs, [S, K] a layer."
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Threads (default: all cores).")
@click.option("--memory", default="512MiB", metavar="SIZE", help="Buffers, e.g. 128MiB (default 512MiB).")
@BACKEND
@DEVICE
@click.option("--rename", multiple=True, metavar="REGEX=NEW", help="The renames the conversion was given.")
@QUIET
@VERBOSE
@click.option("--json", "as_json", is_flag=True)
def verify(
    source: Path, target: Path | None, as_json: bool, quiet: bool, verbose: bool, **options: Any
) -> None:
    """Decode SOURCE and TARGET and compare weights and outputs; exit code 1 under the threshold."""
    from qconvert.convert.screen import speaking, volume_of
    from qconvert.convert.verification import run_verify

    with speaking(volume_of(quiet, verbose)):
        run_verify(source, target, as_json, **options)


@cli.group()
def recipe() -> None:
    """Recipes: rules for layers, given to a conversion by --recipe FILE."""


@recipe.command("init")
@click.argument("source", type=PLACE)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it there, not to the screen.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--json", "as_json", is_flag=True)
def recipe_init(source: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Write a commented recipe for SOURCE to start from: what its family keeps, and what would be quantised."""
    from qconvert.convert.recipe_init import run_init

    run_init(source, output, force, as_json)


@cli.command()
@click.option("--json", "as_json", is_flag=True)
def backends(as_json: bool) -> None:
    """What can compute here (cpu, reference, triton), and why the rest cannot."""
    from qconvert.convert.backends import run_backends

    run_backends(as_json)


@cli.command()
@click.option("--json", "as_json", is_flag=True)
def targets(as_json: bool) -> None:
    """What --to accepts."""
    from qconvert.runtime.targets import TARGETS

    if as_json:
        rows = [
            {"name": t.name, "aliases": list(t.aliases), "runtime": t.runtime, "summary": t.summary}
            for t in TARGETS
        ]
        click.echo(json.dumps(rows))
        return
    for t in TARGETS:
        alias = f" (also {', '.join(t.aliases)})" if t.aliases else ""
        click.echo(f"{t.name:26} {t.runtime:8} {t.summary}{alias}")


def main(argv: list[str] | None = None) -> None:
    """Entry point: one clear line for every failure, exit code 2 for usage and 1 for a refused or failed job.

    130 and 143 after SIGINT and SIGTERM, as shells expect.
    """
    # A header of ten thousand tensors becomes a million objects without cycles: looking for some takes time.
    gc.set_threshold(200_000, 20, 20)
    atexit.register(_leave_without_looking)
    # Read when numpy is imported. The work is shared out already: products that --jobs threads each share out again
    # wait for each other, and verify takes three times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with guarded():
        _main(argv)


def _leave_without_looking() -> None:
    """Keep Python's last collection from what a header left behind: it goes with the process."""
    # Libraries that come with torch (nanobind's) would take for a leak whatever is not collected, and say so.
    if "torch" not in sys.modules:
        gc.freeze()


def _main(argv: list[str] | None) -> None:
    try:
        code = cli.main(argv, standalone_mode=False)
        # Here, where a reader that has gone is noticed in peace, and not while Python shuts down.
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.MissingParameter as error:
        words = error.format_message()
        if error.param is not None and error.param.name == "target" and "--to" in error.param.opts:
            words = "what to make is not said: --to TARGET is missing; `qconvert targets` lists all"
        _fail(words, 2)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt) as error:
        # click hides the interruption that it caught, and with it what there is to resume.
        _fail(interrupted("interrupted", error), 130)
    except Terminated as error:
        _fail(interrupted("terminated", error), 143)
    except QConvertError as error:
        _fail(error.line(), error.exit_code)
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go, and Python would say so when it shuts down.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(": ".join(str(part) for part in (error.filename, error.strerror or error) if part), 1)
    except MemoryError:
        _fail("not enough memory; --jobs 1 and a smaller --memory need less", 1)
    except Exception as error:
        _fail(fault(error), 1)


def _fail(words: str, code: int) -> NoReturn:
    click.echo(f"qconvert: {harmless(' '.join(words.split()))}", err=True)
    sys.exit(code)


def interrupted(word: str, error: BaseException) -> str:
    """What was interrupted, and how to go on where something can be: outputs note that on the exception."""
    inner: BaseException | None = error
    while inner is not None:
        for note in getattr(inner, "__notes__", ()):
            return f"{word}; {note}"
        inner = inner.__context__
    return word


def fault(error: Exception) -> str:
    """An exception that nobody foresaw, in one line that can be reported."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))
    return f"a fault of qconvert, please report it: {type(error).__name__}: {error} (at {where})"


def parse_pairs(items: tuple[str, ...], option: str) -> tuple[tuple[str, str], ...]:
    """REGEX=VALUE pairs, split at the last '='. Raises UsageError."""
    pairs = []
    for item in items:
        left, found, right = item.rpartition("=")
        if not found or not left:
            raise UsageError(f"{option} {item!r}", expected="REGEX=VALUE")
        pairs.append((left, right))
    return tuple(pairs)
