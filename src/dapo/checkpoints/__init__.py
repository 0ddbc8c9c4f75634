"""Checkpoints: written aside, flushed, hashed in a manifest, renamed; a torn or tampered one is never loaded."""
