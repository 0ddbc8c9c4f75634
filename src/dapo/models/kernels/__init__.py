"""Kernels of a step: Triton's, imported only where `triton_support` says they run, and a CPU's, in C and in torch."""
