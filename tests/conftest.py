"""How hard Hypothesis tries: a hundred examples per test, or ten thousand with ``KVSYNC_FUZZ=1`` (``make fuzz``)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The machine decides how long an example takes, so none has a deadline.
settings.register_profile("kvsync", deadline=None)
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=10_000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("fuzz" if os.environ.get("KVSYNC_FUZZ") == "1" else "kvsync")
