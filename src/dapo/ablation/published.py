"""What the papers report for the same arms: AIME 2024 avg@32 in percent, Qwen2.5-32B base."""

from __future__ import annotations

SOURCES = {
    "paper": "DAPO, arXiv:2503.14476, Table 1",
    "reproduction": "open reproduction, README of verl's DAPO recipe: full, without dynamic sampling, without that and "
    "the token-level loss",
    "vapo": "VAPO, arXiv:2504.05118, Table 1",
}

PAPER = {
    "naive": 30.0,
    "overlong-filter": 36.0,
    "clip-higher": 38.0,
    "soft-penalty": 41.0,
    "token-loss": 42.0,
    "dapo": 50.0,
}
REPRODUCTION = {"soft-penalty": 44.0, "token-loss": 50.0, "dapo": 52.0}
VAPO = {
    "ppo": 5.0,
    "vapo": 60.0,
    "vapo-no-pretraining": 11.0,
    "vapo-no-decoupled": 33.0,
    "vapo-no-adaptive": 45.0,
    "vapo-no-clip-higher": 46.0,
    "vapo-no-token-loss": 53.0,
    "vapo-no-positive": 54.0,
    "vapo-no-groups": 55.0,
}


def published(arm: str) -> dict[str, float]:
    """Figures for an arm, by source."""
    tables = {"paper": PAPER, "reproduction": REPRODUCTION, "vapo": VAPO}
    return {source: table[arm] for source, table in tables.items() if arm in table}
