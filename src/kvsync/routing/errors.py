"""Why a request can't be routed, in AIBrix's words. Nothing else leaves the router."""

from __future__ import annotations


class RoutingError(Exception):
    """``reason`` is the short name under which it is counted, ``subject`` what the request named."""

    reason = "routing_failed"

    def __init__(self, subject: str, message: str) -> None:
        super().__init__(message)
        self.subject = subject


class NoSuchModel(RoutingError):
    """Nobody ever served a model or adapter of this name (AIBrix: 400)."""

    reason = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(model, f"model {model} does not exist")


class NoReadyEngine(RoutingError):
    """The model is known, but no ready engine serves it, or the adapter, now (AIBrix: 503)."""

    reason = "no_ready_engine"

    def __init__(self, model: str) -> None:
        super().__init__(model, f"error on getting pods for model {model}")


class NoTarget(RoutingError):
    """Ready engines there are, but the filter or the tries already made leave none (AIBrix: 503)."""

    reason = "no_target"

    def __init__(self, model: str) -> None:
        super().__init__(model, "error on selecting target pod")


class BadPolicy(RoutingError):
    """The ``routing-strategy`` header names no policy (AIBrix: 400)."""

    reason = "bad_policy"

    def __init__(self, policy: str) -> None:
        super().__init__(policy, f"incorrect routing strategy {policy}")


class BadFilter(RoutingError):
    """The ``external-filter`` header is no label selector (400)."""

    reason = "bad_filter"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, f"incorrect external filter: {detail}")


__all__ = ["BadFilter", "BadPolicy", "NoReadyEngine", "NoSuchModel", "NoTarget", "RoutingError"]
