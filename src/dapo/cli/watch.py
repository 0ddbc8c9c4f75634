"""`dapo watch`: a run's page on this machine, up to date while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, going on or not.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 8265,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve the run's page on 127.0.0.1, updating while the run goes on. Ctrl-C ends it; the run does not notice.

    From another machine: ssh -L 8265:127.0.0.1:8265 SERVER

    \b
    dapo watch runs/first
    dapo watch runs/first --port 0 --open
    """
    from dapo.report.serve import HOST, make_server

    server = make_server(folder, port)
    address = f"http://{HOST}:{server.server_address[1]}/"
    typer.echo(f"{address}  (Ctrl-C ends it)")
    if open_:
        import webbrowser

        webbrowser.open(address)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        server.server_close()
