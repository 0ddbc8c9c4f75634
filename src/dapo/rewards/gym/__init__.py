"""Procedural tasks of reasoning-gym: their names, their entries, and scores of answers that evaluate nothing."""
