"""An SSD in time: one read at a time, and writes behind each other that share its speed with reads. Pure."""


class Ssd:
    """`write_bytes_per_s` None: writes take no time. Not `is_serial`: no read waits for another.

    Where a read and a write meet, each goes half as fast until one of them is done.
    """

    def __init__(self, read_bytes_per_s: float, write_bytes_per_s: float | None, *, is_serial: bool) -> None:
        self._read_bytes_per_s = read_bytes_per_s
        self._write_bytes_per_s = write_bytes_per_s
        self._is_serial = is_serial
        self.reader_free_s = 0.0
        self._writer_free_s = 0.0

    def free_s(self, now_s: float) -> float:
        """When a read that is asked for now begins."""
        return max(self.reader_free_s, now_s) if self._is_serial else now_s

    def read(self, size_bytes: int, now_s: float) -> float:
        """Read so much; returns when it is there."""
        begin_s = self.free_s(now_s)
        read_s = size_bytes / self._read_bytes_per_s
        shared_s = min(read_s, max(self._writer_free_s - begin_s, 0.0))
        self._writer_free_s += shared_s
        end_s = begin_s + read_s + shared_s
        self.reader_free_s = max(self.reader_free_s, end_s)
        return end_s

    def write(self, size_bytes: int, now_s: float) -> float:
        """Write so much behind what is being written; returns how far it lies behind, in seconds."""
        if self._write_bytes_per_s is None:
            return 0.0
        write_s = size_bytes / self._write_bytes_per_s
        begin_s = max(self._writer_free_s, now_s)
        self._writer_free_s = begin_s + write_s
        return self._writer_free_s - now_s
