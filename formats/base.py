"""What a format is: a stateless codec between float32 rows and stored tensors.

Between storage and values lies a third form, the *codes*: the numbers a format really holds (nibbles in one fixed
order, block scales unswizzled, ...), free of how a dialect lays them out. `load` and `store` move between storage
and codes and never change a value; `decode` and `encode` move between codes and float32. Two dialects that share
codes (`family`) therefore convert without requantising.

All arrays are numpy; bf16 travels as uint16, 8-bit floats as uint8. `a` and `b` bound a run of rows [a, b).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from qconvert.formats.finding import Finding
from qconvert.formats.tensors import Spec
from qconvert.kernels.api import Backend, Quality
from qconvert.kernels.arrays import F32, Array, np

Options = Mapping[str, Any]
Codes = dict[str, Array]

#: rows: the chunk's rows are contiguous. tiles: swizzled, contiguous per 128 rows. columns: [C, N], a chunk is a run
#: of columns. whole: written once.
Place = Literal["rows", "tiles", "columns", "whole"]
#: What must be known of the whole tensor before a chunk can be encoded.
Statistic = Literal["none", "amax", "sample"]


class Part(NamedTuple):
    """A tensor that a codec owns in its output: `<layer>.<suffix>`."""

    suffix: str
    spec: Spec
    place: Place = "rows"


class Stored(Protocol):
    """One layer as it lies in a file."""

    n: int
    k: int
    options: Options

    def has(self, suffix: str) -> bool: ...

    def dtype(self, suffix: str) -> str: ...

    def shape(self, suffix: str) -> tuple[int, ...]: ...

    def rows(self, suffix: str, a: int, b: int) -> Array:
        """Rows [a, b) along the first axis, raw bits."""
        ...

    def columns(self, suffix: str, a: int, b: int) -> Array:
        """Columns [a, b) of a 2-D tensor."""
        ...

    def whole(self, suffix: str) -> Array:
        """The whole (small) tensor; read once, kept."""
        ...


class Group(NamedTuple):
    """The tensors under one layer prefix, as recognition sees them."""

    prefix: str
    tensors: Mapping[str, Spec]
    #: `scaled_fp8` sentinel in the file.
    legacy_fp8: bool = False
    legacy_full_precision: bool = False
    #: config.json beside the file ({} when there is none), and the header's string entries.
    config: Mapping[str, Any] = MappingProxyType({})
    metadata: Mapping[str, str] = MappingProxyType({})
    #: Reads a small tensor that describes the others (`weight_shape`, a JSON record); None when it is no small one.
    peek: Callable[[str], Array | None] = lambda suffix: None
    #: The first 64 KiB of a tensor, flat and in its own type: enough to recognise a constant or a mean.
    head: Callable[[str], Array | None] = lambda suffix: None

    def has(self, *suffixes: str) -> bool:
        return all(suffix in self.tensors for suffix in suffixes)


class Recognition(NamedTuple):
    """A codec's claim on a layer: logical shape [n, k], options, the suffixes it consumes, and how it knows."""

    codec: str
    n: int
    k: int
    options: dict[str, Any]
    owned: frozenset[str]
    findings: tuple[Finding, ...] = ()
    #: Leading axis of a bank of experts; 0 for an ordinary layer.
    experts: int = 0


class Codec(ABC):
    """One stored format. Subclasses are stateless; see the module text for the terms."""

    #: Registry name, unique.
    name: str
    #: Values of "format" in a ComfyUI marker that mean this codec.
    marker_formats: tuple[str, ...] = ()
    #: Suffixes whose presence makes a layer of a name: `<layer>.<anchor>`. Tensors named below an anchor
    #: (`weight.absmax`, `weight:_data`) belong to the same layer under that longer suffix.
    anchors: tuple[str, ...] = ("weight",)
    #: Codecs with the same family share their codes.
    family: str
    #: Suffixes of a static activation scale beside the weight. With option `input` a target codec writes it, in its
    #: own sense, from the codes; otherwise it is a companion that is copied or dropped.
    activation_scales: tuple[str, ...] = ("input_scale", "scale_input")
    #: Whether that scale means what it means in the codecs of the family.
    activation_moves: bool = True
    #: Sub-modules of a layer that hold tensors of it: `<layer>.<submodule>.<name>`.
    submodules: tuple[str, ...] = ()
    #: Whether `encode` exists; some formats are only read.
    writable: bool = True

    @abstractmethod
    def recognise(self, group: Group, marker: Mapping[str, Any] | None) -> Recognition | str:
        """Claim a layer, or say in words why its tensors are not this format.

        `marker` is a marker that names this format, or None when only the tensors speak.
        """

    def refusal(self, n: int, k: int, options: Options) -> str | None:
        """Why the format cannot hold an [n, k] weight under these options; None when it can."""
        return None

    def parts(self, n: int, k: int, options: Options) -> tuple[Part, ...]:
        """The tensors written for an [n, k] layer."""
        raise NotImplementedError(f"{self.name} is not written")

    def marker(self, options: Options) -> dict[str, Any] | None:
        """The ComfyUI marker of a layer with these options; None for formats without one."""
        return None

    def word(self, options: Options) -> str:
        """The format for people, where no marker names it."""
        return self.name

    def rotation(self, options: Options) -> int:
        """ConvRot group of the stored basis, 0 when not rotated."""
        return int(options.get("rotation", 0))

    def remark(self, options: Options) -> str:
        """What a report should add when codes are moved out of or into this form; "" when nothing."""
        return ""

    def layout(self, options: Options) -> tuple[Any, ...]:
        """All that decides where bits lie: equal layouts mean that payload can be copied as it is."""
        return ()

    def row_step(self, options: Options) -> int:
        """Chunks start at multiples of this many rows."""
        return 1

    def statistic(self, options: Options) -> Statistic:
        """What `prepare` needs."""
        return "none"

    @abstractmethod
    def load(self, stored: Stored, a: int, b: int, backend: Backend) -> Codes:
        """Codes of rows [a, b), with what is common to all rows among them."""

    @abstractmethod
    def decode(self, codes: Codes, options: Options, backend: Backend) -> F32:
        """[b-a, k] float32 in the stored basis (still rotated where the format rotates)."""

    def rounding(self, codes: Codes, options: Options, backend: Backend) -> F32 | None:
        """[b-a, k]: the squared error that each value may be expected to carry from having been rounded to this format.

        See `formats.cells`. None where the codes do not tell.
        """
        return None

    def prepare(self, statistic: Any, options: Options, backend: Backend, quality: Quality) -> Codes:
        """What the whole tensor shares (tensor scale, codebook), from the amax (float) or the sampled rows."""
        return {}

    def fits(self, options: Options) -> bool:
        """Whether `fit` betters what `prepare` made of the amax."""
        return False

    def fit(self, common: Codes, sample: F32, options: Options, backend: Backend) -> Codes:
        """`common` for the least error on sampled rows [S, k] in the stored basis (quality `best`)."""
        return common

    def encode(self, x: F32, common: Codes, options: Options, backend: Backend, quality: Quality) -> Codes:
        """Codes of a chunk x [R, k] in the stored basis, `common` (from `prepare`) included."""
        raise NotImplementedError(f"{self.name} is not written")

    def store(self, codes: Codes, options: Options, k: int) -> dict[str, Array]:
        """A chunk's share of every part, laid out as `parts` says (whole parts may be repeated)."""
        raise NotImplementedError(f"{self.name} is not written")

    def carries(self, source: Options, target: Options) -> bool:
        """Whether codes stored under `source` options can be stored under `target` options with the same values."""
        return False


def scalar(value: Array) -> np.float32:
    """The one element of a 0-D or [1] array."""
    return np.float32(value.reshape(-1)[0])


def is_scalar(shape: tuple[int, ...]) -> bool:
    return all(dim == 1 for dim in shape)


def is_row(shape: tuple[int, ...], n: int) -> bool:
    """[N], [N,1], [N,1,1,1]: one value a row."""
    return len(shape) >= 1 and shape[0] == n and all(dim == 1 for dim in shape[1:])


def up(x: int, m: int) -> int:
    """x rounded up to a multiple of m."""
    return (x + m - 1) // m * m


def stored_k(options: Options, k: int) -> int:
    """Columns that are stored of a layer with K = k: more where a writer padded them (option `padded`)."""
    return int(options["padded"]["k"]) if "padded" in options else k


def cut(x: F32, options: Options) -> F32:
    """Decoded rows without the columns that were padding."""
    if "padded" not in options or x.shape[1] == options["padded"]["true_k"]:
        return x
    return np.ascontiguousarray(x[:, : options["padded"]["true_k"]])
