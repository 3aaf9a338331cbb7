"""Golden vectors, and the loader that runs them against every implementation that registers itself."""
