"""Files and folders as sources: shards with their index, what an index may name, and reading payload."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from qconvert.formats.checkpoint import MAX_MARKER_BYTES, Checkpoint, dumps, opened
from qconvert.formats.errors import HeaderError, QConvertError, UsageError
from qconvert.formats.reader import LayerReader

INDEX = "model.safetensors.index.json"


@pytest.fixture
def shards(d: ModuleType, rng: np.random.Generator, tmp_path: Path) -> Callable[..., Path]:
    """A folder of two shards; `weight_map` entries can be changed, None removes one."""

    def make(**changes: str | None) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        one = {
            "a.weight": d.narrow(rng.standard_normal((4, 8)), "BF16"),
            "a.bias": d.f32_tensor([1, 2, 3, 4]),
        }
        two = {"b.weight": d.T("I8", np.arange(12, dtype=np.int8).reshape(3, 4))}
        d.write(folder / "model-00001-of-00002.safetensors", one, {"format": "pt", "both": "first"})
        d.write(folder / "model-00002-of-00002.safetensors", two, {"both": "second", "more": "2"})
        weight_map: dict[str, Any] = dict.fromkeys(one, "model-00001-of-00002.safetensors")
        weight_map |= dict.fromkeys(two, "model-00002-of-00002.safetensors")
        weight_map |= {key.replace("__", "."): value for key, value in changes.items()}
        weight_map = {key: value for key, value in weight_map.items() if value is not None}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return make


def test_shards_are_one_checkpoint(shards: Callable[..., Path], d: ModuleType) -> None:
    folder = shards()
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "other.safetensors").write_bytes(b"not in the index, so never looked at")
    with Checkpoint.open(folder) as checkpoint:
        assert [file.name for file in checkpoint.files] == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ]
        assert set(checkpoint.tensors) == {"a.weight", "a.bias", "b.weight"}
        assert checkpoint.config == {"model_type": "x"}
        assert checkpoint.metadata == {"format": "pt", "both": "first", "more": "2"}
        assert checkpoint.nbytes == sum(file.stat().st_size for file in checkpoint.files)
        for file in checkpoint.files:
            for name, tensor in d.read(file).items():
                assert np.array_equal(checkpoint.read(name), tensor.bits)
                assert checkpoint.tensors[name].dtype == tensor.dtype
        view = checkpoint.view()
        assert view.files == tuple(file.name for file in checkpoint.files)
        assert view.tensors["b.weight"] == ("I8", (3, 4))


def test_equal_headers_have_equal_digests(shards: Callable[..., Path], tmp_path: Path) -> None:
    folder = shards()
    with opened(folder) as first, opened(folder) as again:
        assert first.digest() == again.digest()
    path = folder / "model-00002-of-00002.safetensors"
    data = path.read_bytes()
    with opened(path) as whole:
        digest = whole.digest()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with opened(path) as payload_changed:
        assert payload_changed.digest() == digest
    path.write_bytes(data.replace(b"b.weight", b"c.weight"))
    with opened(path) as header_changed:
        assert header_changed.digest() != digest


@pytest.mark.parametrize(
    "name",
    [
        "../model-00002-of-00002.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "..\\x.safetensors",
        "C:x.safetensors",
        "a\0b",
    ],
)
def test_an_index_leads_nowhere_else(name: str, shards: Callable[..., Path]) -> None:
    with pytest.raises(QConvertError, match="outside its folder") as caught:
        Checkpoint.open(shards(b__weight=name))
    assert INDEX in caught.value.line()


def test_an_index_names_what_is_there(shards: Callable[..., Path]) -> None:
    with pytest.raises(QConvertError, match=r"shard that is not there.*found gone.safetensors"):
        Checkpoint.open(shards(b__weight="gone.safetensors"))
    with pytest.raises(QConvertError, match=r"lists tensor 'c.weight' in .*, which does not hold it"):
        Checkpoint.open(shards(c__weight="model-00001-of-00002.safetensors"))
    with pytest.raises(QConvertError, match=r"holds tensor 'a.bias', which the index does not list there"):
        Checkpoint.open(shards(a__bias=None))
    with pytest.raises(QConvertError, match=r"does not hold it|does not list there"):
        Checkpoint.open(shards(a__bias="model-00002-of-00002.safetensors"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": ["a"]}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "not a string"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "occurs twice"),
        ('{"weight_map": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("\ud800", "not valid JSON"),
    ],
)
def test_bad_indexes(text: str, words: str, shards: Callable[..., Path]) -> None:
    folder = shards()
    (folder / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(QConvertError, match=words) as caught:
        Checkpoint.open(folder)
    assert INDEX in caught.value.line()


def test_a_tensor_is_in_one_shard_only(shards: Callable[..., Path]) -> None:
    folder = shards()
    one, two = sorted(folder.glob("model-*"))
    copy = folder / "model-00003.safetensors"
    copy.write_bytes(two.read_bytes())
    document = json.loads((folder / INDEX).read_text())
    with pytest.raises(HeaderError, match=r"'b.weight' is in two shards"):
        Checkpoint(folder, [one, two, copy])
    # An index cannot name one tensor twice, so it always leaves the second one out.
    document["weight_map"]["b.weight"] = copy.name
    document["weight_map"]["x"] = two.name
    (folder / INDEX).write_text(json.dumps(document))
    with pytest.raises(QConvertError, match=r"does not hold it|does not list there"):
        Checkpoint.open(folder)


def test_what_to_open(d: ModuleType, tmp_path: Path) -> None:
    tensors = {"a.weight": d.f32_tensor([[1.0]])}
    with pytest.raises(UsageError, match="no such file or folder"):
        Checkpoint.open(tmp_path / "none")
    with pytest.raises(UsageError, match=r"no .safetensors file in this folder"):
        Checkpoint.open(tmp_path)
    d.write(tmp_path / "one.safetensors", tensors)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.files == [tmp_path / "one.safetensors"]
    d.write(tmp_path / "two.safetensors", tensors)
    with pytest.raises(UsageError, match=r"2 .safetensors files and no index"):
        Checkpoint.open(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageError, match="several index files"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "NaN", b"\xff".decode("latin1")])
def test_a_broken_config_is_an_error_with_its_name(text: str, d: ModuleType, tmp_path: Path) -> None:
    d.write(tmp_path / "x.safetensors", {"a.weight": d.f32_tensor([[1.0]])})
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(QConvertError, match=r"config.json: is not"):
        Checkpoint.open(tmp_path / "x.safetensors")


def test_no_length_of_a_header_looks_like_another_container(d: ModuleType, tmp_path: Path) -> None:
    """0x80 begins a pickle, and one safetensors header in 32 as well."""
    lengths = set()
    for extra in range(300):
        path = d.write(tmp_path / "x.safetensors", {"a.weight": d.f32_tensor([[1.0]])}, {"x": "y" * extra})
        with opened(path) as checkpoint:
            assert checkpoint.read("a.weight") == 1
        lengths.add(path.read_bytes()[0])
    assert 0x80 in lengths


# ---- payload


@pytest.fixture
def path(d: ModuleType, rng: np.random.Generator, tmp_path: Path) -> Path:
    tensors = {
        "f.weight": d.f32_tensor(rng.standard_normal((6, 5))),
        "b.weight": d.narrow(rng.standard_normal((4, 3, 2)), "BF16"),
        "q.weight": d.narrow(rng.standard_normal((7, 4)), "F8_E4M3"),
        "h.weight": d.narrow(rng.standard_normal((2, 2)), "F64"),
        "s.scale": d.f32_tensor(3.0),
        "empty.weight": d.T("I64", np.zeros((0, 4), np.int64)),
        "m.weight": d.T("I8", np.zeros((2, 2), np.int8)),
        "m.comfy_quant": d.marker_tensor({"format": "int8_tensorwise"}),
    }
    return d.write(tmp_path / "x.safetensors", tensors)


def test_tensors_are_read_as_they_are_stored(path: Path, d: ModuleType) -> None:
    with opened(path) as checkpoint:
        for name, tensor in d.read(path).items():
            got = checkpoint.read(name)
            assert got.dtype == tensor.bits.dtype
            assert got.shape == tensor.bits.shape
            assert np.array_equal(got, tensor.bits)
            got[...] = 0
            assert np.array_equal(checkpoint.read(name), tensor.bits)
        assert checkpoint.marker_bytes() == {"m": b'{"format": "int8_tensorwise"}'}


def test_a_file_cut_while_it_is_read_is_noticed(path: Path) -> None:
    size = path.stat().st_size
    with opened(path) as checkpoint:
        last = max(checkpoint.tensors.values(), key=lambda tensor: tensor.start + tensor.nbytes)
        os.truncate(path, size - 1)
        with pytest.raises(
            QConvertError, match=rf"ended early.*found end at {size - 1}, expected byte {size}"
        ):
            checkpoint.pread(0, last.start, last.nbytes)
        with pytest.raises(QConvertError, match="changed while it was being read"):
            checkpoint.check_unchanged()


@pytest.mark.parametrize("keep", [0, 4, 8, 30, -30, -1])
def test_cut_files_are_refused(keep: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(HeaderError) as caught:
        Checkpoint.open(path)
    assert str(path) in caught.value.line()


def test_a_changed_source_is_noticed(path: Path) -> None:
    with opened(path) as checkpoint:
        checkpoint.check_unchanged()
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        with pytest.raises(QConvertError, match="the source changed"):
            checkpoint.check_unchanged()


def test_a_huge_marker_is_no_marker(d: ModuleType, opened: Callable[..., Any]) -> None:
    tensors = {
        "a.weight": d.T("I8", np.zeros((2, 2), np.int8)),
        "a.comfy_quant": d.T("U8", np.zeros(MAX_MARKER_BYTES + 1, np.uint8)),
    }
    with pytest.raises(QConvertError, match=r"a.comfy_quant: marker tensor is too large"):
        opened(tensors).marker_bytes()


def test_rows_columns_whole_and_experts(d: ModuleType, opened: Callable[..., Any], backend: Any) -> None:
    from qconvert.formats.layers import Layer
    from qconvert.formats.registry import codec

    values = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)
    tensors = {
        "x.weight": d.T("F32", values),
        "x.one": d.f32_tensor([5.0, 6.0]),
        "x.flat": d.T("F32", values[0]),
        "x.single": d.f32_tensor(7.0),
        "x.half": d.narrow(values[0].astype(np.float64), "BF16"),
    }
    checkpoint = opened(tensors)
    specs = {name.removeprefix("x."): tensor for name, tensor in checkpoint.tensors.items()}
    layer = Layer("x", 6, 4, codec("plain"), {"dtype": "F32"}, specs, frozenset({"weight"}), experts=2)
    reader = LayerReader(checkpoint, layer, expert=1)
    assert np.array_equal(reader.rows("weight", 2, 5), values[1, 2:5])
    assert np.array_equal(reader.columns("weight", 1, 3), values[1, :, 1:3])
    assert np.array_equal(reader.whole("weight"), values[1])
    assert (reader.shape("weight"), reader.dtype("weight"), reader.row_bytes("weight")) == ((6, 4), "F32", 16)
    assert reader.whole("one").shape == () and reader.whole("one") == 6
    assert reader.rows("one", 0, 1) == 6
    assert np.array_equal(reader.rows("flat", 5, 6), values[0, 5:6])
    assert reader.whole("single") == 7
    assert reader.rows("half", 0, 2).dtype == np.uint16
    assert reader.has("half") and not reader.has("nothing")
    assert reader.whole("weight") is reader.whole("weight")
    reader.release()
    assert np.array_equal(reader.whole("weight"), values[1])


def test_dumps_is_compact_and_keeps_order_and_letters() -> None:
    assert dumps({"b": [1, 2], "a": "ü"}) == '{"b":[1,2],"a":"ü"}'
