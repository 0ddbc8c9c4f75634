"""`dapo` and `python -m dapo`: Ctrl-C is answered from the first line on, also while libraries are loading."""

import os

from dapo.errors import EXIT_INTERRUPTED
from dapo.processes import leave_working_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

IMPORTING = "<frozen importlib._bootstrap>"


def main() -> None:
    leave_working_folder()  # before more is imported: a signal.py may lie there
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell had it ignored
        signal.signal(signal.SIGINT, interrupt)
    from dapo.cli.main import main as run_verb

    run_verb()


def interrupt(_number: int, frame: "FrameType | None") -> None:
    """End at once in the middle of an import, else raise KeyboardInterrupt.

    Libraries turn an exception in their imports into others, or swallow it and go on half loaded.
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            os.write(2, b"Interrupted.\n")
            os._exit(EXIT_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
