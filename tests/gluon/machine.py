"""Partitions of programs that take turns at random, with what goes on beside them: copies and products.

Each partition is a thread, and one of them runs at a time, until it lets others go on (:meth:`Machine.pause`). Which
one that is, and when a copy arrives, is drawn from a seed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class HazardError(Exception):
    """What a kernel must not do, whether or not it comes to harm this time."""


class _AbandonedError(Exception):
    """Another partition has failed."""


class Program(NamedTuple):
    """Its number, and how many programs there are."""

    number: int
    of: int


class Partition:
    """Warps of a program that run one function together."""

    def __init__(self, program: Program, warps: int) -> None:
        self.program, self.warps = program, warps
        self.turn = threading.Semaphore(0)
        self.until: Callable[[], Any] = _at_once
        self.products: list[Any] = []
        """In order, those that have not been waited for."""
        self.stores: list[Copy] = []
        """From shared memory, in order, that have not been waited for."""
        self.unfenced: list[Any] = []
        """Marks of what has been stored since the last fence."""


class Copy:
    """One that is under way until it is run."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def run(self) -> None:
        if self.action is not None:
            action, self.action = self.action, None
            action()


here = threading.local()
"""``machine`` and ``partition`` of the thread."""


def _at_once() -> bool:
    return True


class Machine:
    """Runs programs to their end, all at once."""

    PATIENCE = 100_000
    """Turns in which nothing is copied or counted, after which partitions wait for ever."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.partitions: list[Partition] = []
        self.copies: list[Copy] = []
        self.error: BaseException | None = None
        self.ended = threading.Semaphore(0)
        self.idle = 0

    def run(self, bodies: list[tuple[Program, int, Callable[[], Any]]]) -> None:
        """Run a function for each program, with so many warps."""
        for program, warps, body in bodies:
            self.begin(program, warps, body)
        self.random.choice(self.partitions).turn.release()
        self.ended.acquire()
        if self.error is not None:
            raise self.error
        if self.copies:
            raise HazardError("programs have ended, and tiles are still to come")

    def begin(self, program: Program, warps: int, body: Callable[[], Any]) -> Partition:
        """A new partition, which has its first turn some time."""
        partition = Partition(program, warps)
        self.partitions.append(partition)
        threading.Thread(target=self._work, args=(partition, body), daemon=True).start()
        return partition

    def pause(self, until: Callable[[], Any] = _at_once) -> None:
        """Let others go on, and come back when the condition holds."""
        me: Partition = here.partition
        me.until = until
        chosen = self._next()
        if chosen is not me:
            chosen.turn.release()
            me.turn.acquire()
            if self.error is not None:
                raise _AbandonedError

    def progress(self) -> None:
        """Something has changed for which others may wait."""
        self.idle = 0

    def _next(self) -> Partition:
        self.idle += 1
        if self.copies and self.random.random() < 0.5:
            self._copy()
        able = [partition for partition in self.partitions if partition.until()]
        while not able:
            if not self.copies:
                raise HazardError(f"{len(self.partitions)} partitions wait for each other")
            self._copy()
            able = [partition for partition in self.partitions if partition.until()]
        if self.idle > self.PATIENCE:
            raise HazardError(f"{len(self.partitions)} partitions go on, and nothing happens")
        return self.random.choice(able)

    def _copy(self) -> None:
        self.copies.pop(self.random.randrange(len(self.copies))).run()
        self.progress()

    def _work(self, partition: Partition, body: Callable[[], Any]) -> None:
        here.machine, here.partition = self, partition
        partition.turn.acquire()
        try:
            if self.error is None:
                with torch.no_grad():
                    body()
                if partition.products or partition.stores:
                    raise HazardError("a partition ends with products or copies that it has not waited for")
        except _AbandonedError:
            pass
        except BaseException as error:
            self.error = self.error or error
        self.partitions.remove(partition)
        if self.error is None and self.partitions:
            try:
                self._next().turn.release()
                return
            except HazardError as error:
                self.error = error
        for other in self.partitions:
            other.turn.release()
        if not self.partitions:
            self.ended.release()
