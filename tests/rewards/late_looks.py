"""Every round of a selector brings something: a program that must not be looked at for sleep."""

import selectors


class OnlyWhenReady(selectors.DefaultSelector):
    """Waits until something has come, so that every look would be a late one."""

    def select(self, timeout: float | None = None):  # noqa: ARG002
        return super().select(None)


class NeverLook:
    seconds = 0.0

    def __init__(self, *_: object) -> None: ...

    def look(self) -> None:
        raise AssertionError("looked at a program that has just said something")
