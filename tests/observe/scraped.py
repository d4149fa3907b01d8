"""The page of a metrics endpoint, as values."""

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Values = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]
"""Samples by name and sorted labels."""


def parsed(text: str) -> Values:
    """An exposition's samples."""
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return values
