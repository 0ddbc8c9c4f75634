"""`dapo explain`: a recipe in plain numbers, a cluster before it is rented, two configs compared."""

from dapo.cli.explain.command import command

__all__ = ["command"]
