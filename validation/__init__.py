"""Experiments, their artifacts, and the claims recomputed from them. Never imported by the package."""
