"""A process that has imported the server, and forks one whenever it is asked to: starts cost no imports.

    python -m tests.faults.zygote

Reads a line of JSON per server from standard input: the command line's arguments, where standard output
and error go, and a named pipe for the server's process id and, later, its exit code.
"""

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Fork a keeper per line; it forks the server and tells of it."""
    from ctxcache import server as _server  # noqa: F401, PLC0415
    from ctxcache.cli import main as _command_line  # noqa: F401, PLC0415
    from tests.faults import plants as _plants  # noqa: F401, PLC0415

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(_keep(json.loads(line)))


def _keep(asked: dict[str, Any]) -> int:
    with open(asked["status"], "w", buffering=1) as status:  # noqa: PTH123
        pid = os.fork()
        if pid == 0:
            _serve(asked)
        status.write(f"{pid}\n")
        _, code = os.waitpid(pid, 0)
        status.write(f"{os.waitstatus_to_exitcode(code)}\n")
    return 0


def _serve(asked: dict[str, Any]) -> None:
    for fd, path in ((0, os.devnull), (1, asked["stdout"]), (2, asked["stderr"])):
        opened = os.open(path, os.O_RDWR | os.O_APPEND if fd else os.O_RDONLY)
        os.dup2(opened, fd)
        os.close(opened)
    code = 1
    try:
        _run(asked)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  what the interpreter would print
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(asked: dict[str, Any]) -> None:
    from ctxcache.cli.main import main as command_line  # noqa: PLC0415
    from tests.faults import planted  # noqa: PLC0415

    if asked["plants"]:
        planted.plant_all(asked["plants"])
    sys.argv = ["ctxcache", *asked["arguments"]]
    command_line()


if __name__ == "__main__":
    main()
