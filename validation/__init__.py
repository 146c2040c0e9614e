"""Experiments, their artifacts, and the claims recomputed from them."""
