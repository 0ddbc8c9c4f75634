"""How much input, time and memory a verdict may cost. Beyond these a response is judged without being understood."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from dapo.errors import ConfigError

MAX_STATEMENT_CHARS = 2_000  # a final answer longer than this is not read: no reference is that long
MAX_REFERENCE_CHARS = 2_000
MAX_TOKENS = 600  # of a final answer, after which it is not parsed
MAX_DEPTH = 40  # of brackets and signs; deeper is refused, never recursed into
MAX_DIGITS = 1_000  # of one number
MAX_BITS = 20_000  # of an exact intermediate result: 9^9^9 is refused before it is computed
MAX_FACTORIAL = 2_000
MAX_RESPONSE_CHARS = 4_000_000  # from the end; what stands before is not searched


# What sleeps uses no CPU time: it is stopped by the clock, late enough that a machine with 20 times more to do than it
# has cores for does not stop work that is within its limit.
LEAST_WALL_SECONDS = 30.0
WALL_PER_CPU_SECOND = 20.0
MAX_SECONDS = 86_400
MAX_MEMORY_MB = 4 * 2**20
MAX_WORKERS = 4_096

STACK_SIGNAL = signal.SIGUSR2  # asks a worker to write its stack


@dataclass(frozen=True, slots=True)
class Limits:
    """What one task may use, from when a worker starts it; waiting in the queue does not count.

    `seconds` is CPU time of the worker and all its descendants: how busy the machine is changes no verdict.
    """

    seconds: float = 1.5
    memory_mb: int = 768

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"rewards.cpu_seconds = {self.seconds}: a limit must be a positive number.")
        if self.seconds > MAX_SECONDS:
            raise ConfigError(
                f"rewards.cpu_seconds (--seconds) = {self.seconds:g}: more than a day for one verdict.",
                remedy=f"Use {MAX_SECONDS:,} or less.",
            )
        if self.memory_mb > MAX_MEMORY_MB:
            raise ConfigError(
                f"rewards.memory_mb (--memory-mb) = {self.memory_mb}: more than any machine has.",
                remedy=f"Use {MAX_MEMORY_MB:,} or less.",
            )
        if self.memory_mb < 256:
            raise ConfigError(
                f"rewards.memory_mb = {self.memory_mb}: too little for a Python process with sympy.",
                remedy="Use 256 or more.",
            )

    @property
    def wall_seconds(self) -> float:
        """The limit behind the limit, for what sleeps; the only one where CPU time cannot be read (no /proc)."""
        return max(LEAST_WALL_SECONDS, WALL_PER_CPU_SECOND * self.seconds)
