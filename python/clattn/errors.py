"""What CLAttn raises. Messages are the library's: field, value and what is legal."""


class Error(RuntimeError):
    """Any failure that the library reports on purpose."""

    #: The OpenCL status behind an OpenCLError, else 0.
    cl_code: int = 0


class InvalidArgument(Error, ValueError):
    """The caller passed nonsense."""


class Unsupported(Error, NotImplementedError):
    """Legal, but this backend or device cannot do it: the message lists the reasons."""


class OpenCLError(Error):
    """The driver refused."""


class OutOfBlocks(Error):
    """Too few blocks of a cache are free; it works once a request gives up its own."""


class FileError(Error, OSError):
    """A file could not be read or written."""
