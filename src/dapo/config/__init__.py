"""Settings of a run: schema, loading, presets and recipes. No torch here."""
