"""Kernels as an author outside of the package writes them, from its documentation alone: one in each file.

`small_run(seed)` of each calls its kernel twice and looks at the results. test_sweep.py leaves out each of their
synchronisations, and test_races.py runs them under many seeds.
"""
