"""Samples in files: shards of JSON lines, compressed, each written whole and named by its content.

    OUT/split.json                               what the folder is for; written first
    OUT/ALGORITHM/SIZE/00003-1f0c99....jsonl.gz  the samples 3,000 to 3,999 of a pair, over all seeds
    OUT/manifest.json                            every shard, what repeats, where it comes from; written last
    OUT/questions.npy                            a 64-bit digest of every question, in the manifest's order

The name of a shard holds the SHA-256 of its lines, not of the compressed bytes: the same samples have the same names
on every machine, and a shard that was damaged is told by its name alone, with or without a manifest. A run that was
killed goes on with the shards that are missing.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import multiprocessing
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.files import write_bytes, write_text
from ...provenance import provenance
from . import upstream
from .benchmark import SPLITS, Split
from .text import Generator, Sample

FORMAT = 1
SHARD = 1_000
"""Samples in a shard, if not asked otherwise."""

Progress = Callable[[int, int], None]
"""Called with the samples done and the samples in all."""


class CorruptShardError(ValueError):
    """A shard is not what it was when it was written."""


@dataclass(frozen=True)
class Stretch:
    """What a shard holds: ``count`` samples of a pair from ``first`` on, numbered over all seeds."""

    algorithm: str
    size: int
    number: int
    first: int
    count: int

    def folder(self, out: Path) -> Path:
        """Where the shard stands."""
        return out / self.algorithm / str(self.size)


class Made(NamedTuple):
    """A shard that is there, and what the manifest and the report need of it."""

    stretch: Stretch
    name: str
    sha256: str
    characters: int
    longest: int
    digests: np.ndarray


def generate(
    out: str | Path,
    *,
    split: str | Split = "train",
    algorithms: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    samples: int | None = None,
    traces: bool = True,
    processes: int | None = None,
    shard: int = SHARD,
    against: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a set of samples in the folder ``out``, or what is missing of it, and give its manifest.

    Args:
      out: the folder. One that holds another set is refused; one that holds part of this set is completed.
      split: ``train`` or ``evaluation``, upstream's sets, or a :class:`Split`.
      algorithms: some of the thirty.
      sizes: instead of the split's own.
      seeds: instead of the split's own.
      samples: for each algorithm, size and seed, instead of the split's own.
      traces: with traces (upstream's hints) or without; a :class:`Split` says so itself.
      processes: how many work at the same time; as many as there are cores if not given. They are spawned, so a script
        that asks for more than one needs ``if __name__ == "__main__":``. The files do not depend on it.
      shard: samples in a file.
      against: the folder of a training set; the manifest tells how many samples of this set have a question of it.
      progress: called after every shard.
    """
    out = Path(out)
    if isinstance(split, str):
        if split not in SPLITS:
            raise ValueError(f"expected a split to be one of {', '.join(SPLITS)}, got {split!r}")
        split = SPLITS[split](traces)
    split = split.only(algorithms, sizes, seeds=seeds, samples=samples)
    if shard < 1:
        raise ValueError(f"expected at least one sample in a shard, got {shard}")
    if processes is not None and processes < 1:
        raise ValueError(f"expected at least one process, got {processes}")
    work = list(stretches(split, shard))
    processes = min(processes or cores(), len(work))
    seen = None if against is None else (Path(against).name, training_digests(against))
    upstream.load()
    begin(out, split, shard)
    made: list[Made] = []
    done = 0
    for one in _all_made(out, split, work, processes):
        made.append(one)
        done += one.stretch.count
        if progress is not None:
            progress(done, len(split))
    order = {pair: i for i, pair in enumerate(split.pairs)}
    made.sort(key=lambda m: (order[m.stretch.algorithm, m.stretch.size], m.stretch.number))
    return _finish(out, split, shard, made, seen)


def cores() -> int:
    """How many processes can work at the same time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stretches(split: Split, shard: int = SHARD) -> Iterator[Stretch]:
    """The shards of a split, in order."""
    for algorithm, size in split.pairs:
        for number, first in enumerate(range(0, split.per_pair, shard)):
            yield Stretch(algorithm, size, number, first, min(shard, split.per_pair - first))


def stretch_samples(split: Split, stretch: Stretch) -> Iterator[Sample]:
    """The samples of a shard, made."""
    at, left = stretch.first, stretch.count
    while left:
        seed, index = split.seeds[at // split.samples], at % split.samples
        made = Generator(stretch.algorithm, stretch.size, seed, traces=split.traces)
        made.skip(index)
        for _ in range(min(left, split.samples - index)):
            yield next(made)
            at, left = at + 1, left - 1


def begin(out: Path, split: Split, shard: int) -> None:
    """Say in ``out`` what it is for, or check that it says the same."""
    settings = {"format": FORMAT, "dm-clrs": upstream.VERSION, "shard": shard, "split": split.to_json()}
    path = out / "split.json"
    if not path.exists():
        write_text(path, json.dumps(settings, indent=1) + "\n")
        return
    known = _read_json(path)
    if known != settings:
        changed = [k for k in ("format", "dm-clrs", "shard") if known.get(k) != settings[k]]
        theirs = known.get("split", {})
        changed += [k for k, v in settings["split"].items() if theirs.get(k) != v]
        raise ValueError(
            f"{out} holds another set of samples ({', '.join(changed)} differ): give another folder, or the same "
            "arguments as before"
        )


def make_shard(out: Path, split: Split, stretch: Stretch) -> Made:
    """Write a shard, or check the one that is there."""
    folder = stretch.folder(out)
    there = sorted(folder.glob(f"{stretch.number:05d}-*.jsonl.gz"))
    if there:
        lines = read_shard(there[0])
        found = [Sample(**json.loads(line)) for line in lines.splitlines()]
        if len(found) != stretch.count:
            raise CorruptShardError(f"{there[0]} holds {len(found)} samples where {stretch.count} belong: delete it")
    else:
        found = list(stretch_samples(split, stretch))
        lines = b"".join(json.dumps(asdict(s)).encode() + b"\n" for s in found)
    digest = hashlib.sha256(lines).hexdigest()
    name = f"{stretch.number:05d}-{digest[:32]}.jsonl.gz"
    if not there:
        write_bytes(folder / name, gzip.compress(lines, 6, mtime=0))
    lengths = [len(s.question) + len(s.answer) for s in found]
    return Made(stretch, name, digest, sum(lengths), max(lengths), question_digests(s.question for s in found))


def read_shard(path: str | Path) -> bytes:
    """The lines of a shard; raises :class:`CorruptShardError` if they are not those that it is named by."""
    path = Path(path)
    try:
        lines = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error):
        lines = None
    if lines is None or hashlib.sha256(lines).hexdigest()[:32] != path.name[6:38]:
        raise CorruptShardError(
            f"the shard {path} is corrupt, its content has not the checksum in its name: delete it and generate again, "
            "which makes what is missing"
        )
    return lines


def question_digests(questions: Iterable[str]) -> np.ndarray:
    """64 bits of each question, to count those that repeat."""
    digests = b"".join(hashlib.blake2b(q.encode(), digest_size=8).digest() for q in questions)
    return np.frombuffer(digests, dtype="<u8")


def _all_made(out: Path, split: Split, work: list[Stretch], processes: int) -> Iterator[Made]:
    if processes == 1:
        for stretch in work:
            yield make_shard(out, split, stretch)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=start_worker)
    try:
        pending: set[Future[Made]] = set()
        queue = iter(work)
        while True:
            for stretch in queue:
                pending.add(pool.submit(make_shard, out, split, stretch))
                if len(pending) >= 4 * processes:
                    break
            if not pending:
                break
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise ChildProcessError(
            f"a process that made samples ended; what is done is kept in {out}: run the same again, with fewer "
            "processes if memory was short"
        ) from None
    except BaseException:
        for process in list((pool._processes or {}).values()):  # files are written whole: nothing is lost
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def start_worker() -> None:
    """An interrupt is the parent's to handle; the end of the parent, even a sudden one, is the worker's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _finish(
    out: Path, split: Split, shard: int, made: list[Made], seen: tuple[str, np.ndarray] | None
) -> dict[str, Any]:
    for path in out.glob("*/*/.*.jsonl.gz.*"):  # left by processes that were killed while they wrote
        path.unlink(missing_ok=True)
    digests = np.concatenate([m.digests for m in made])
    buffer = io.BytesIO()
    np.save(buffer, digests)
    write_bytes(out / "questions.npy", buffer.getvalue())
    manifest = {
        "format": FORMAT,
        "dm-clrs": upstream.VERSION,
        "shard": shard,
        "split": split.to_json(),
        "samples": len(digests),
        "distinct": len(np.unique(digests)),
        "characters": sum(m.characters for m in made),
        "against": None if seen is None else {"training": seen[0], "seen": int(np.isin(digests, seen[1]).sum())},
        "algorithms": _algorithms(split, made, None if seen is None else seen[1]),
        "shards": [
            {"file": (m.stretch.folder(Path()) / m.name).as_posix(), "samples": m.stretch.count, "sha256": m.sha256}
            for m in made
        ],
        "provenance": provenance(),
    }
    write_text(out / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return manifest


def _algorithms(split: Split, made: list[Made], seen: np.ndarray | None) -> dict[str, Any]:
    """What repeats, by algorithm and size: distinct questions, and those that the training set has too."""
    by_pair: dict[tuple[str, int], list[Made]] = {}
    for one in made:
        by_pair.setdefault((one.stretch.algorithm, one.stretch.size), []).append(one)
    report: dict[str, Any] = {}
    for algorithm, sizes in split.sizes.items():
        rows, everything = {}, []
        for size in sizes:
            shards = by_pair[algorithm, size]
            digests = np.concatenate([m.digests for m in shards])
            everything.append(digests)
            rows[str(size)] = {
                "samples": len(digests),
                "distinct": len(np.unique(digests)),
                "characters": sum(m.characters for m in shards),
                "longest": max(m.longest for m in shards),
            } | ({} if seen is None else {"seen": int(np.isin(digests, seen).sum())})
        joined = np.concatenate(everything)
        report[algorithm] = {"samples": len(joined), "distinct": len(np.unique(joined)), "sizes": rows}
    return report


def load_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder of samples that is complete."""
    path = Path(folder) / "manifest.json"
    if path.exists():
        manifest = _read_json(path)
        if manifest.get("format") != FORMAT:
            raise ValueError(f"expected samples in format {FORMAT}, got format {manifest.get('format')} in {folder}")
        return manifest
    if (Path(folder) / "split.json").exists():
        raise ValueError(f"{folder} holds samples that are not complete: generate again, which makes what is missing")
    raise ValueError(f"expected a folder that `sharpmax clrs-text generate` made, got {str(folder)!r}")


def training_digests(folder: str | Path) -> np.ndarray:
    """The digests of all questions in a folder of samples."""
    manifest = load_manifest(folder)
    path = Path(folder) / "questions.npy"
    try:
        digests = np.load(path, allow_pickle=False)
    except (OSError, ValueError):
        digests = np.empty(0)
    if digests.shape != (manifest["samples"],):
        raise ValueError(f"{path} is missing or damaged: delete {folder}/manifest.json and generate again")
    return digests


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: delete it and generate again, which checks every shard that is there")
    return found


def verify(folder: str | Path, progress: Progress | None = None) -> dict[str, Any]:
    """Read every shard of a complete folder and give its manifest; the first that is missing or corrupt is named."""
    manifest = load_manifest(folder)
    done = 0
    for entry in manifest["shards"]:
        path = Path(folder) / entry["file"]
        if not path.is_file():
            raise CorruptShardError(f"the shard {path} is missing: generate again, which makes what is missing")
        lines = read_shard(path)
        if hashlib.sha256(lines).hexdigest() != entry["sha256"] or lines.count(b"\n") != entry["samples"]:
            raise CorruptShardError(f"the shard {path} is not the one of the manifest: delete it and generate again")
        done += entry["samples"]
        if progress is not None:
            progress(done, manifest["samples"])
    return manifest
