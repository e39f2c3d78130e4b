"""How far one process reaches: memory, lookups, event lag and removals, by workers, blocks and prompt length.

    python -m bench.scale            all of it, some 20 minutes → bench/results/scale-<date>.json
    python -m bench.scale --quick    as little as shows that everything runs; only shown
    python -m bench.scale.page       docs/scaling.md from the last of these files

Each line of the plan is a process of its own (:mod:`bench.scale.held`: filled in process; :mod:`bench.scale.followed`:
over real ZMQ sockets).
"""
