"""Calls in processes of their own, so that no row of a table inherits another's memory, allocator or settings.

Each is forked from a process that has imported PyTorch and nothing else has happened in, which saves that import's
seconds; where such a process cannot use the device, each call begins with an interpreter of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

__all__ = ["CallFailedError", "FreshProcesses"]

Row = dict[str, Any]
News = Callable[[Row], None]
Function = Callable[[Any, News], Row]

_SECONDS_TO_END = 20


class CallFailedError(RuntimeError):
    """A call raised, died or took too long; the message says which, ``news`` what it had said by then."""

    def __init__(self, message: str, news: Row) -> None:
        super().__init__(message)
        self.news = news


@dataclass(frozen=True, kw_only=True)
class FreshProcesses:
    """Where calls are made.

    Attributes:
        method: of `multiprocessing` for starting them: ``forkserver`` or ``spawn``.
    """

    method: str

    @classmethod
    def for_device(cls, device: str, preload: Sequence[str]) -> FreshProcesses:
        """Those that can use a device.

        Args:
            device: of the calls.
            preload: modules that the first process imports.
        """
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks for devices without a context, which no fork survives
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
        processes = cls(method="forkserver")
        try:
            processes.call(_touch, device, seconds=120)
        except CallFailedError as error:
            print(f"forked processes cannot use {device}, so each call starts an interpreter: {error}", flush=True)
            return cls(method="spawn")
        return processes

    def call(self, function: Function, argument: Any, *, seconds: float, on_news: News | None = None) -> Row:
        """What a function of a module answers, in a new process.

        Args:
            function: takes the argument and a function to send news with; what it sends adds up.
            argument: that can be pickled.
            seconds: after which it is ended.
            on_news: is called here with what was sent.

        Raises:
            CallFailedError: if there was no answer.
        """
        context: Any = multiprocessing.get_context(self.method)
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(there, function, argument))
        process.start()
        there.close()
        news: Row = {}
        try:
            kind, answer = _listen(here, seconds, news, on_news)
            process.join(_SECONDS_TO_END if kind != "late" else 0)
        finally:
            if process.is_alive():
                process.kill()
            process.join()
            here.close()
        if kind == "row":
            return {**answer, "exit_status": process.exitcode}
        status = f" (status {process.exitcode})" if kind == "died" else ""
        raise CallFailedError(f"{answer}{status}", news)


def _listen(here: Connection, seconds: float, news: Row, on_news: News | None) -> tuple[str, Any]:
    """The last message and its kind: row, error, died or late."""
    end_s = time.monotonic() + seconds
    while here.poll(max(0.0, end_s - time.monotonic())):
        try:
            kind, content = here.recv()
        except EOFError:
            return "died", "the process ended without an answer"
        if kind != "news":
            return kind, content
        news.update(content)
        if on_news is not None:
            on_news(content)
    return "late", f"no answer within {seconds:.0f} s"


def _answer(there: Connection, function: Function, argument: Any) -> None:
    """Sends news, then the row or the error."""
    try:
        there.send(("row", function(argument, lambda news: there.send(("news", news)))))
    except BaseException as error:
        traceback.print_exc()
        there.send(("error", f"{type(error).__name__}: {error}"[:2000]))


def _touch(device: str, _news: News) -> Row:
    return {"sum": float(torch.ones(1, device=device).sum())}
