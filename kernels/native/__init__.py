"""Kernels for CPUs, in C: compiled on the machine they run on, the first time they are needed.

`build` compiles and loads them, `packing` lays weights out for them, `decoder.c` says what they do. Where
there is no C compiler or no AVX2, as on ARM, the same models run on PyTorch's own operators.
"""
