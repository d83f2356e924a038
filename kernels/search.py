"""What the `best` searches try: one table for all backends, since their codes have to agree."""

from __future__ import annotations

#: Running sums of an error over a row, and over a block or group (`reference.lane_sum`).
ROW_LANES, BLOCK_LANES = 256, 16
#: Row scales never get smaller (FORMATS: int8_tensorwise), so that an all-zero row divides by something.
SCALE_FLOOR = 1e-30
#: Tensor scales are normal float32 numbers: their reciprocal is finite, and no device flushes them to zero.
LEAST_NORMAL = 2.0**-126
#: A clipped row has to have less than this part of the absmax error.
CLIP_MARGIN = 0.9999
#: Multiples of the absmax scale that fp8 rows try after 1: one octave, as the next repeats it.
FP8_FACTORS: tuple[float, ...] = tuple(1 + i / 16 for i in range(1, 16))
#: Multiples of amax/127 tried as row scales after 1, and steps from the best of them (minus, then plus).
INT8_FACTORS: tuple[float, ...] = (0.9975, 0.995, 0.99, 0.985, 0.98, 0.975, 0.97, 0.96)
INT8_STEPS: tuple[float, ...] = ()
#: The same for amax/7: sixteenths, then a thirty-second and a sixty-fourth around the best.
INT4_FACTORS: tuple[float, ...] = tuple(i / 16 for i in range(15, 3, -1))
INT4_STEPS: tuple[float, ...] = (1 / 32, 1 / 64)
#: Steps of the e4m3 code from the absmax block scale. On Gaussian, Student-t and outlier weights no block of
#: 200,000 had its minimum outside of -2..+7, and +7 is worth nothing.
NVFP4_OFFSETS: tuple[int, ...] = (0, -2, -1, 1, 2, 3, 4, 5, 6)
#: Multiples of the absmax channel scale that `best` tries: each moves the coarse e4m3 steps of the group scales
#: against the row.
W4A8_MULTIPLES: tuple[float, ...] = (1.0, 1.06)
W6A8_MULTIPLES: tuple[float, ...] = (1.0, 1.03, 1.06, 1.09)
#: Steps of the e4m3 code from the absmax group scale, tried for each group. w4a8's are eight in a row: the CPU holds
#: them in one vector register.
W4A8_OFFSETS: tuple[int, ...] = (-2, -1, 0, 1, 2, 3, 4, 5)
W6A8_OFFSETS: tuple[int, ...] = (0, -2, -1, 1)
