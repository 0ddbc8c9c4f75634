"""`dapo watch`: a run's page on this machine, updated while the run is training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 picks a free one.")] = 8265,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve the run's page on 127.0.0.1, updated while it trains. Ctrl-C stops the server, not the run.

    From another machine: ssh -L 8265:127.0.0.1:8265 SERVER

    \b
    dapo watch runs/first
    dapo watch runs/first --port 0 --open
    """
    from dapo.report.serve import HOST, make_server

    server = make_server(folder, port)
    address = f"http://{HOST}:{server.server_address[1]}/"
    typer.echo(f"{address}  (Ctrl-C stops the server)")
    if open_:
        import webbrowser

        webbrowser.open(address)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        server.server_close()
