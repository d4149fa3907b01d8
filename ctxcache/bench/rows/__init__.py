"""The rows of the table, in its order."""

from ctxcache.bench.row import Row
from ctxcache.bench.rows import (
    calls,
    cpu,
    huge_pages,
    lmcache,
    local,
    opening,
    remote,
    several,
    ssd,
    ssd_client,
)

ROWS: dict[str, Row] = {
    row.name: row
    for rows in (
        local.ROWS,
        ssd.ROWS,
        ssd_client.ROWS,
        huge_pages.ROWS,
        remote.ROWS,
        lmcache.ROWS,
        several.ROWS,
        cpu.ROWS,
        calls.ROWS,
        opening.ROWS,
    )
    for row in rows
}
