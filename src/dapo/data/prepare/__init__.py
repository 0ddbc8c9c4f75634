"""A cleaned problem set as a file with a manifest; references restated so that they can be checked."""
