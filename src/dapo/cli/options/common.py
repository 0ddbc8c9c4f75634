"""Options that a config or a run's folder asks for: --set and --trust."""

from __future__ import annotations

from typing import Annotated

import typer

Trust = Annotated[
    bool, typer.Option("--trust", help="Allow code named in the config of a run that was not started on this machine.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key: --set train.lr=1e-5.")
]
