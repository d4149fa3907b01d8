"""From a pod's manifest to what runs it.

Scripts/run_pod.py and build_image.py, without a sandbox or an image.
"""

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from build_image import local_paths
from chart import objects, render, store_pod
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from pod_parts import (
    Identity,
    Image,
    Mount,
    PodRefusedError,
    arguments_of,
    ask,
    become,
    bytes_of,
    give_to_group,
    identity,
    sandbox,
    write_keys,
)
from run_pod import Cluster, Pod

IMAGE = Image(
    Path("/images/store"),
    {
        "User": "10001:10001",
        "Entrypoint": ["ctxcache"],
        "Cmd": ["serve"],
        "Env": ["PATH=/opt/ctxcache/bin:/bin"],
    },
)


def test_the_store_runs_as_the_chart_says() -> None:
    """By its own user and group, without capabilities, over a root that it cannot write."""
    pod = store_pod(objects(render()))
    who = identity(pod, pod["containers"][0], IMAGE)

    assert who == Identity(10001, 10001, (10001,), is_root_read_only=True, drops_capabilities=True)
    assert become(who) == [
        "setpriv",
        "--reuid=10001",
        "--regid=10001",
        "--groups=10001",
        "--no-new-privs",
        "--inh-caps=-all",
        "--bounding-set=-all",
        "--",
    ]


def test_a_sandbox_has_the_mounts_in_order_and_then_a_read_only_root() -> None:
    """A mount made after the root became read-only would not be there."""
    who = Identity(10001, 10001, (), is_root_read_only=True, drops_capabilities=True)
    mounts = [
        Mount(Path("/v/data"), "/data", is_read_only=False),
        Mount(Path("/v/keys"), "/keys", is_read_only=True),
    ]
    words = " ".join(sandbox(Path("/root"), mounts, who, hostname="store-0"))

    assert "--bind /v/data /data --ro-bind /v/keys /keys --remount-ro /" in words
    assert words.index("--bind /root /") < words.index("/v/data")
    assert "--as-pid-1" in words
    assert words.endswith("--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID --cap-add CAP_SETPCAP")
    writable = Identity(1, 1, (), is_root_read_only=False, drops_capabilities=False)
    assert "--remount-ro" not in sandbox(Path("/root"), mounts, writable, hostname="store-0")


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({}, ["ctxcache", "serve"]),
        ({"args": ["stats"]}, ["ctxcache", "stats"]),
        ({"command": ["sh", "-c"]}, ["sh", "-c"]),
        (
            {"command": ["sh"], "args": ["$(NAME)", "$$(NAME)", "$(OTHER)"]},
            ["sh", "a", "$(NAME)", "$(OTHER)"],
        ),
    ],
)
def test_command_and_arguments_are_as_a_kubelet_has_them(container: Any, expected: Sequence[str]) -> None:
    """The image's where the container says nothing; a command leaves the image's arguments out."""
    assert arguments_of(container, IMAGE, {"NAME": "a"}) == expected


@pytest.mark.parametrize(
    ("pod", "container", "user"),
    [
        ({}, {}, "0"),
        ({"runAsUser": 0}, {}, "10001:10001"),
        ({}, {}, "ctxcache"),
        ({}, {"privileged": True}, "10001"),
        ({}, {"capabilities": {"add": ["SYS_ADMIN"]}}, "10001"),
    ],
)
def test_what_a_kubelet_or_this_machine_would_not_run_is_refused(pod: Any, container: Any, user: str) -> None:
    """Root where root is forbidden, a user without a number, and privileges."""
    of_pod = {"securityContext": {"runAsNonRoot": True} | pod}
    with pytest.raises(PodRefusedError):
        identity(of_pod, {"name": "store", "securityContext": container}, Image(IMAGE.root, {"User": user}))


def test_another_user_of_the_cluster_has_the_root_group() -> None:
    """As OpenShift assigns one: the image's group is the image's user's."""
    security = {"securityContext": {"runAsNonRoot": True, "runAsUser": 1000680000, "fsGroup": 1000680000}}
    who = identity(security, {"name": "store"}, IMAGE)

    assert (who.user, who.group, who.more_groups) == (1000680000, 0, (1000680000,))


def test_keys_lie_behind_a_link_that_is_replaced_at_once(tmp_path: Path) -> None:
    """As a kubelet writes secrets, with the modes that are asked for."""
    write_keys(tmp_path, {"a": b"1", "b": b"2"}, default_mode=0o440)
    write_keys(tmp_path, {"a": b"3", "b": b"4"}, default_mode=0o440)

    assert (tmp_path / "a").read_bytes() == b"3"
    assert (tmp_path / "a").readlink() == Path("..data/a")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o440
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    write_keys(chosen, {"a": b"1"}, default_mode=0o440, items=[{"key": "a", "path": "deep/x", "mode": 0o400}])
    assert (chosen / "deep" / "x").read_bytes() == b"1"
    assert stat.S_IMODE((chosen / "deep" / "x").stat().st_mode) == 0o400
    with pytest.raises(PodRefusedError, match="no key c"):
        write_keys(chosen, {"a": b"1"}, default_mode=0o440, items=[{"key": "c", "path": "c"}])


def test_a_volume_is_given_to_the_group(tmp_path: Path) -> None:
    """Every file of it, unless its root is the group's already; what is only read is not made writable."""
    group = os.getgid()
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o700)
    file = volume / "file"
    file.touch(mode=0o600)
    give_to_group(volume, group, is_read_only=True, only_on_mismatch=True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert volume.stat().st_mode & 0o2070 == 0o2050
    give_to_group(volume, group, is_read_only=False, only_on_mismatch=True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o660
    file.chmod(0o600)
    give_to_group(volume, group, is_read_only=False, only_on_mismatch=True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "expected"), [("64Mi", 64 << 20), ("1.5G", 1_500_000_000), (12, 12), ("2Ti", 2 << 40)]
)
def test_quantities_are_kubernetes(text: str | int, expected: int) -> None:
    """Binary and decimal."""
    assert bytes_of(text) == expected


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the library's name
        pass


@pytest.fixture
def http_port() -> Iterator[int]:
    """A server that answers with the status in the path."""
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def _exits(code: int) -> Any:
    return lambda _command, _timeout_s: code


@pytest.mark.parametrize(("status", "is_well"), [(200, True), (302, True), (401, False), (503, False)])
def test_http_probes_are_right_up_to_399(http_port: int, status: int, *, is_well: bool) -> None:
    """By a port's number or its name."""
    for port in (http_port, "metrics"):
        probe = {"httpGet": {"path": f"/{status}", "port": port}}
        assert (ask(probe, {"metrics": http_port}, _exits(1)) == "") == is_well


def test_grpc_probes_tell_serving_from_the_rest() -> None:
    """By grpc.health.v1."""
    health = HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_HealthServicer_to_server(health, server)
    probe = {"grpc": {"port": server.add_insecure_port("127.0.0.1:0")}, "timeoutSeconds": 5}
    server.start()
    said = []
    for state in (HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING):
        health.set("", state)
        said.append(ask(probe, {}, _exits(1)))
    server.stop(None).wait()

    assert said == ["", "NOT_SERVING"]
    assert ask(probe, {}, _exits(1)).startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED"))


def test_what_is_executed_says_it_by_its_exit_code(http_port: int) -> None:
    """And a port that is connected to by being there."""
    assert ask({"exec": {"command": ["true"]}}, {}, _exits(0)) == ""
    assert ask({"exec": {"command": ["false"]}}, {}, _exits(1)) == "exit code 1"
    assert ask({"tcpSocket": {"port": http_port}}, {}, _exits(1)) == ""


def test_a_pod_of_a_set_has_its_claims(tmp_path: Path) -> None:
    """By the names that Kubernetes gives them; a claim is a fresh file system and stays."""
    cluster = Cluster(render(), tmp_path / "node", images={}, namespace="inference")
    pod = Pod(cluster, "StatefulSet/cache-ctxcache")
    (claim,) = [
        one["persistentVolumeClaim"]["claimName"]
        for one in pod.spec["volumes"]
        if "persistentVolumeClaim" in one
    ]

    assert claim == "data-cache-ctxcache-0"
    assert (cluster.claim(claim) / "lost+found").is_dir()
    assert cluster.claim(claim) == cluster.claim(claim)
    assert "127.0.0.1 cache-ctxcache-0.cache-ctxcache-stores.inference.svc\n" in cluster.hosts()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A workload, a secret, a directory of the node."""
    cluster = Cluster(render(), tmp_path / "node", images={}, namespace="inference")
    with pytest.raises(PodRefusedError, match="no deployment/x"):
        Pod(cluster, "deployment/x")
    with pytest.raises(PodRefusedError, match="no secret keys"):
        cluster.content("secret", "keys")
    with pytest.raises(PodRefusedError, match="hostPath /srv is not there"):
        cluster.node_path({"path": "/srv", "type": "Directory"})
    cluster.add_secret("keys", {"tls.key": b"\xff"})
    assert cluster.content("secret", "keys") == {"tls.key": b"\xff"}


def test_local_directories_of_pips_configuration_are_mounted(tmp_path: Path) -> None:
    """An index's files lie beside it; what is not there, and what is elsewhere, is not mounted."""
    for name in ("wheels", "mirror/simple"):
        (tmp_path / name).mkdir(parents=True)
    text = (
        f"[global]\nfind-links = {tmp_path}/wheels\nextra-index-url = file://{tmp_path}/mirror/simple\n"
        f"index-url = https://packages.example/simple\ncert = {tmp_path}/none.crt\n"
    )

    assert list(local_paths(text)) == [f"{tmp_path}/mirror", f"{tmp_path}/wheels"]
