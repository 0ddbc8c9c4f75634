"""Checkpoints: written aside, flushed, hashed in a manifest, renamed; a corrupt or changed one is never loaded."""
