"""The fast engine in the trainer's process: paged KV, one CUDA graph a decode step, sampling on the device."""
