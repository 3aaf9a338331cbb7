"""The largest error of every implementation, as a multiple of its tolerance.

python -m tests.conformance.report [name ...]
"""

from __future__ import annotations

import sys
import time

from .cases import load
from .implementations import IMPLEMENTATIONS
from .registry import gpu_is_there
from .tolerances import deviations


def main(names: list[str]) -> None:
    """Print one line per implementation and quantity, largest first."""
    for implementation in IMPLEMENTATIONS.values():
        if (names and implementation.name not in names) or (
            implementation.gpu and not gpu_is_there(implementation.gpu)
        ):
            continue
        start = time.perf_counter()
        worst: dict[str, tuple[float, str]] = {}
        for case_id in implementation.cases():
            case = load(case_id)
            for quantity, ratio in deviations(case, implementation.run(case)):
                worst[quantity] = max(worst.get(quantity, (0.0, "")), (ratio, case_id))
        print(f"{implementation.name}: {len(implementation.cases())} cases in {time.perf_counter() - start:.1f} s")
        for quantity, (ratio, case_id) in sorted(worst.items(), key=lambda item: -item[1][0]):
            print(f"  {quantity:20s} {ratio:8.3f}  {case_id}")


if __name__ == "__main__":
    main(sys.argv[1:])
