"""An engine in a process of its own, to be killed: attaches, says so, is told to go on, restores one session.

Arguments: the worker's socket, a file with its hello, the session, the number of its tokens, of 16 to a
block.
"""

import sys
from pathlib import Path

from gpu_worker.sidecar.client import WorkerClient
from gpu_worker.v1.attachment_pb2 import AttachHello


def main() -> None:
    """Attach, say so, wait for a line, restore."""
    path, hello, session, token_count = sys.argv[1:]
    with (
        WorkerClient(path) as client,
        client.attach(AttachHello.FromString(Path(hello).read_bytes())) as attached,
    ):
        sys.stdout.write("attached\n")
        sys.stdout.flush()
        sys.stdin.readline()
        blocks = list(range(-(-int(token_count) // 16)))
        attached.restore(session, blocks, token_end=int(token_count))


if __name__ == "__main__":
    main()
