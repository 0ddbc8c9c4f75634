"""Options about a config: --set, --fit and --trust."""

from __future__ import annotations

from typing import Annotated

import typer

Trust = Annotated[
    bool, typer.Option("--trust", help="Allow code named in the config of a run that was not started on this machine.")
]
Fit = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="24gb|auto",
        help="Choose micro-batch, KV cache, checkpointing, 8-bit moments or LoRA so that the run fits this GPU memory.",
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key: --set train.lr=1e-5.")
]
