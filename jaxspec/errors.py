"""Errors that a user can fix. A message is one line: found, expected, and what to do."""


class JaxspecError(Exception):
    """An error whose message explains it; commands print it without a traceback."""


class UsageError(JaxspecError, ValueError):
    """The call itself is wrong: a flag, a parameter, a prompt. Exit code 2."""


class LoadError(JaxspecError):
    """Something on disk, on the hub or on the device is wrong. Exit code 1."""


def one_line(error: BaseException) -> str:
    """The message of another library's error, on one line so that it fits into one of ours."""
    return " ".join(str(error).split()) or type(error).__name__
