"""A simulated vLLM engine without a GPU: the same HTTP, the same events, the same cache policy.

It is an engine, not a part of the gateway: it imports nothing of the other rooms and so is an independent witness of
what they claim. ``request``, ``pool``, ``groups``, ``cache`` and ``scheduler`` are the engine proper, without I/O and
without a clock; ``timing`` and ``rank`` let time pass; ``dialect`` and ``publisher`` are its events; ``bodies``,
``calls``, ``tokens``, ``outputs``, ``answers``, ``metrics`` and ``server`` its HTTP; ``faults`` what can go wrong;
``config`` and ``engine`` put it together.
"""

from kvsync.engine_sim.config import SimConfig
from kvsync.engine_sim.engine import SimEngine
from kvsync.engine_sim.timing import TimeModel

__all__ = ["SimConfig", "SimEngine", "TimeModel"]
