"""A scope in which a program pages by hand."""

from __future__ import annotations

import os
from types import TracebackType

from torch_lms._core import core
from torch_lms.errors import EnvError
from torch_lms.swap import manual
from torch_lms.swap.automatic import _configure_host
from torch_lms.swap.manual import Pageables

__all__ = ["SwapEnv"]


class SwapEnv:
    """Opens the transfer queues, and on exit waits for them and pages everything in.

    Example:
        >>> with SwapEnv(host_limit="64GiB") as env:
        ...     env.pageout(activation)
        ...     loss = model(batch)
        ...     env.prefetch(activation)

    Paging by hand works outside of it, too (`torch_lms.pageout`); leaving it pages in also what was paged out there.

    Args:
        host_limit: of the host memory (for the CPU: the disk space) for paged-out bytes; by default 80 % of what the
            machine and its control group allow (90 % of the free disk). Once given, it holds until another is.
        spill_dir: the directory for the CPU's spill files; by default that for temporary files.

    Raises:
        LimitError: for a size or a directory that cannot be understood or is not there.
        EnvError: by its methods while it is closed, and if it is entered while it is open.
        LmsError: in a forked child; on a PyTorch with the fork's patches for a ``spill_dir``.
    """

    def __init__(
        self,
        *,
        host_limit: int | str | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        _configure_host(host_limit, spill_dir)
        self._open = False

    def __enter__(self) -> SwapEnv:
        if self._open:
            raise EnvError("expected a closed swap environment, found an open one; leave it before entering it again")
        core.start_pageouts()
        core.start_pageins()
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for all transfers and pages everything in. No effect on a closed environment.

        Raises:
            HostPoolFullError, SpillError, LmsError: what failed since the last wait.
            torch.OutOfMemoryError: if what is paged out does not fit the device; it stays on the host.
        """
        if not self._open:
            return
        self._open = False
        try:
            manual.wait()
        finally:
            core.pagein_all()

    def pageout(self, *tensors: Pageables) -> int:
        """As `torch_lms.pageout`, in an open environment."""
        self._check_open()
        return manual.pageout(*tensors)

    def prefetch(self, *tensors: Pageables) -> int:
        """As `torch_lms.prefetch`, in an open environment."""
        self._check_open()
        return manual.prefetch(*tensors)

    def wait(self) -> None:
        """As `torch_lms.wait`, in an open environment."""
        self._check_open()
        manual.wait()

    def _check_open(self) -> None:
        if not self._open:
            raise EnvError("expected an open swap environment, found a closed one; use it in a with statement")
