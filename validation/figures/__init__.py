"""Figures of docs/, drawn from artifacts and from nothing else."""
