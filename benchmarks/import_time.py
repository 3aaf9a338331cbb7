"""How long `import sharpmax` takes, beside the import of NumPy that it stands on: python -m benchmarks.import_time"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from sharpmax.core.files import write_text
from sharpmax.provenance import provenance

RESULT = Path(__file__).parent / "results" / "import_time.json"
ROUNDS = 15


def seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    statements = {"python": "pass", "numpy": "import numpy", "sharpmax": "import sharpmax"}
    rounds = [{name: seconds(statement) for name, statement in statements.items()} for _ in range(ROUNDS)]
    median = {name: statistics.median(r[name] for r in rounds) for name in statements}
    result = {
        "seconds": median,
        "import_sharpmax_s": median["sharpmax"] - median["python"],
        "import_numpy_s": median["numpy"] - median["python"],
        "rounds": ROUNDS,
        "provenance": provenance(["python", "-m", "benchmarks.import_time"]),
    }
    write_text(RESULT, json.dumps(result, indent=2) + "\n")
    print(f"import sharpmax: {result['import_sharpmax_s']:.3f} s, of which NumPy {result['import_numpy_s']:.3f} s")


if __name__ == "__main__":
    main()
