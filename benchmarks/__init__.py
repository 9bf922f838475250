"""Benchmarks: each writes its figures, its command and its environment to benchmarks/results/."""
