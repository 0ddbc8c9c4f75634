"""`dapo init`: from a model, data and a card to a first recipe."""

from dapo.cli.init.command import command

__all__ = ["command"]
