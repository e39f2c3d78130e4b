"""Metric families that cost little where something happens, and can forget.

A request updates some twenty figures, so an update is an addition to a plain attribute: no lock, no check, no search by
label name. The text that Prometheus wants is made of them when metrics are asked for. A child is looked up by a tuple
in one dictionary, and a family can drop all children of one worker or model: series of what is gone must not stay.

What must always hold: a child is updated by one thread (two would lose counts); who collects may be another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Counter:
    """What only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Gauge:
    """What is so now."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = float(value)


class Histogram:
    """How often values fell between bounds.

    Args:
        bounds: ascending; a value belongs to the first that is not below it, or to none of them.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


_Child = TypeVar("_Child")


class Family(Collector, Generic[_Child]):
    """One metric with labels. ``family(*values).inc()``.

    Args:
        labels: their names.
        make: makes a child.
        gather: makes the metric of all children, by the values of their labels.
    """

    def __init__(
        self,
        labels: Sequence[str],
        make: Callable[[], _Child],
        gather: Callable[[dict[tuple[str, ...], _Child]], Metric],
    ) -> None:
        self._labels = tuple(labels)
        self._make = make
        self._gather = gather
        self._children: dict[tuple[str, ...], _Child] = {}

    def __call__(self, *values: str) -> _Child:
        child = self._children.get(values)
        if child is None:
            assert len(values) == len(self._labels)
            child = self._children.setdefault(values, self._make())
        return child

    def drop(self, label: str, value: str) -> None:
        """Forget every series whose label has this value."""
        if label in self._labels:
            place = self._labels.index(label)
            for values in [values for values in list(self._children) if values[place] == value]:
                self._children.pop(values, None)

    def collect(self) -> Iterator[Metric]:
        yield self._gather(self._children.copy())


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


class _Dropping(Protocol):
    def drop(self, label: str, value: str) -> None: ...


class Families:
    """Makes families in one registry, and drops series over all of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._all: list[_Dropping] = []

    def counter(self, name: str, text: str, *labels: str) -> Family[Counter]:
        def gather(children: dict[tuple[str, ...], Counter]) -> Metric:
            family = CounterMetricFamily(name, text, labels=labels)
            for values, child in children.items():
                family.add_metric(values, child.value)
            return family

        return self._added(Family(labels, Counter, gather))

    def gauge(self, name: str, text: str, *labels: str) -> Family[Gauge]:
        def gather(children: dict[tuple[str, ...], Gauge]) -> Metric:
            family = GaugeMetricFamily(name, text, labels=labels)
            for values, child in children.items():
                family.add_metric(values, child.value)
            return family

        return self._added(Family(labels, Gauge, gather))

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Family[Histogram]:
        def gather(children: dict[tuple[str, ...], Histogram]) -> Metric:
            family = HistogramMetricFamily(name, text, labels=labels)
            for values, child in children.items():
                family.add_metric(values, _cumulated(child.counts.copy(), buckets), child.total)
            return family

        return self._added(Family(labels, lambda: Histogram(buckets), gather))

    def totals(self, name: str, text: str, *labels: str) -> Totals:
        family = Totals(name, text, labels)
        self._registry.register(family)
        self._all.append(family)
        return family

    def drop(self, label: str, value: str) -> None:
        for family in self._all:
            family.drop(label, value)

    def _added(self, family: Family[_Child]) -> Family[_Child]:
        self._registry.register(family)
        self._all.append(family)
        return family


_INFINITE: Final = "+Inf"


def _cumulated(counts: Sequence[int], bounds: Sequence[float]) -> list[tuple[str, float]]:
    """Per bound, how many values were not above it."""
    found, so_far = [], 0
    for bound, count in zip((*map(floatToGoString, bounds), _INFINITE), counts, strict=True):
        so_far += count
        found.append((bound, float(so_far)))
    return found


__all__ = ["Counter", "Families", "Family", "Gauge", "Histogram", "Totals"]
