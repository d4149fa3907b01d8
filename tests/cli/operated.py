"""A server for what operators do.

Two SSD paths, a share for its one tenant, faults, a fleet of one, and a session to work on.
"""

from pathlib import Path

from server_process import ServerProcess, write_secret
from stored import connected, model_spec, store_session

from ctxcache.format.model import with_version

SESSION = "chat-17"


def operated_server(directory: Path) -> ServerProcess:
    """One that is not started yet; its first SSD path is `directory/ssd`."""
    paths = ("--ssd-directories", str(directory / "ssd"), "--ssd-directories", str(directory / "other"))
    write_secret(directory / "secret", "a secret of this fleet of stores")
    fleet = ("--fleet-bucket", f"file://{directory}/bucket", "--fleet-secret-file", str(directory / "secret"))
    others = ("--tenant-shares", "default=0.5", "--fault-injection", "true")
    return ServerProcess(directory / "data", *others, *fleet, *paths)


def prepare(target: str) -> None:
    """Leave a session on SSD, and a model of two versions without any, on a server that takes work."""
    with connected(target) as client:
        client.admin.undrain()
        client.admin.clear_faults()
        for name in [session.name for session in client.sessions.list()]:
            client.sessions.open(name).delete()
        client.models.register(model_spec("llama"))
        client.models.register(with_version(model_spec("llama"), "step-100"))
    store_session(target, SESSION)
    with connected(target) as client:
        # A write that upkeep still owes would be one of those that a fault counts.
        client.sessions.open(f"sessions/{SESSION}").flush()
