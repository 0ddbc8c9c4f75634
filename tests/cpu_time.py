"""CPU seconds of a call: what it costs, whatever else the machine is doing. Limits on them leave a factor of ten."""

import time
from collections.abc import Callable


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start
