"""Speed and memory, measured against named peers in the same run. Results are in benchmarks/results/."""
