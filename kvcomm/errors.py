"""The exceptions of kvcomm.

Built-in exceptions are used where they say enough (ValueError, TypeError, MemoryError,
OSError). The classes here name what a caller may want to tell apart; each is also the
built-in kind it belongs to. The compiled core raises these same classes.
"""


class KVCommError(Exception):
    """Base of every error that kvcomm defines itself."""


class FormatError(KVCommError, ValueError):
    """A file is not what it claims to be: truncated, damaged, of another version or layout."""


class MismatchError(KVCommError, ValueError):
    """Two things that must fit do not: sender and receiver, packet or tokenizer and model."""


class UnsupportedError(KVCommError, ValueError):
    """Valid input of a kind that kvcomm does not handle, refused by name."""


class NumericError(KVCommError, ArithmeticError):
    """Values that are not finite where only finite ones make sense."""


class DeviceError(KVCommError, RuntimeError):
    """A device that is not there, was not built in, or refused an operation."""
