"""Settings of a run: schema, loading, presets and recipes. No torch here."""

from dapo.config.load import Resolved, load_recipe, to_toml
from dapo.config.schema import Config

__all__ = ["Config", "Resolved", "load_recipe", "to_toml"]
