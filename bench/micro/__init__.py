"""Benchmarks of parts: the core by instructions counted (:mod:`bench.micro.instructions`), and its Python face and a
choice against the clock (``test_*.py``, pytest-benchmark). The core against the clock is ``core/benches``."""
