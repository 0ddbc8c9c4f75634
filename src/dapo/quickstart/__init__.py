"""The bundled task and toy model: everything a first run needs, nothing to download."""
