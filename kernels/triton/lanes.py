"""Between numpy arrays and the device: a lane for every thread, with pinned buffers in turn and a stream of its own.

While one lane computes, others copy: a converter's threads keep the bus and the GPU busy at the same time. An upload
returns once its bytes are in a pinned buffer; the next one fills the other buffer while they travel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from qconvert.kernels.triton.chips import interpreted
from torch import Tensor

#: Pinned buffers grow in steps of this many bytes.
STEP = 1 << 20
#: The interpreter keeps its state in module globals: one thread at a time.
_INTERPRETER = threading.RLock()


class Lane:
    """Uploads and downloads of one thread. On the CPU the same buffers, not pinned, and no stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gpu = device.type == "cuda"
        cuda: Any = torch.cuda
        self.stream: Any = cuda.Stream(device) if gpu else None
        #: When a buffer's bytes have left it.
        self._free: list[Any] = [cuda.Event() if gpu else None for _ in range(2)]
        self._buffers = [self._room(0), self._room(0)]
        self._down = self._room(0)
        self._turn = 0

    def _room(self, size: int) -> Tensor:
        up = -(-size // STEP) * STEP
        return torch.empty(up, dtype=torch.uint8, pin_memory=self.stream is not None)

    def upload(self, a: NDArray[Any]) -> Tensor:
        """A copy of `a` on the device; uint16 (bf16 bits) as int16."""
        a = np.ascontiguousarray(a).reshape(a.shape)
        a = a.view(np.int16) if a.dtype == np.uint16 else a
        turn, self._turn = self._turn, 1 - self._turn
        free = self._free[turn]
        if free is not None:
            free.synchronize()
        if self._buffers[turn].numel() < a.nbytes:
            self._buffers[turn] = self._room(a.nbytes)
        buffer = self._buffers[turn][: a.nbytes]
        # The buffer's dtype has to be told from numpy's: torch names it by a zero-sized array.
        dtype = torch.from_numpy(np.empty(0, a.dtype)).dtype
        buffer.numpy()[:] = a.reshape(-1).view(np.uint8)
        there = torch.empty(a.shape, dtype=dtype, device=self.device)
        there.reshape(-1).view(torch.uint8).copy_(buffer, non_blocking=True)
        if free is not None:
            free.record(self.stream)
        return there

    def download(self, t: Tensor) -> NDArray[Any]:
        """The values of `t`, in memory of their own, once all work of this lane is done."""
        flat = t.contiguous().reshape(-1)
        size = flat.numel() * flat.element_size()
        if self._down.numel() < size:
            self._down = self._room(size)
        buffer = self._down[:size]
        buffer.copy_(flat.view(torch.uint8), non_blocking=True)
        if self.stream is not None:
            self.stream.synchronize()
        kind = torch.empty(0, dtype=t.dtype).numpy().dtype
        found: NDArray[Any] = buffer.numpy().copy().view(kind).reshape(tuple(t.shape))
        return found


class Lanes:
    """The lane of whichever thread asks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._mine = threading.local()

    def lane(self) -> Lane:
        """This thread's, made when first asked for."""
        lane: Lane | None = getattr(self._mine, "lane", None)
        if lane is None:
            lane = self._mine.lane = Lane(self.device)
        return lane

    @contextmanager
    def entered(self) -> Iterator[Lane]:
        """Inside, this thread's kernels and copies run on its stream."""
        lane = self.lane()
        if lane.stream is not None:
            with torch.cuda.stream(lane.stream):
                yield lane
        elif interpreted():
            with _INTERPRETER:
                yield lane
        else:
            yield lane
