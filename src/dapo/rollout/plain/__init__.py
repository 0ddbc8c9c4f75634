"""The reference: a dense cache and Hugging Face modules, nothing fused, nothing captured."""
