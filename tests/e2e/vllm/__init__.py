"""Real vLLM engines on the CPU behind a running gateway: ``make test-vllm`` (docs/testing-with-vllm.md).

``scenarios.py`` holds the scenarios and is collected only when it is named; ``test_harness.py`` checks the harness
itself, without engines, in every test run.
"""
