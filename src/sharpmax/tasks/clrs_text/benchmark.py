"""What CLRS-Text is made of: thirty algorithms, the sizes to train on and to evaluate on, and their seeds.

The numbers are those of upstream's ``generate_clrs_text.py``; tests/tasks/clrs_text compares them with its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

_SIZES = (4, 5, 10, 11, 12, 15, 19, 23, 28, 31)

_LARGEST: dict[str, tuple[int, int]] = {
    "activity_selector": (31, 40),
    "articulation_points": (19, 19),
    "bellman_ford": (31, 32),
    "bfs": (31, 41),
    "binary_search": (31, 64),
    "bridges": (5, 7),
    "bubble_sort": (10, 11),
    "dag_shortest_paths": (19, 19),
    "dfs": (23, 20),
    "dijkstra": (28, 25),
    "find_maximum_subarray_kadane": (31, 64),
    "floyd_warshall": (10, 11),
    "graham_scan": (31, 31),
    "heapsort": (10, 11),
    "insertion_sort": (31, 25),
    "jarvis_march": (12, 13),
    "kmp_matcher": (31, 64),
    "lcs_length": (10, 12),
    "matrix_chain_order": (10, 12),
    "minimum": (31, 64),
    "mst_kruskal": (10, 10),
    "mst_prim": (28, 26),
    "naive_string_matcher": (31, 64),
    "optimal_bst": (10, 10),
    "quickselect": (31, 64),
    "quicksort": (10, 12),
    "segments_intersect": (31, 64),
    "strongly_connected_components": (15, 16),
    "task_scheduling": (31, 41),
    "topological_sort": (23, 21),
}
"""The largest training size and the largest evaluation size."""

ALGORITHMS = tuple(_LARGEST)
"""All thirty, in alphabetical order."""

UNTRACED = ("segments_intersect",)
"""Algorithms whose samples are the same with traces and without."""

TRAINING_SIZES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {name: tuple(n for n in _SIZES if n <= most) for name, (most, _) in _LARGEST.items()}
)
EVALUATION_SIZES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {name: tuple(range(4, most + 1)) for name, (_, most) in _LARGEST.items()}
)

SMALLEST, LARGEST = 4, 256
"""Sizes that can be asked for. Below, some samplers fail; above, no context holds a sample."""

LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Split:
    """A set of samples: ``samples`` of each algorithm, size and seed.

    Attributes:
      name: ``train``, ``evaluation``, or a name of one's own.
      sizes: the sizes of each algorithm.
      seeds: of the samplers; every size starts them anew, as upstream does.
      samples: how many for each algorithm, size and seed.
      traces: whether questions begin a trace and answers hold the rest of it (upstream's ``use_hints``).
    """

    name: str
    sizes: Mapping[str, tuple[int, ...]]
    seeds: tuple[int, ...]
    samples: int
    traces: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", check_sizes(self.sizes))
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"expected seeds to be different and at least one, got {list(self.seeds)}")
        for seed in self.seeds:
            if not _whole(seed) or not 0 <= seed <= LARGEST_SEED:
                raise ValueError(f"expected seeds to be whole numbers from 0 to {LARGEST_SEED:,}, got {seed}")
        if not _whole(self.samples) or self.samples < 1:
            raise ValueError(f"expected at least one sample of each size and seed, got {self.samples}")

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """Every algorithm with each of its sizes."""
        return [(name, size) for name, sizes in self.sizes.items() for size in sizes]

    @property
    def per_pair(self) -> int:
        """Samples of each algorithm and size, over all seeds."""
        return self.samples * len(self.seeds)

    def __len__(self) -> int:
        return len(self.pairs) * self.per_pair

    def only(
        self,
        algorithms: Iterable[str] | None = None,
        sizes: Iterable[int] | None = None,
        *,
        seeds: Sequence[int] | None = None,
        samples: int | None = None,
    ) -> Split:
        """A part of this split, or another number of samples; sizes that are not the split's own are taken as given."""
        chosen = self.sizes if algorithms is None else {name: self.sizes.get(name, ()) for name in algorithms}
        if sizes is not None:
            asked = tuple(sizes)
            chosen = dict.fromkeys(chosen, asked)
        return replace(
            self,
            sizes=chosen,
            seeds=self.seeds if seeds is None else tuple(seeds),
            samples=self.samples if samples is None else samples,
        )

    def to_json(self) -> dict[str, Any]:
        """All that decides the samples."""
        return asdict(self) | {
            "sizes": {name: list(sizes) for name, sizes in self.sizes.items()},
            "seeds": list(self.seeds),
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Split:
        """What :meth:`to_json` wrote."""
        return Split(fields["name"], fields["sizes"], tuple(fields["seeds"]), fields["samples"], fields["traces"])


def training(traces: bool = True) -> Split:
    """Upstream's training set: 215 pairs of algorithm and size, 10,000 samples of each."""
    return Split("train", TRAINING_SIZES, (0,), 10_000, traces)


def evaluation(traces: bool = True) -> Split:
    """Upstream's evaluation set: every size from 4 on, 125 fresh samples for each of five seeds ("resampling")."""
    return Split("evaluation", EVALUATION_SIZES, (3, 14, 35, 81, 94), 125, traces)


SPLITS = {"train": training, "evaluation": evaluation}


def check_algorithm(name: str) -> str:
    """``name``, if it is one of the thirty."""
    if name not in _LARGEST:
        raise ValueError(f"expected an algorithm to be one of {', '.join(ALGORITHMS)}, got {name!r}")
    return name


def check_size(size: int) -> int:
    """``size``, if samples of it can be made."""
    if not _whole(size) or not SMALLEST <= size <= LARGEST:
        raise ValueError(f"expected a size to be a whole number from {SMALLEST} to {LARGEST}, got {size}")
    return int(size)


def check_sizes(sizes: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    """The sizes of each algorithm, in order and each once."""
    checked = {check_algorithm(name): tuple(sorted({check_size(n) for n in of})) for name, of in sizes.items()}
    if not checked or not all(checked.values()):
        raise ValueError("expected at least one algorithm and one size of each, got none")
    return checked


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
