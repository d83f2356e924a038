"""What the `best` searches try: one table for all backends, since their codes have to agree."""

from __future__ import annotations

#: Row scales never get smaller (FORMATS: int8_tensorwise), so that an all-zero row divides by something.
SCALE_FLOOR = 1e-30
#: Tensor scales are normal float32 numbers: their reciprocal is finite, and no device flushes them to zero.
LEAST_NORMAL = 2.0**-126
#: A clipped row has to have less than this part of the absmax error.
CLIP_MARGIN = 0.9999
#: Multiples of amax/127 and amax/7 tried as row scales, besides 1.
INT8_FACTORS = (0.997, 0.97, 0.94, 0.9, 0.85, 0.8)
INT4_FACTORS = tuple((32 - i) / 32 for i in range(1, 21))
#: Steps of the e4m3 code around the absmax block scale, besides 0.
NVFP4_OFFSETS = (-3, -2, -1, 1, 2, 3, 4, 5, 6)
#: Steps of the e4m3 code around the absmax group scale (w4a8 and w6a8), besides 0.
W4A8_OFFSETS = (-3, -2, -1, 1, 2, 3)
W6A8_OFFSETS = (-2, -1, 1)
