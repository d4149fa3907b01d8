"""The rows of the table, in its order."""

from lab.bench.row import Row
from lab.bench.rows import blocks, calls, local, opening, remote, requests, ssd

ROWS: dict[str, Row] = {
    row.name: row
    for rows in (local.ROWS, ssd.ROWS, remote.ROWS, blocks.ROWS, calls.ROWS, requests.ROWS, opening.ROWS)
    for row in rows
}
