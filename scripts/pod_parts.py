"""The meaning of a pod's manifest on one machine.

A container's user, its volumes, its sandbox, its probes.

The parts of scripts/run_pod.py that run nothing but probes.
"""

import contextlib
import dataclasses
import http.client
import os
import re
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

Spec = Mapping[str, Any]
SHM_BYTES = 64 << 20
"""The size that a container runtime gives /dev/shm."""
WRITABLE, READABLE, ENTERED = 0o660, 0o440, 0o110
"""The mode bits that fsGroup adds: to files, to files of read-only volumes, to directories besides."""


class PodRefusedError(Exception):
    """A manifest that a kubelet would refuse, or that this cannot run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """An unpacked image: its root file system, and its configuration as Docker has it."""

    root: Path
    configuration: Spec

    @property
    def user(self) -> tuple[int, int]:
        """The image's user and group, for a manifest without a user. Raises PodRefusedError for a name."""
        user, _, group = str(self.configuration.get("User") or "0").partition(":")
        if not user.isdecimal() or not (group or "0").isdecimal():
            raise PodRefusedError(f"image user {user}:{group} is no number: runAsNonRoot cannot be verified")
        return int(user), int(group or "0")

    @property
    def environment(self) -> dict[str, str]:
        """Its variables."""
        return dict(text.split("=", 1) for text in self.configuration.get("Env") or ())


# A container's user
# ------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """The user of a container, and its rights."""

    user: int
    group: int
    more_groups: tuple[int, ...]
    is_root_read_only: bool
    drops_capabilities: bool


def identity(pod: Spec, container: Spec, image: Image) -> Identity:
    """By the container's security context, then the pod's, then the image. Raises PodRefusedError."""
    of_pod, own = pod.get("securityContext") or {}, container.get("securityContext") or {}
    security = {**of_pod, **own}
    if security.get("privileged") or (security.get("capabilities") or {}).get("add"):
        raise PodRefusedError(f"{container['name']}: a privileged container cannot be run here")
    user, group = image.user
    if security.get("runAsUser") is not None:
        # The image's group goes with the image's user.
        user, group = int(security["runAsUser"]), 0 if security["runAsUser"] != user else group
    if security.get("runAsGroup") is not None:
        group = int(security["runAsGroup"])
    if security.get("runAsNonRoot") and user == 0:
        raise PodRefusedError(f"{container['name']}: runAsNonRoot, and its user is root")
    groups = [of_pod["fsGroup"]] if of_pod.get("fsGroup") is not None else []
    return Identity(
        user,
        group,
        tuple(groups + list(of_pod.get("supplementalGroups") or ())),
        bool(security.get("readOnlyRootFilesystem")),
        "ALL" in ((security.get("capabilities") or {}).get("drop") or ()),
    )


def become(who: Identity) -> list[str]:
    """The command that becomes that user and executes the rest; nothing is left to become another one."""
    groups = ",".join(str(group) for group in dict.fromkeys((who.group, *who.more_groups)))
    bounds = ["--bounding-set=-all"] if who.drops_capabilities else []
    return [
        "setpriv",
        f"--reuid={who.user}",
        f"--regid={who.group}",
        f"--groups={groups}",
        "--no-new-privs",
        "--inh-caps=-all",
        *bounds,
        "--",
    ]


def arguments_of(container: Spec, image: Image, environment: Mapping[str, str]) -> list[str]:
    """Command and arguments: the container's, else the image's; `$(NAME)` is a variable."""
    command = container.get("command") or image.configuration.get("Entrypoint") or []
    # A command of the container's own leaves the image's arguments out.
    default = [] if container.get("command") else image.configuration.get("Cmd") or []
    arguments = container.get("args", default)

    def value(match: re.Match[str]) -> str:
        return match[0][1:] if match[0].startswith("$$") else environment.get(match[1], match[0])

    return [re.sub(r"\$?\$\(([A-Za-z_][\w.-]*)\)", value, str(text)) for text in (*command, *arguments)]


# Volumes
# -------


def give_to_group(path: Path, group: int, *, is_read_only: bool, only_on_mismatch: bool) -> None:
    """Do to a volume what `fsGroup` says: every file's group, and what a group may do."""
    if only_on_mismatch and not is_read_only:
        status = path.stat()
        wanted = WRITABLE | ENTERED | stat.S_ISGID
        if status.st_gid == group and status.st_mode & wanted == wanted:
            return
    for place, _, names in os.walk(path):
        for entry in (place, *(f"{place}/{name}" for name in names)):
            status = os.lstat(entry)
            os.lchown(entry, -1, group)
            if stat.S_ISLNK(status.st_mode):
                continue
            mode = READABLE if is_read_only else WRITABLE
            if stat.S_ISDIR(status.st_mode):
                mode |= ENTERED | stat.S_ISGID
            Path(entry).chmod(stat.S_IMODE(status.st_mode) | mode)


def write_keys(
    place: Path, content: Mapping[str, bytes], *, default_mode: int, items: Sequence[Spec] = ()
) -> None:
    """Lay keys out as a kubelet does.

    Files behind `..data`, a link to what holds now, which is replaced at once.
    """
    chosen = [(item["key"], item["path"], item.get("mode", default_mode)) for item in items]
    version = place / f"..{time.time_ns()}"
    version.mkdir(mode=0o755)
    for key, path, mode in chosen or [(key, key, default_mode) for key in content]:
        if key not in content:
            raise PodRefusedError(f"{place.name}: there is no key {key}")
        file = version / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content[key])
        file.chmod(mode)
        link = place / Path(path).parts[0]
        if not link.is_symlink():
            link.symlink_to(Path("..data") / Path(path).parts[0])
    link = place / "..data.new"
    link.symlink_to(version.name)
    link.rename(place / "..data")


@dataclasses.dataclass(frozen=True, slots=True)
class Mount:
    """A place of the machine in a container."""

    source: Path
    target: str
    is_read_only: bool


# The sandbox
# -----------


def sandbox(root: Path, mounts: Iterable[Mount], who: Identity, *, hostname: str) -> list[str]:
    """Bubblewrap's arguments: namespaces, mounts, and the capabilities that becoming another user takes."""
    arguments = [
        "bwrap",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--as-pid-1",
        "--die-with-parent",
        "--hostname",
        hostname,
        "--bind",
        str(root),
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--ro-bind",
        "/sys",
        "/sys",
        "--perms",
        "1777",
        "--size",
        str(SHM_BYTES),
        "--tmpfs",
        "/dev/shm",  # noqa: S108  # its place in the sandbox
    ]
    for mount in mounts:
        arguments += ["--ro-bind" if mount.is_read_only else "--bind", str(mount.source), mount.target]
    if who.is_root_read_only:
        arguments += ["--remount-ro", "/"]
    kept = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
    return [
        *arguments,
        "--chdir",
        "/",
        "--cap-drop",
        "ALL",
        *(word for name in kept for word in ("--cap-add", name)),
    ]


def bytes_of(quantity: str | int) -> int:
    """A quantity as Kubernetes writes it."""
    number, unit = re.fullmatch(r"([0-9.]+)([KMGTPE]i?)?", str(quantity)).groups()  # type: ignore[union-attr]
    if unit is None:
        return int(float(number))
    base = 1024 if unit.endswith("i") else 1000
    return int(float(number) * base ** (1 + "KMGTPE".index(unit[0])))


# Probes
# ------


def ask(probe: Spec, ports: Mapping[str, int], execute: Callable[[Sequence[str], float], int]) -> str:
    """Ask once, as a kubelet does; what is wrong, empty where nothing."""
    timeout_s = float(probe.get("timeoutSeconds", 1))
    try:
        if "httpGet" in probe:
            return _ask_http(probe["httpGet"], ports, timeout_s)
        if "grpc" in probe:
            return _ask_grpc(probe["grpc"], timeout_s)
        if "tcpSocket" in probe:
            socket.create_connection(
                ("127.0.0.1", _port(probe["tcpSocket"]["port"], ports)), timeout_s
            ).close()
            return ""
        code = execute(probe["exec"]["command"], timeout_s)
    except (OSError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return f"exit code {code}" if code else ""


def _port(port: int | str, ports: Mapping[str, int]) -> int:
    return ports[port] if isinstance(port, str) else port


def _ask_http(probe: Spec, ports: Mapping[str, int], timeout_s: float) -> str:
    port = _port(probe["port"], ports)
    connection: http.client.HTTPConnection
    if probe.get("scheme", "HTTP") == "HTTPS":
        # A kubelet does not verify it either.
        context = ssl._create_unverified_context()  # noqa: S323, SLF001
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    with contextlib.closing(connection):
        headers = {header["name"]: header["value"] for header in probe.get("httpHeaders") or ()}
        connection.request("GET", probe.get("path", "/"), headers=headers)
        answer = connection.getresponse()
        text = answer.read(1024).decode(errors="replace").strip()
        return "" if 200 <= answer.status < 400 else f"HTTP {answer.status}: {text}"


def _ask_grpc(probe: Spec, timeout_s: float) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{probe['port']}") as channel:
        try:
            request = HealthCheckRequest(service=probe.get("service", ""))
            answer = HealthStub(channel).Check(request, timeout=timeout_s)  # type: ignore[attr-defined]  # its stubs know no rpc
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    name = HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if answer.status == HealthCheckResponse.SERVING else name
