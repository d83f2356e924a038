"""The arithmetic: quantise, dequantise, rotate, pack, matmul. Arrays in, arrays out; no files, no names."""
