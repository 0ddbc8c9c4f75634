"""Triton kernels of the training step. Import a module of this package only where `triton_support` says it runs."""
