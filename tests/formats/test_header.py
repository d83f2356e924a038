"""Headers as untrusted input: what the safetensors library refuses is refused here, always as a HeaderError."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import example, given
from hypothesis import strategies as st
from qconvert.formats.dtypes import BITS
from qconvert.formats.errors import HeaderError
from qconvert.formats.header import PAGE, Header, layout, parse_header, read_header, strict_json
from qconvert.formats.tensors import Spec

NAMES = st.text(max_size=12).filter(lambda name: name != "__metadata__")
SPECS = st.builds(
    Spec,
    st.sampled_from(sorted(name for name, bits in BITS.items() if bits >= 8)),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
)
TENSORS = st.dictionaries(NAMES, SPECS, max_size=6)
METADATA = st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=4)


def file_bytes(document: Any, payload: int) -> bytes:
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(payload)


def parse(data: bytes) -> Header:
    """As `read_header`, without a file."""
    length = int.from_bytes(data[:8], "little")
    return parse_header(data[8 : 8 + length], len(data), "the file.safetensors")


def library(data: bytes) -> dict[str, Any]:
    """name -> dtype, shape, data, as the reference implementation reads them."""
    return dict(safetensors.deserialize(data))


@given(TENSORS, METADATA, st.randoms(use_true_random=False))
def test_what_is_laid_out_is_what_the_library_reads(
    tensors: dict[str, Spec], metadata: dict[str, str], random: Any
) -> None:
    laid = layout(tensors.items(), metadata)
    assert len(laid.prefix) % 8 == 0
    payload = random.randbytes(laid.file_size - len(laid.prefix))
    data = laid.prefix + payload
    theirs = library(data)
    assert set(theirs) == set(tensors)
    for name, spec in tensors.items():
        start = laid.offsets[name]
        assert (theirs[name]["dtype"], tuple(theirs[name]["shape"])) == (spec.dtype, spec.shape)
        assert bytes(theirs[name]["data"]) == data[start : start + spec.nbytes]
    ours = parse(data)
    assert ours.metadata == metadata
    assert {t.name: (t.spec, t.start) for t in ours.tensors} == {
        name: (spec, laid.offsets[name]) for name, spec in tensors.items()
    }
    # Payload order is file order: the writer's, with empty tensors anywhere among their equals.
    assert [t.start for t in ours.tensors] == sorted(t.start for t in ours.tensors)


def test_sub_byte_types_have_the_library_s_sizes() -> None:
    laid = layout([("a", Spec("F4", (3, 6))), ("b", Spec("F6_E2M3", (4, 1)))], {})
    theirs = library(laid.prefix + bytes(12))
    assert (len(theirs["a"]["data"]), len(theirs["b"]["data"])) == (9, 3)
    assert [t.nbytes for t in parse(laid.prefix + bytes(12)).tensors] == [9, 3]
    with pytest.raises(HeaderError, match="impossible size"):
        parse(file_bytes({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, 1))


def test_a_name_is_laid_out_once() -> None:
    spec = Spec("U8", (1,))
    with pytest.raises(ValueError, match="twice"):
        layout([("a", spec), ("a", spec)], {})
    with pytest.raises(ValueError, match="__metadata__"):
        layout([("__metadata__", spec)], {})


# ---- what we accept, the library accepts

JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.sampled_from(
            [0, 1, 2, 4, -1, 2**32, 2**62, 2**63, 2**64, 0.0, 1.0, -0.0, 1e308, "", "F32", "F99"]
        ),
        st.text(max_size=3),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
GOOD = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "U8", "shape": [0, 7], "data_offsets": [16, 16]},
    "c": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
}
PAYLOAD = 22
PATHS = [
    ("__metadata__",), ("__metadata__", "format"), ("a",), ("a", "dtype"), ("a", "shape"), ("a", "shape", 0),
    ("a", "data_offsets"), ("a", "data_offsets", 0), ("a", "data_offsets", 1), ("b", "shape"), ("b", "shape", 1),
    ("b", "data_offsets", 0), ("b", "data_offsets", 1), ("c", "dtype"), ("c", "shape", 0), ("c", "data_offsets", 0),
    ("c", "data_offsets", 1), ("new",), ("a", "new"),
]  # fmt: skip


def accepted_by_library(data: bytes) -> bool:
    try:
        library(data)
    except safetensors.SafetensorError:
        return False
    return True


def agree(data: bytes) -> bool:
    """Whether we accept; fails where we accept what the library refuses, or raise something else."""
    try:
        parse(data)
    except HeaderError as error:
        assert error.file == "the file.safetensors"
        assert error.line().startswith("the file.safetensors: ")
        return False
    assert accepted_by_library(data)
    return True


@given(st.lists(st.tuples(st.sampled_from(PATHS), JUNK), min_size=1, max_size=3), st.integers(-2, 3))
@example([(("b", "shape"), [2**62, 2**62, 0])], 0)
@example([(("b", "shape"), [0, 2**63])], 0)
@example([(("b", "shape"), [2**64, 0])], 0)
@example([(("a", "data_offsets", 0), False)], 0)
@example([(("__metadata__", "format"), None)], 0)
@example([(("__metadata__",), None)], 0)
def test_changed_values(changes: list[tuple[tuple[Any, ...], Any]], extra: int) -> None:
    document: Any = copy.deepcopy(GOOD)
    for path, value in changes:
        parent = document
        for key in path[:-1]:
            known = isinstance(parent, dict) and key in parent
            known = known or (isinstance(parent, list) and isinstance(key, int) and key < len(parent))
            parent = parent[key] if known else {}
        last = path[-1]
        if isinstance(parent, dict) or (
            isinstance(parent, list) and isinstance(last, int) and last < len(parent)
        ):
            parent[last] = value
    agree(file_bytes(document, PAYLOAD + extra))


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(file_bytes(GOOD, PAYLOAD))
    for position, value in changes:
        data[position % len(data)] = value
    length = int.from_bytes(data[:8], "little")
    if length <= len(data) - 8:
        agree(bytes(data))


@given(st.binary(max_size=60))
def test_noise(raw: bytes) -> None:
    agree(file_bytes(raw, 0))
    agree(file_bytes(b"{" + raw, 0))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}}',
        b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b'{"__metadata__":{"a":"\\udfff"}}',
        b'{"__metadata__":{"\\ud800a":""}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0.0]}}',
        b'{"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}',
    ],
)
def test_json_that_python_reads_and_others_do_not(raw: bytes) -> None:
    assert not agree(file_bytes(raw, 0))


def test_a_pair_of_surrogates_is_one_character() -> None:
    raw = b'{"\\ud83d\\ude00":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    assert agree(file_bytes(raw, 0))
    assert parse(file_bytes(raw, 0)).tensors[0].name == "\U0001f600"


# ---- files


def entry(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "shorter than 8 bytes"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "shorter than 8 bytes"),
    "length beyond the end": ((100).to_bytes(8, "little") + b"{}", "truncated inside the header"),
    "length beyond all reason": ((2**63).to_bytes(8, "little") + b"{}", "header length is impossible"),
    "a pickle": (b"PK\x03\x04" + bytes(60), "impossible|truncated|not a safetensors"),
    "not UTF-8": (file_bytes(b'{"\xff":1}', 0), "not UTF-8"),
    "a list": (file_bytes([], 0), "does not start with"),
    "leading space": (file_bytes(b" {}", 0), "does not start with"),
    "cut JSON": (file_bytes(b'{"a":', 0), "not valid JSON"),
    "two documents": (file_bytes(b"{}{}", 0), "not valid JSON"),
    "same name twice": (
        file_bytes(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', 0),
        "'a' occurs twice",
    ),
    "same key twice": (
        file_bytes(b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}', 0),
        "occurs twice",
    ),
    "same name twice, spaces before its colons": (
        file_bytes(b'{"a" :{"dtype" :"U8","shape" :[0],"data_offsets" :[0,0]},"a" :{}}', 0),
        "'a' occurs twice",
    ),
    "same name twice, and colons in names": (
        file_bytes(b'{"a":{},"a:":{},"::":{},"a":{}}', 0),
        "'a' occurs twice",
    ),
    "same name twice, and entries that are long lists or strings": (
        file_bytes(b'{"a":"four","a":[1,2,3]}', 0),
        "'a' occurs twice",
    ),
    "same name twice, once escaped": (file_bytes(rb'{"a":{},"\u0061":{}}', 0), "'a' occurs twice"),
    "same key twice, deeper": (file_bytes(b'{"a":{"dtype":{"b":1,"b":2}}}', 0), "'b' occurs twice"),
    "metadata twice": (file_bytes(b'{"__metadata__":{},"__metadata__":{}}', 0), "occurs twice"),
    "NaN": (file_bytes(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}', 0), "NaN is not JSON"),
    "Infinity": (file_bytes(b'{"a":Infinity}', 0), "Infinity is not JSON"),
    "endless number": (file_bytes(b'{"a":' + b"9" * 100_000 + b"}", 0), "not valid JSON"),
    "nesting bomb": (file_bytes(b'{"a":' * 200_000, 0), "not a header of tensors"),
    "list bomb": (file_bytes(b'{"a":' + b"[" * 200_000, 0), "not a header of tensors"),
    "padded nesting bomb": (file_bytes(b'{"a":       ' * 20_000, 0), "nested too deeply"),
    "list of little": (file_bytes(b'{"a":[' + b"0," * 200_000 + b"0]}", 0), "not a header of tensors"),
    "a million tensors": (file_bytes(b'{' + b'"data_offsets":0,      ' * 200_001 + b'"a":1}', 0), "too many tensors"),
    "metadata of numbers": (file_bytes({"__metadata__": {"a": 1}}, 0), "map of strings"),
    "metadata nested": (file_bytes({"__metadata__": {"a": {"b": "c"}}}, 0), "map of strings"),
    "metadata a list": (file_bytes({"__metadata__": ["a"]}, 0), "map of strings"),
    "no dtype": (file_bytes({"a": {"shape": [0], "data_offsets": [0, 0]}}, 0), "needs exactly"),
    "extra key": (file_bytes({"a": entry(more=1)}, 4), "needs exactly"),
    "entry a list": (file_bytes({"a": [1]}, 4), "needs exactly"),
    "unknown dtype": (file_bytes({"a": entry("F99")}, 4), "unknown dtype .found 'F99'"),
    "dtype a number": (file_bytes({"a": entry(5)}, 4), "unknown dtype"),  # type: ignore[arg-type]
    "shape a number": (file_bytes({"a": entry(shape=4)}, 4), "bad shape"),
    "negative axis": (file_bytes({"a": entry(shape=[-4])}, 4), "bad shape"),
    "axis true": (file_bytes({"a": entry(shape=[True], offsets=[0, 1])}, 1), "bad shape"),
    "axis a float": (file_bytes({"a": entry(shape=[4.0])}, 4), "bad shape"),
    "huge axis": (file_bytes({"a": entry(shape=[2**64])}, 4), "bad shape"),
    "huge product": (file_bytes({"a": entry(shape=[2**40, 2**40])}, 4), "impossible size"),
    "many axes": (file_bytes({"a": entry(shape=[1] * 1000)}, 4), "bad shape"),
    "three offsets": (file_bytes({"a": entry(offsets=[0, 2, 4])}, 4), "bad data_offsets"),
    "offsets backwards": (file_bytes({"a": entry(offsets=[4, 0])}, 4), "does not follow from its shape"),
    "wrong size": (file_bytes({"a": entry("F32")}, 4), "found 4 bytes, expected 16 for F32"),
    "ends behind the file": (file_bytes({"a": entry()}, 3), "ends behind the file"),
    "overlap": (file_bytes({"a": entry(), "b": entry(offsets=[2, 6])}, 6), "'b' overlaps"),
    "same place": (file_bytes({"a": entry(), "b": entry()}, 4), "overlaps"),
    "gap": (file_bytes({"a": entry(), "b": entry(offsets=[5, 9])}, 9), "'b' leaves a gap"),
    "gap at the start": (file_bytes({"a": entry(offsets=[1, 5])}, 5), "'a' leaves a gap"),
    "bytes at the end": (file_bytes({"a": entry()}, 5), "bytes follow the last tensor"),
    "payload without tensors": (file_bytes({}, 1), "bytes follow the last tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_fail_with_their_name_in_one_line(name: str, tmp_path: Path) -> None:
    data, words = BAD[name]
    path = tmp_path / "bad file.safetensors"
    path.write_bytes(data)
    with pytest.raises(HeaderError, match=words) as caught:
        read_header(path)
    line = caught.value.line()
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    assert len(line) < 400 + len(str(path))
    assert name in ("extra key", "leading space", "same name twice", "same key twice", "metadata twice") or (
        not accepted_by_library(data)
    )


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(HeaderError, match=words):
            read_header(path)


def test_an_empty_checkpoint_is_one() -> None:
    assert parse(file_bytes({}, 0)).tensors == ()
    assert parse(file_bytes({"__metadata__": {}}, 0)).metadata == {}


def test_offsets_are_absolute_and_in_payload_order() -> None:
    document = {"late": entry(offsets=[4, 8]), "early": entry(), "none": entry(shape=[0], offsets=[4, 4])}
    data = file_bytes(document, 8)
    header = parse(data)
    start = len(data) - 8
    assert [(t.name, t.start, t.nbytes) for t in header.tensors] == [
        ("early", start, 4),
        ("none", start + 4, 0),
        ("late", start + 4, 4),
    ]
    assert header.data_start == start
    assert header.raw == json.dumps(document).encode()


@pytest.mark.parametrize("text", ['{"a":1,"a":2}', "[NaN]", "-Infinity", "[" * 100_000])
def test_strict_json_raises_value_errors(text: str) -> None:
    with pytest.raises(ValueError):
        strict_json(text)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_strict_json_has_a_depth(opening: str, closing: str) -> None:
    levels = 64 // len(closing)
    fits = opening * levels + "1" + closing * levels
    assert strict_json(fits) == json.loads(fits)
    for more in (1, 100, 100_000):
        with pytest.raises(ValueError, match="nested"):
            strict_json(opening * (levels + more) + "1" + closing * (levels + more))
    assert strict_json("[" + "[1]," * 1000 + "[1]]")


@pytest.mark.parametrize("text", ["1e999", "-1e400", '{"a": [1e309]}'])
def test_numbers_beyond_any_number_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="beyond any number"):
        strict_json(text)
    assert strict_json("1e308") == 1e308


TWIN_CHANGES: list[tuple[str, Any]] = [
    ("shape", [2.0, 2]),
    ("shape", [True, 2]),
    ("shape", "[2, 2]"),
    ("shape", {"2": 2}),
    ("shape", [[2, 2]]),
    ("dtype", ["F32"]),
    ("dtype", None),
    ("data_offsets", [16.0, 32]),
    ("data_offsets", [16, 32.0]),
    ("data_offsets", [True, 32]),
    ("data_offsets", "ab"),
    ("data_offsets", {"16": 0, "32": 0}),
    ("data_offsets", [16, 32, 48]),
    ("data_offsets", [-16, 0]),
    ("data_offsets", [16, 31]),
    ("data_offsets", [32, 48]),
    ("more", 1),
]


@pytest.mark.parametrize(("key", "value"), TWIN_CHANGES)
def test_a_tensor_like_the_one_before_is_looked_at_as_closely(key: str, value: Any) -> None:
    twins = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 32]},
    }
    assert parse(file_bytes(twins, 32)).tensors[1].start == parse(file_bytes(twins, 32)).data_start + 16
    assert not agree(file_bytes(twins | {"b": twins["b"] | {key: value}}, 32))
    del twins["b"]["shape"]
    assert not agree(file_bytes(twins, 32))


@given(TENSORS, st.integers(0, 511).map(lambda units: 8 * units))
def test_payload_begins_where_it_is_wanted_in_a_page(tensors: dict[str, Spec], offset: int) -> None:
    laid = layout(tensors.items(), {"a": "b"}, offset)
    assert len(laid.prefix) % PAGE == offset
    assert len(laid.prefix) < len(layout(tensors.items(), {"a": "b"}).prefix) + PAGE
    data = laid.prefix + bytes(laid.file_size - len(laid.prefix))
    assert set(library(data)) == set(tensors)
    assert parse(data).metadata == {"a": "b"}
