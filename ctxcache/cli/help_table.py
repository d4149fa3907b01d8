"""The table of options that --help prints: names of options are whole, other words are folded."""

from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text


class HelpTable(Table):
    """Columns grow with names of options, and the others share what is left."""

    def add_row(self, *cells: Any, **given: Any) -> None:
        """Add a line as `Table` does."""
        super().add_row(*cells, **given)
        for column, cell in zip(self.columns, cells, strict=False):
            column.overflow = "fold"
            if isinstance(cell, Text) and cell.plain.startswith("-"):
                column.no_wrap = True
                column.min_width = max(column.min_width or 0, cell_len(cell.plain))
