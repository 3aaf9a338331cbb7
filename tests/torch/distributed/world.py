"""Processes of a gloo group that stay up and run one function after the other, all of them the same."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120
"""After this long without an answer, a process is taken to hang."""


class World:
    """``size`` processes; :meth:`run` gives what a function returned in each of them."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.torch.distributed.cases"])  # imports once, for all processes
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, str(folder / "store"), there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, arguments, named))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(SECONDS):
                self.kill()
                raise TimeoutError(f"rank {rank} does not answer")
            answers.append(pipe.recv())
        for rank, (result, error) in enumerate(answers):
            assert not error, f"rank {rank}, which gave {result}:\n{error}"
        return [result for result, _ in answers]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while (task := pipe.recv()) is not None:
        function, arguments, named = task
        try:
            pipe.send((function(*arguments, **named), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()
