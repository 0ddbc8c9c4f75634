"""Configs of other trainers (verl, TRL, OpenRLHF) as recipes of ours. They are read as text; nothing in them runs."""
