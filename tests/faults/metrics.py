"""One look at ``/metrics``."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class Scrape:
    """The samples of one page."""

    def __init__(self, page: bytes) -> None:
        self._samples: list[Sample] = [
            sample for family in text_string_to_metric_families(page.decode()) for sample in family.samples
        ]

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self._samples}

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of that name with these labels among theirs; 0 without any."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def about(self, value: str) -> list[Sample]:
        """All series that have this value in any label."""
        return [sample for sample in self._samples if value in sample.labels.values()]
