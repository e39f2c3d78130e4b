"""Metric families that are cheap to use and can forget.

A child is looked up by a tuple in one dictionary, and a family can drop all children of one worker or model: series of
what is gone must not stay. Families are used from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

_Kind = TypeVar("_Kind", bound=MetricWrapperBase)


class Family(Generic[_Kind]):
    """One metric with labels. ``family(*values).inc()``."""

    def __init__(self, metric: _Kind, labels: Sequence[str]) -> None:
        self._metric = metric
        self._labels = tuple(labels)
        self._children: dict[tuple[str, ...], _Kind] = {}
        self._lock = Lock()

    def __call__(self, *values: str) -> _Kind:
        child = self._children.get(values)
        return child if child is not None else self._made(values)

    def _made(self, values: tuple[str, ...]) -> _Kind:
        with self._lock:
            child = self._metric.labels(*values) if values else self._metric
            self._children[values] = child
            return child

    def drop(self, label: str, value: str) -> None:
        """Forget every series whose label has this value."""
        if label not in self._labels:
            return
        place = self._labels.index(label)
        with self._lock:
            for values in [values for values in self._children if values[place] == value]:
                del self._children[values]
                self._metric.remove(*values)


class Totals(Collector):
    """A counter that another room keeps: its value is put here when metrics are asked for."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._values: dict[tuple[str, ...], float] = {}

    def put(self, value: float, *values: str) -> None:
        self._values[values] = value

    def drop(self, label: str, value: str) -> None:
        """As :meth:`Family.drop`."""
        if label in self._labels:
            place = self._labels.index(label)
            self._values = {key: total for key, total in self._values.items() if key[place] != value}

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for key, value in self._values.items():
            family.add_metric(key, value)
        yield family


class Families:
    """Makes families in one registry, and drops series over all of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._all: list[Family[Counter] | Family[Gauge] | Family[Histogram] | Totals] = []

    def counter(self, name: str, text: str, *labels: str) -> Family[Counter]:
        family = Family(Counter(name, text, labels, registry=self._registry), labels)
        self._all.append(family)
        return family

    def gauge(self, name: str, text: str, *labels: str) -> Family[Gauge]:
        family = Family(Gauge(name, text, labels, registry=self._registry), labels)
        self._all.append(family)
        return family

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Family[Histogram]:
        family = Family(Histogram(name, text, labels, buckets=buckets, registry=self._registry), labels)
        self._all.append(family)
        return family

    def totals(self, name: str, text: str, *labels: str) -> Totals:
        family = Totals(name, text, labels)
        self._registry.register(family)
        self._all.append(family)
        return family

    def drop(self, label: str, value: str) -> None:
        for family in self._all:
            family.drop(label, value)


__all__ = ["Families", "Family", "Totals"]
