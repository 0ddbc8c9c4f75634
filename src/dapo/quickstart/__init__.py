"""The embedded task and the embedded base model: everything a first run needs, nothing downloaded."""
