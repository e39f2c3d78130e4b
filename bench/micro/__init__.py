"""Benchmarks of parts, none of which is asserted.

make instructions             the core by instructions counted, compared with the last time: :mod:`.instructions`
make bench-micro              all against the clock:
  cd core/benches && cargo bench -- lookup      the core (``benches/core.rs``), or what has this in its name
  .venv/bin/pytest bench/micro -k match         calls from Python, and choosing a worker (``test_*.py``)
"""
