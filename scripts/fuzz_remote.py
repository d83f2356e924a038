"""A file system that lies: about sizes, kinds and names of files, in what it lists, and in what it sends."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem
from fuzz_case import Case, command
from fuzz_seeds import Seeds
from fuzz_values import NUMBERS, STRINGS, hacked

PROTOCOL = "lying"
#: Beside the files: what is said of them.
LIES = "lies.json"


class LyingFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Local files under the path of the URL. Their folder's lies say what differs from what is there."""

    protocol = PROTOCOL
    cachable = False

    def lies(self, path: str) -> dict[str, Any]:
        found = next((folder / LIES for folder in Path(path).parents if (folder / LIES).exists()), None)
        said: dict[str, Any] = json.loads(found.read_text()) if found else {}
        return said

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        file, said = Path(path), self.lies(path + "/x")
        if not file.exists():
            raise FileNotFoundError(path)
        true = {"name": path, "size": file.stat().st_size, "type": "directory" if file.is_dir() else "file"}
        return true | (said.get("info", {}) if file.suffix in said.get("of", ()) else {})

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        names = [str(file) for file in sorted(Path(path).iterdir())]
        names += self.lies(path + "/x").get("names", [])
        return [{"name": name, "size": 1, "type": "file"} for name in names] if detail else names

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        data, said = Path(path).read_bytes()[start:end], self.lies(path)
        if Path(path).suffix not in said.get("of", ()):
            return data
        match said.get("sends"):
            case "short":
                return data[:-1]
            case "long":
                return data + data
            case "nothing":
                return b""
            case "other":
                return data[::-1]
            case "error":
                raise OSError("no\nreason \x1b[31m")
            case "nonsense":
                raise KeyError("x")
            case "forbidden":
                raise PermissionError("403")
            case "gone":
                raise FileNotFoundError(path)
        return data


fsspec.register_implementation(PROTOCOL, LyingFileSystem, clobber=True)


def remote(r: Random, seeds: Seeds) -> Case:
    """A checkpoint on a file system that lies, or one that is spoiled itself."""
    seed = r.choice(
        [r.choice(seeds.files), r.choice(seeds.folders), r.choice(seeds.gguf), seeds.sharded, seeds.torch]
    )
    files = {f"r/{name}": data for name, data in seed.files.items()}
    of = sorted({Path(name).suffix for name in files})
    said: dict[str, Any] = {"of": r.sample(of, r.randint(1, len(of)))}
    if r.randrange(2):
        size = r.choice([None, "5", [], -1, *NUMBERS])
        said["info"] = r.choice(
            [
                {"size": size},
                {"type": "directory"},
                {"type": "x"},
                {"ETag": r.choice(STRINGS)},
                {"size": None, "ETag": {}},
            ]
        )
    if r.randrange(2):
        sends = ["short", "long", "nothing", "other", "error", "nonsense", "forbidden", "gone"]
        said["sends"] = r.choice(sends)
    if r.randrange(2):
        ends = [".safetensors", ".gguf", ".index.json", "", "config.json", "/", "/.."]
        said["names"] = [r.choice(STRINGS) + r.choice(ends) for _ in range(r.randint(1, 4))]
    if r.randrange(3) == 0:
        name = r.choice(list(files))
        files[name] = hacked(r, files[name], 1500)
    files[f"r/{LIES}"] = json.dumps(said).encode()
    given = f"{PROTOCOL}://{{}}/r/{seed.main}".rstrip("/")
    return Case(
        "remote", files, [given if word.startswith("{}/r") else word for word in command(r, "r/" + seed.main)]
    )
