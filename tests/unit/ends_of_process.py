"""Programs that end while paging goes on, each in an interpreter of its own; prints how they ended as JSON.

The interpreters are forked from this one, which never pages itself, to import PyTorch only once.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import tempfile
import threading
from collections.abc import Callable
from typing import IO

import torch
import torch._inductor.output_code  # a second, once

import torch_lms
from tests.unit.late_at_exit import late
from torch_lms.swap import SwapEnv, mlms

kept: list[object] = []  # lives until the interpreter is torn down


def tensors() -> list[torch.Tensor]:
    made = [torch.rand(1 << 20) for _ in range(8)]
    kept.append(made)
    return made


def page_outs_under_way() -> None:
    env = SwapEnv().__enter__()
    kept.append(env)
    env.pageout(tensors())


def everything_out() -> None:
    page_outs_under_way()
    torch_lms.wait()


def page_ins_under_way() -> None:
    everything_out()
    torch_lms.prefetch(kept[-1])  # type: ignore[arg-type]


def page_ins_on_hold() -> None:
    mlms.create_swap_env()
    torch_lms.pageout(tensors())
    mlms.before_prefetch_wait_all()
    mlms.prefetch_init()
    for tensor in kept[-1]:  # type: ignore[attr-defined]
        mlms.need_prefetch(tensor)


def a_page_out_that_fails() -> None:
    env = SwapEnv(host_limit="1MiB").__enter__()
    kept.append(env)
    env.pageout(tensors())


def automatic_mode() -> None:
    torch_lms.enable({"cpu": "20MiB"})
    kept.extend(tensor + 1 for tensor in tensors())


def ops_at_exit() -> None:
    """Of who has registered before paging did: all of the tensors are to be there, and have room."""
    automatic_mode()
    late.append(lambda: [one * 2 for one in kept[1:]])  # type: ignore[operator]


def an_op_that_never_ends() -> None:
    """Of a thread that is not waited for. Ops are observed when it begins, and what goes out then is new to it."""
    page_outs_under_way()
    begun = threading.Event()

    @torch.library.custom_op("torch_lms_tests::never_ending", mutates_args=())
    def never_ending(a: torch.Tensor) -> torch.Tensor:
        begun.set()
        queue.Queue[torch.Tensor]().get()
        return a.clone()

    threading.Thread(target=never_ending, args=(torch.ones(1),), daemon=True).start()
    begun.wait()
    page_outs_under_way()


PROGRAMS: list[Callable[[], None]] = [
    page_outs_under_way,
    page_ins_under_way,
    page_ins_on_hold,
    a_page_out_that_fails,
    automatic_mode,
    ops_at_exit,
    an_op_that_never_ends,
]


def start(program: Callable[[], None], output: IO[bytes]) -> int:
    """The process that the program runs in; in that process, 0."""
    child = os.fork()
    if child == 0:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        program()
    return child


def ending(child: int, output: IO[bytes]) -> tuple[int, str]:
    _, status = os.waitpid(child, 0)
    output.seek(0)
    return os.waitstatus_to_exitcode(status), output.read().decode()


def main() -> None:
    gc.freeze()  # the end of a forked interpreter copies less
    running: dict[str, tuple[int, IO[bytes]]] = {}
    for program in PROGRAMS:
        output = tempfile.TemporaryFile()  # noqa: SIM115  # open until the program has ended
        child = start(program, output)
        if child == 0:
            return  # to the end of this interpreter
        running[program.__name__] = child, output
    print(json.dumps({name: ending(*process) for name, process in running.items()}))


if __name__ == "__main__":
    main()
