"""`dapo explain`: what a recipe will do, what it needs on a cluster, how two configs differ."""

from dapo.cli.explain.command import command

__all__ = ["command"]
