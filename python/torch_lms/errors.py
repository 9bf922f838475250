"""The errors of torch_lms. Every message says what was expected, what was found and what to do."""

from __future__ import annotations

__all__ = [
    "ChunkError",
    "EnvError",
    "HostPoolFullError",
    "LimitError",
    "LmsError",
    "PageoutError",
    "PartitionError",
    "PipelineError",
    "PlanError",
    "ProfileError",
    "SpillError",
]


class LmsError(RuntimeError):
    """Base of all errors that torch_lms raises itself."""


class LimitError(LmsError, ValueError):
    """A limit, a size or a device that was given cannot be understood or kept."""


class ChunkError(LmsError):
    """A model or an optimizer cannot be held in chunks, or was used as chunks do not allow."""


class EnvError(LmsError):
    """A swap environment was used before it was opened, after it was closed, or twice."""


class PageoutError(LmsError):
    """The storage cannot be paged out; nothing has changed."""


class HostPoolFullError(LmsError):
    """The limit of the host memory for paged-out bytes is reached; nothing has been lost."""


class SpillError(LmsError):
    """The directory for spill files is missing, full or not writable; nothing has been lost."""


class ProfileError(LmsError):
    """A model could not be traced or run as asked, or a profile could not be read."""


class PartitionError(LmsError):
    """A model cannot be cut into stages as asked."""


class PipelineError(LmsError):
    """A schedule cannot be built or run as asked."""


class PlanError(LmsError):
    """A trace or a plan could not be read, or a storage's decision makes no sense."""
