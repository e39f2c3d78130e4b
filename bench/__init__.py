"""Measures kvsync beside its peers, on the same work, in one run: ``python -m bench``. README.md says how.

``bench.work`` and ``bench.subjects`` also run in the peers' own environments: they import the standard library only,
all else at the place where it is used.
"""
