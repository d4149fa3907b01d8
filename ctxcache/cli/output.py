"""How commands print: a choice, and nothing else."""

import enum


class Output(enum.StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
