"""vLLM as an engine, for architectures the local engine does not know and models that span GPUs."""
