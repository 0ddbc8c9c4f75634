"""What can go wrong in a way the user can fix. Messages say: the key or file as typed, the value, why, what to do."""

import sys

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1  # the same input may do on a larger or less busy machine
EXIT_INTERRUPTED = 130  # what a shell says of a command that Ctrl-C has ended

MEMORY_WORDS = ("out of memory", "cublas_status_alloc_failed", "can't allocate memory")  # torch's errors, lower case
NOT_OURS = 2 << 30  # bytes of a device in use beside this process's tensors that are more than its own libraries


class DapoError(Exception):
    """Base of all errors shown to the user as one message without a traceback."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(f"{message}\n{remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy

    def _render_traceback_(self) -> list[str]:
        """What IPython prints instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(DapoError):
    """A key, a value or a combination of keys that cannot be used."""


class DataError(DapoError):
    """A problem set that cannot be read or trusted."""


class EngineError(DapoError):
    """A rollout engine, model or device that cannot do what was asked."""


class TrainingError(DapoError):
    """Training that cannot continue: its updates are not finite."""


class OutOfMemoryError(EngineError):
    """A device, or this machine, without room for what a run needs at least."""

    exit_code = EXIT_FAILED


class VerifierError(DapoError):
    """A verifier that fails on every response."""


class VerifierStopped(VerifierError):
    """An LLM judge that cannot be asked for now: the run writes a checkpoint and ends, and may be resumed."""

    exit_code = EXIT_FAILED


class WaitedTooLong(DapoError):
    """What a run waited for has not come within train.max_wait_s: it ends, and may be resumed."""

    exit_code = EXIT_FAILED


class CheckpointError(DapoError):
    """A checkpoint that is missing, corrupt, tampered with or does not fit the run."""


class FormatError(DapoError):
    """A file that a newer version of dapo wrote."""


class DiskError(DapoError):
    """A file of a run that cannot be written: the disk or a quota is full, or it is read-only."""


def cannot_write(path: object, error: Exception) -> DiskError:
    """What stopped a run that cannot write its files, and how to resume."""
    why = getattr(error, "strerror", None) or str(error)
    return DiskError(
        f"{path}: cannot be written: {why}.",
        remedy="Free space or lift the limit. Then resume from the newest checkpoint: dapo resume RUN",
    )


def refuse_newer(path: object, found: int, known: int) -> None:
    """Files carry the version of their format. An older one is read; a newer one may mean something else."""
    if found > known:
        raise FormatError(
            f"{path}: format {found}, which a newer version of dapo wrote; this one reads formats up to {known}.",
            remedy="Upgrade dapo: pip install --upgrade dapo",
        )


def is_about_disk(error: Exception) -> bool:
    """Whether a write failed. Those of safetensors and tokenizers come without a type of their own."""
    return isinstance(error, OSError) or "(os error " in str(error)


def out_of_memory(error: Exception) -> OutOfMemoryError | None:
    """A lack of memory that no pass can be repeated with less of: weights, optimizer, KV cache. None: another error."""
    if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in MEMORY_WORDS):
        return OutOfMemoryError(
            f"{shortage(error)}.",
            remedy="End what else uses the device, then dapo resume RUN, where there is a checkpoint. Or begin anew "
            "with less: rollout.kv_cache_gib, train.moments = int8, model.lora.rank (dapo explain RECIPE counts what a "
            "run needs); dapo eval: --concurrent.",
        )
    return None


def shortage(error: RuntimeError) -> str:
    """What ran out, and how much of the device is not ours to give."""
    reason = str(error).split(". ")[0].splitlines()[0]
    try:
        cuda = sys.modules["torch"].cuda
        free, total = cuda.mem_get_info() if cuda.is_available() else (0, 0)
        others = total - free - cuda.memory_reserved() if total else 0
    except (KeyError, RuntimeError):  # torch is not there, or the device does not answer any more
        return reason
    if others > NOT_OURS:
        reason += f" (other processes hold about {others / 2**30:.0f} of its {total / 2**30:.0f} GiB)"
    return reason


def cannot_be_true(rank: int, what: str, why: object) -> EngineError:
    """Of what a rank sent to the others, who refuse it together: the newest checkpoint is from before."""
    return EngineError(
        f"rank {rank} sent {what} that cannot be true: {why}. None of them was used.",
        remedy="Its machine or its memory may be faulty: replace it, and resume from the newest checkpoint with "
        "dapo resume RUN, on as many ranks as you like.",
    )
