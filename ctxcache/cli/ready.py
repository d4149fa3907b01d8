"""What a server says once it listens: facts for people, or the same facts as one line of JSON.

The JSON's names are documented in docs/operations.md; scripts wait for this line.
"""

import json
from dataclasses import asdict, dataclass

from ctxcache.cli.units import human_size


@dataclass(frozen=True, slots=True)
class Place:
    """A file of a tier. `io_mode` is `memory`, `direct` or `buffered`; `reason` says why, and which pages."""

    path: str
    size_bytes: int
    io_mode: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that listens. `listen_addresses` are gRPC targets, `bulk_addresses` where the bulk channel is."""

    version: str
    pid: int
    listen_addresses: tuple[str, ...]
    bulk_addresses: tuple[str, ...]
    data_directory: str
    control_socket: str
    metrics_address: str
    arena: Place
    ssd: tuple[Place, ...]
    session_count: int

    def json_line(self) -> str:
        """One line, its names stable."""
        return json.dumps({"event": "ready", **asdict(self)}, separators=(",", ":"))

    def text(self) -> str:
        """A few lines for people."""
        lines = [f"ctxcache {self.version} is ready (pid {self.pid})"]
        lines += [f"  listens on  {address}" for address in self.listen_addresses]
        lines += [f"  bulk        {address}" for address in self.bulk_addresses]
        lines.append(f"  data        {self.data_directory}, {self.session_count} sessions found")
        place = f"{human_size(self.arena.size_bytes)} at {self.arena.path}"
        lines.append(f"  DRAM        {place}, {self.arena.reason}")
        lines.append(f"  local       {self.control_socket or 'by gRPC: no control socket'}")
        lines.append(f"  metrics     {self._metrics()}")
        lines += [
            f"  SSD         {human_size(place.size_bytes)} at {place.path}, {place.io_mode} I/O"
            for place in self.ssd
        ]
        return "\n".join(lines)

    def _metrics(self) -> str:
        return f"http://{self.metrics_address}/metrics" if self.metrics_address else "none"
