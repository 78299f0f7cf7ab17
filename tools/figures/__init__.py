"""The parts of tools/make_figures.py: what README.md and docs/benchmarks.md say of the measured results."""
