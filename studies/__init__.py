"""Searches whose outcome the package's defaults rest on, each with its result in results/studies/."""
