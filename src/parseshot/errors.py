"""Errors a user can cause: each has a stable code, a plain sentence that names the file or field, and an exit code."""


class ParseshotError(Exception):
    """Base of all errors that end in a message instead of a traceback."""

    exit_code = 5
    code = "E_INTERNAL"


class UsageError(ParseshotError, ValueError):
    """A wrong option, recipe key or argument."""

    exit_code = 2
    code = "E_USAGE"


class DataError(ParseshotError, ValueError):
    """Images, packs or episodes that cannot be used as asked."""

    exit_code = 3
    code = "E_DATA"


class ModelError(ParseshotError, ValueError):
    """A checkpoint that is missing, damaged or does not fit; or training that diverged."""

    exit_code = 4
    code = "E_MODEL"


class PhotoError(DataError):
    """One picture that cannot be used; a batch records the code and goes on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type["PhotoError"], tuple[str, str]]:
        return PhotoError, (self.code, str(self))  # so that it comes back whole from a worker process


class Stopped(ParseshotError):
    """A run that was asked to stop, and did after saving its state."""

    exit_code = 130
    code = "E_STOPPED"
