"""Files that hold tensors: told apart by their first bytes, whatever they are called."""

from __future__ import annotations

from qconvert.formats import gguf_container
from qconvert.formats.header import MAX_HEADER_BYTES, Header, read_header
from qconvert.formats.remote import Place

#: What a folder is searched for, in this order.
SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
#: A zip archive, as torch.save writes one; and the start of a pickle stream.
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


def read_container(path: Place, index: int = 0) -> Header:
    """Names, types, shapes and offsets of a file's tensors. `index` is the file's number in its checkpoint.

    Raises HeaderError for a file that is none of the known containers, or one that cannot be trusted.
    """
    try:
        with path.open("rb") as handle:
            start = handle.read(8)
    except OSError:
        start = b""
    # A safetensors file begins with the length of its header, which may begin with any byte, 0x80 among them.
    other = int.from_bytes(start, "little") > MAX_HEADER_BYTES
    if other and start.startswith(gguf_container.MAGIC):
        return gguf_container.read_gguf(path, index)
    if (other and start.startswith((_ZIP, _PICKLE))) or path.suffix in SUFFIXES[2:]:
        from qconvert.formats.pickle_container import read_pickle

        return read_pickle(path, index)
    return read_header(path, index)
