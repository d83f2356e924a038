"""torch.save files: tensors at their offsets, no code run, everything else refused with a reason."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import other_files as o
import pytest
import torch
from qconvert.formats import pickle_container
from qconvert.formats.checkpoint import Checkpoint, opened
from qconvert.formats.errors import QConvertError


def model(rng: Any) -> dict[str, torch.Tensor]:
    def values(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    large = values(100, 64)
    return {
        "a.weight": values(48, 256).bfloat16(),
        "a.bias": values(48),
        "view.weight": large[10:58],
        "eight.weight": values(8, 8).to(torch.float8_e4m3fn),
        "ids": torch.arange(5),
        "norm.weight": values(16).half(),
    }


def same(a: torch.Tensor, b: Any) -> bool:
    return bool(a.contiguous().view(torch.uint8).numpy().tobytes() == b.tobytes())


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "module"])
@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".bin", ".weights"])
def test_tensors_where_they_lie(wrap: str, suffix: str, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = model(rng)
    path = tmp_path / f"m{suffix}"
    extra = {"epoch": 3, "optimizer": {"x": torch.ones(3)}}
    torch.save(tensors if wrap == "plain" else {wrap: tensors} | extra, path)
    with opened(path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        for name, tensor in tensors.items():
            assert same(tensor, checkpoint.read(name)), name
            assert checkpoint.tensors[name].shape == tuple(tensor.shape)


def test_becomes_a_safetensors_file(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = {name: value for name, value in model(rng).items() if name != "eight.weight"}
    torch.save({"state_dict": tensors}, tmp_path / "m.ckpt")
    outcome = o.run(tmp_path / "m.ckpt", "convrot_int8", tmp_path / "out.safetensors")
    written = o.load(outcome.output)
    assert written["a.weight"].dtype == torch.int8
    assert torch.equal(written["ids"], tensors["ids"])
    assert torch.equal(written["a.bias"], tensors["a.bias"])


def test_shards_with_an_index(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = model(rng)
    names = sorted(tensors)
    shards = {"pytorch_model-1.bin": names[:3], "pytorch_model-2.bin": names[3:]}
    for file, part in shards.items():
        torch.save({name: tensors[name] for name in part}, tmp_path / file)
    mapping = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": mapping}))
    with opened(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        assert all(same(tensor, checkpoint.read(name)) for name, tensor in tensors.items())


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def _saved(kind: str, path: Path, weight: torch.Tensor) -> None:
    if kind == "code":
        torch.save({"a.weight": Evil(path.with_name("ran"))}, path)
    elif kind == "bare code":
        path.write_bytes(pickle.dumps(Evil(path.with_name("ran"))))
    elif kind == "module":
        torch.save(torch.nn.Linear(3, 4), path)
    elif kind == "old":
        torch.save({"a.weight": weight}, path, _use_new_zipfile_serialization=False)
    elif kind == "strided":
        torch.save({"a.weight": weight.t()}, path)
    elif kind == "sparse":
        torch.save({"a.weight": weight.to_sparse()}, path)
    elif kind == "empty":
        torch.save({"epoch": 1}, path)
    elif kind == "junk":
        path.write_bytes(b"no such thing")
    else:
        torch.save({"a.weight": weight}, path)
        with zipfile.ZipFile(path) as old:
            entries = {entry.filename: old.read(entry) for entry in old.infolist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for name, data in entries.items():
                new.writestr(name, data)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("code", "it names posix.system, which is no tensor"),
        ("bare code", "a pickle without a zip archive"),
        ("module", "Linear, which is no tensor"),
        ("old", "a pickle without a zip archive"),
        ("strided", "is a strided view"),
        ("sparse", ""),
        ("empty", "holds no tensors"),
        ("junk", "no torch file at all"),
        ("compressed", "entries are compressed"),
    ],
)
def test_refused(kind: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    _saved(kind, path, torch.ones(4, 6))
    with pytest.raises(QConvertError) as caught:
        Checkpoint.open(path)
    assert words in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("cut", [10, 100, 400])
def test_truncated(cut: int, tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "m.pt"
    torch.save(model(rng), path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(QConvertError):
        Checkpoint.open(path)


def archive(path: Path, pickle: bytes, order: bytes = b"little", **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as made:
        for name, data in (
            ("data.pkl", pickle),
            ("byteorder", order),
            ("data/0", bytes(64)),
            ("version", b"3\n"),
        ):
            made.writestr(f"m/{name}", data)
    return path


def storage(offset: int) -> bytes:
    """One element of F32 at `offset` of storage 0, which has sixteen."""
    stored = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\x10tQ"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + stored
        + b"J"
        + offset.to_bytes(4, "little", signed=True)
        + b"(K\1t(K\1t\x89ccollections\nOrderedDict\n)RtR"
    )


A, B = b"X\1\0\0\0a", b"X\1\0\0\0b"


@pytest.mark.parametrize(
    ("pickle", "words"),
    [
        (b"}q\0" + A + b"h\0s.", "nested too deeply"),
        (b"}" + b"q\0" + A + b"}" + A + b"h\0ss.", "nested too deeply"),
        (b"}" + (A + b"}") * 5000 + b"s" * 5000 + b".", "nested too deeply"),
        (
            b"}q\0" + b"".join(b"}%bh%cs%bh%csq%c" % (A, n, B, n, n + 1) for n in range(60)) + b".",
            "hold too much",
        ),
        (b"}" + A + b"cbuiltins\nbytearray\n(J\xff\xff\xff\x3ftRs.", "it names builtins.bytearray"),
        (b"}" + A + b"ctorch\nFloatTensor\n(J\xff\xff\xff\x3ftRs.", "it names torch.FloatTensor"),
        (b"}" + A + storage(-1) + b"s.", "refuses it: Tensor: invalid storage offset -1"),
        (b"}" + A + storage(1 << 30) + b"s.", ""),
        (b"}X\3\0\0\0a.b" + storage(0) + b"s" + A + b"}" + B + storage(0) + b"ss.", "'a.b' occurs twice"),
        (b"N0" * (pickle_container.MAX_OPERATIONS // 2) + b"N.", "too many operations"),
        (b"U" + bytes(200) * 200_000, "too large"),
        (b"\xff.", "cannot be read"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_pickles_that_torch_would_read_for_ever_or_into_all_memory(
    pickle: bytes, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, and none of torch's own on the terminal."""
    with pytest.raises(QConvertError) as caught:
        Checkpoint.open(archive(tmp_path / "m.pt", b"\x80\2" + pickle))
    assert words in str(caught.value) and "\n" not in caught.value.line()
    assert capfd.readouterr() == ("", "")


def test_entries_that_claim_more_than_there_is(tmp_path: Path) -> None:
    """What is compressed is never unpacked, and what reaches beyond the file never read."""
    weight = b"\x80\2}" + A + storage(0) + b"s."
    assert list(Checkpoint.open(archive(tmp_path / "right.pt", weight)).tensors) == ["a"]
    for name, order, words in (
        ("bomb", b"little" + b" " * 50_000_000, "compressed"),
        ("odd", b"big", "big-endian"),
    ):
        compression = zipfile.ZIP_DEFLATED if name == "bomb" else zipfile.ZIP_STORED
        path = archive(tmp_path / f"{name}.pt", weight, order, compression=compression)
        tracemalloc.start()
        with pytest.raises(QConvertError, match=words):
            Checkpoint.open(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()
    data = bytearray((tmp_path / "right.pt").read_bytes())
    for at in (20, 24):  # both sizes in the directory's entry of data/0
        start = data.rindex(b"PK\1\2", 0, data.rindex(b"m/data/0"))
        data[start + at : start + at + 4] = (0x7FFFFFF0).to_bytes(4, "little")
    (tmp_path / "claims.pt").write_bytes(data)
    with pytest.raises(QConvertError, match="reaches beyond the file"):
        Checkpoint.open(tmp_path / "claims.pt")


@pytest.mark.parametrize("key", ["a\ud800", "\udfff.weight"])
def test_a_name_that_is_no_text_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "model.pt"
    torch.save({key: torch.ones(2, 2)}, path)
    with pytest.raises(QConvertError, match="half a surrogate pair"):
        Checkpoint.open(path)
