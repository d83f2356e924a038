"""Output in several files: whole layers a shard, an index beside them, one commit for all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from qconvert.convert.actions import Action, CopyOut, Plan, out_spec
from qconvert.convert.execute import Executor, Result
from qconvert.convert.output import OutputFile
from qconvert.convert.place import lay_out
from qconvert.convert.units import make_units
from qconvert.formats.checkpoint import INDEX_SUFFIX, Checkpoint, dumps
from qconvert.formats.digest import Checksums, digest_place, file_digest
from qconvert.formats.errors import QConvertError, UsageError
from qconvert.formats.header import Layout
from qconvert.formats.tensors import TensorSpec


def require_shards_are_read(plan: Plan) -> None:
    """Raises UsageError where the target's runtime reads one file only."""
    if plan.target.single_file:
        raise UsageError(
            f"--shard-size: {plan.target.name} is read from one file",
            hint="leave the option out for this target",
        )


def split_plan(plan: Plan, limit: int) -> list[Plan]:
    """Plans that write at most `limit` bytes of payload each, in source order; a larger layer stands alone."""

    def place(tensor: TensorSpec) -> tuple[int, int]:
        return tensor.file, tensor.start

    items: list[tuple[tuple[int, int], Action | CopyOut]] = [(place(out.source), out) for out in plan.loose]
    items += [(place(action.layer.first), action) for action in plan.actions]
    shards: list[tuple[list[Action], list[CopyOut]]] = [([], [])]
    used = 0
    for _, item in sorted(items, key=lambda pair: pair[0]):
        size = (
            item.spec.nbytes if isinstance(item, CopyOut) else sum(out_spec(o).nbytes for o in item.outputs)
        )
        if used and used + size > limit:
            shards.append(([], []))
            used = 0
        used += size
        if isinstance(item, CopyOut):
            shards[-1][1].append(item)
        else:
            shards[-1][0].append(item)
    return [replace(plan, actions=tuple(actions), loose=tuple(loose)) for actions, loose in shards]


def shard_names(file: str, count: int) -> list[str]:
    """model.safetensors -> model-00001-of-00003.safetensors, ..."""
    stem = file.removesuffix(".safetensors")
    return [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def index_name(file: str) -> str:
    """STEM.safetensors.index.json, with or without the suffix given: loaders look for no other name."""
    return f"{file.removesuffix('.safetensors')}.safetensors{INDEX_SUFFIX}"


def index_file(file: str, parts: list[tuple[str, Layout]]) -> dict[str, bytes]:
    """The index of shards, as loaders of sharded safetensors read it."""
    mapping = {name: shard for shard, laid in parts for name in laid.specs}
    total = sum(spec.nbytes for _, laid in parts for spec in laid.specs.values())
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(mapping.items()))}
    return {index_name(file): dumps(document).encode()}


class ShardWriter:
    """Writes a plan's one file, or its shards, under temporary names; `written` opens them as one checkpoint."""

    def __init__(self, plan: Plan, laid: Layout, path: Path, limit: int | None) -> None:
        """`laid`: the whole plan in one file. `path`: that file, or what the shards (`limit` bytes) are named after."""
        self.folder, file = path.parent, path.name
        self.parts = [(file, plan, laid)]
        if limit is not None:
            require_shards_are_read(plan)
            plans = split_plan(plan, limit)
            names = shard_names(file, len(plans)) if len(plans) > 1 else [file]
            self.parts = [(name, shard, lay_out(shard)) for name, shard in zip(names, plans, strict=True)]
        parts = [(name, laid) for name, _, laid in self.parts]
        self.index = index_file(file, parts) if len(parts) > 1 else {}
        #: What the output is opened by: its one file, or its index.
        self.path = self.folder / next(iter(self.index), file)

    @property
    def nbytes(self) -> int:
        return sum(laid.file_size for _, _, laid in self.parts)

    def open(
        self,
        stack: ExitStack,
        digest: Callable[[Layout], str],
        *,
        force: bool,
        resume: bool,
        mode_of: Path | None,
        draft: bool,
    ) -> list[OutputFile]:
        """All files at once, so that space and names are checked before anything is computed."""
        return [
            stack.enter_context(
                OutputFile(
                    self.folder / name,
                    laid.file_size,
                    digest=digest(laid),
                    force=force,
                    resume=resume,
                    mode_of=mode_of,
                    draft=draft,
                )
            )
            for name, _, laid in self.parts
        ]

    def run(
        self, outs: list[OutputFile], executor: Callable[[Layout, OutputFile], Executor]
    ) -> dict[str, Result]:
        """Convert shard after shard; energies per transformed layer."""
        results: dict[str, Result] = {}
        for out, (_, shard, laid) in zip(outs, self.parts, strict=True):
            with out.flushing():
                out.checksums = Checksums(out.read, len(laid.prefix), laid.file_size)
                results |= executor(laid, out).run(make_units(shard, laid))
        return results

    def seal(self, outs: list[OutputFile], jobs: int) -> None:
        """Fill in each file's digest. Raises QConvertError for a header that leaves its place open."""
        for out, (name, _, laid) in zip(outs, self.parts, strict=True):
            place = digest_place(laid.prefix)
            if place is None:
                raise QConvertError("another entry looks like a digest", file=name)
            # Where others wrote the file, nothing is known of it yet.
            checksums = out.checksums or Checksums(out.read, len(laid.prefix), laid.file_size)
            out.write(file_digest(laid.prefix, checksums, jobs).encode(), place)

    @staticmethod
    def written(outs: list[OutputFile]) -> Checkpoint:
        """The finished temporary files as one checkpoint."""
        files = [out.temporary for out in outs]
        return Checkpoint(files[0].parent, files)
