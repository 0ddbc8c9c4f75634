"""What can go wrong in a way the user can mend. Messages say: the key or file as typed, the value, why, what to do."""

EXIT_INTERRUPTED = 130  # what a shell says of a command that Ctrl-C has ended


class DapoError(Exception):
    """Base of all errors shown to the user as one message without a traceback; the command line exits 2."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(f"{message}\n{remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


class ConfigError(DapoError):
    """A key, a value or a combination of keys that cannot be used."""


class DataError(DapoError):
    """A problem set that cannot be read or trusted."""


class EngineError(DapoError):
    """A rollout engine, model or device that cannot do what was asked."""


class VerifierError(DapoError):
    """A verifier that judges nothing any more."""


class CheckpointError(DapoError):
    """A checkpoint that is missing, torn, tampered with or does not fit the run."""


class DiskError(DapoError):
    """A file of a run that cannot be written: the disk or a quota is full, or it is read-only."""


def cannot_write(path: object, error: Exception) -> DiskError:
    """What stopped a run that cannot write its files, and how it goes on."""
    why = getattr(error, "strerror", None) or str(error)
    return DiskError(
        f"{path}: cannot be written: {why}.",
        remedy="Free space or lift the limit. A run goes on from its newest checkpoint: dapo resume RUN",
    )


def is_about_disk(error: Exception) -> bool:
    """Whether a write failed. Those of safetensors and tokenizers come without a type of their own."""
    return isinstance(error, OSError) or "(os error " in str(error)
