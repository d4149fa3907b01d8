"""The images, and the chart's pods, run as they are: `make pod`, minutes, no part of `make test`.

Built by scripts/build_image.py and run by scripts/run_pod.py; skipped where these cannot run. A client of
this machine's network writes durably, the store is killed, and runs again on the same volumes.
"""

import contextlib
import http.client
import json
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml
from build_image import image_of
from chart import CHART, ROOT, helm
from pki import Pki
from run_pod import Cluster, Pod, built_images, lacking

import ctxcache
from ctxcache.client import Client
from ctxcache.client.credentials import ClientTls
from ctxcache.client.types import Durability
from ctxcache.errors import SessionNotFound, Unauthenticated
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.identity import Token, digest_of, new_secret, parse_grant
from tests.fleet import seaweed
from tests.fleet.seaweed import kept_ports

IMAGES = built_images()
pytestmark = [
    pytest.mark.skipif(bool(lacking()), reason=f"NO POD WAS RUN: {lacking()}"),
    pytest.mark.skipif(
        image_of("store") not in IMAGES, reason="NO POD WAS RUN: there is no image: scripts/build_image.py"
    ),
]
needs_worker = pytest.mark.skipif(
    image_of("worker") not in IMAGES, reason="NO WORKER WAS RUN: scripts/build_image.py worker"
)
HIDDEN = Stream(0, StateKind.HIDDEN)
ROW_BYTES = 32
TOKEN_COUNT = 300
NAMESPACE = "inference"
METRICS_TOKEN = "0123456789abcdef"  # noqa: S105  # of a test
SMALL = {
    "arena": {"sizeMiB": 128},
    "memoryOverheadMiB": 512,
    "ssdFileSize": "256MiB",
    "preStopSleepSeconds": 1,
}


def _ports() -> dict[str, Any]:
    """Free ports, since all pods share this machine's; a pod that runs again has them again."""
    numbers = kept_ports(4)
    return {
        "service": {"port": numbers[0], "bulkPort": numbers[1]},
        "metrics": {"port": numbers[2], "podMonitor": {"port": numbers[3]}},
    }


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(one[key], other[key])
        for key in one.keys() & other.keys()
        if isinstance(one[key], dict) and isinstance(other[key], dict)
    }
    return one | other | both


@pytest.fixture(scope="module", autouse=True)
def _images_of_this_tree() -> None:
    """A verdict on images of another tree would be one on nothing."""
    for name, image in IMAGES.items():
        (packages,) = image.root.glob("opt/ctxcache/lib/python3*/site-packages")
        for file in (*ROOT.glob("ctxcache/**/*.py"), *ROOT.glob("gpu_worker/**/*.py")):
            built = packages / file.relative_to(ROOT)
            if not built.exists() or built.read_bytes() != file.read_bytes():
                pytest.fail(f"{name} was built of another tree ({file.relative_to(ROOT)}): run `make image`")


class Release:
    """The chart, rendered for this machine."""

    def __init__(
        self,
        directory: Path,
        values: dict[str, Any],
        secrets: Mapping[str, Mapping[str, bytes]],
        name: str = "cache",
    ) -> None:
        self.name = name
        self.values = _merged(_merged({"store": SMALL}, _ports()), values)
        self._file = directory / f"{name}.yaml"
        self._file.write_text(yaml.safe_dump(self.values))
        text = helm("template", name, str(CHART), "--namespace", NAMESPACE, "--values", str(self._file))
        self.cluster = Cluster(text, directory / f"node-{name}", images=IMAGES, namespace=NAMESPACE)
        for secret, content in secrets.items():
            self.cluster.add_secret(secret, content)
        self.pods: list[Pod] = []

    @property
    def target(self) -> str:
        """Where a client of this machine finds the store."""
        return f"127.0.0.1:{self.values['service']['port']}"

    def run(self, workload: str = "") -> Pod:
        """Start a pod, the store's where no other is named; removed with the release."""
        pod = Pod(self.cluster, workload or f"statefulset/{self.name}-ctxcache")
        self.pods.append(pod)
        pod.start()
        return pod

    def end(self) -> None:
        """Remove its pods."""
        for pod in self.pods:
            pod.remove()


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Any]:
    """Make releases from values."""
    made: list[Release] = []
    tmp_path.chmod(0o711)
    for parent in tmp_path.parents:
        # Other users pass through to the volumes.
        if str(parent).startswith("/tmp/pytest-"):  # noqa: S108  # where pytest puts it
            parent.chmod(parent.stat().st_mode | 0o011)

    def make(
        values: dict[str, Any] | None = None,
        secrets: Mapping[str, Mapping[str, bytes]] | None = None,
        name: str = "cache",
    ) -> Release:
        made.append(Release(tmp_path, values or {}, secrets or {}, name))
        return made[-1]

    yield make
    for one in made:
        one.end()


def _spec() -> ModelSpec:
    return ModelSpec(
        model_id="tiny",
        architecture="TinyForCausalLM",
        revision="1",
        weights_digest="",
        tokenizer_digest="",
        dtype=DType.FLOAT16,
        layer_count=1,
        hidden_size=16,
        kv_head_count=1,
        head_size=16,
        rope="",
        norm="",
        is_relocatable=True,
        streams=(StreamSpec(HIDDEN, ROW_BYTES, DType.FLOAT16),),
    )


def _rows() -> dict[Stream, npt.NDArray[np.generic]]:
    random = np.random.default_rng(7)
    return {
        TOKENS: np.arange(TOKEN_COUNT, dtype=np.int32).reshape(-1, 1),
        HIDDEN: random.integers(0, 256, (TOKEN_COUNT, ROW_BYTES), np.uint8),
    }


def _write(client: Client, session_id: str) -> None:
    model = client.models.register(_spec())
    session = client.sessions.create(model, id=session_id, layout=[HIDDEN])
    session.append(_rows(), durability=Durability.DISK)


def _assert_rows_are_there(client: Client, session_id: str) -> None:
    session = client.sessions.get(f"sessions/{session_id}")
    with client.sessions.open(session, client.models.register(_spec())).read() as rows:
        for stream, expected in _rows().items():
            assert rows.array(stream).tobytes() == expected.tobytes()


def _remote(target: str, **options: Any) -> Client:
    return ctxcache.connect(target, access="remote", **options)


def test_the_default_command_serves_from_its_volume(tmp_path: Path, release: Any) -> None:
    """No argument, no setting, a read-only root: ready, healthy, and orderly at its end."""
    container: dict[str, Any] = {
        "name": "store",
        "image": image_of("store"),
        "securityContext": {"readOnlyRootFilesystem": True},
    }
    tmp = {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}
    container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108  # its place in the pod
    item = {
        "kind": "Pod",
        "metadata": {"name": "plain"},
        "spec": {"containers": [container], "volumes": [tmp]},
    }
    made = release()
    made.cluster.objects["pod", "plain"] = item
    pod = made.run("pod/plain")
    image = IMAGES[image_of("store")]
    check = image.configuration["Healthcheck"]["Test"][1:]
    _until_listening(pod)

    assert image.user == (10001, 10001)
    assert pod.execute("store", check).returncode == 0, pod.execute("store", check)
    assert pod.execute("store", ["id", "-u"]).stdout == "10001\n"
    assert pod.execute("store", ["stat", "-c", "%a %u", "/var/lib/ctxcache"]).stdout == "700 10001\n"
    ((code, _),) = pod.stop().values()
    assert code == 0, pod.log()


def test_killed_and_run_again_it_has_what_it_acknowledged(release: Any) -> None:
    """Probes as the kubelet asks them.

    A client writes, SIGKILL, the same claims again, and an orderly end.
    """
    made = release()
    pod = made.run()
    asked = pod.wait_ready()
    with _remote(made.target) as client:
        _write(client, "alice")
    pod.kill()
    pod.remove()
    again = made.run()
    again.wait_ready()

    assert set(asked) == {"store startupProbe", "store readinessProbe", "store livenessProbe"}
    with _remote(made.target) as client:
        _assert_rows_are_there(client, "alice")
        for _ in client.admin.drain():
            continue
        assert again.probe("readinessProbe")
        assert again.probe("livenessProbe") == ""
    ((code, seconds),) = again.stop().values()
    assert code == 0, again.log()
    assert seconds < again.spec["terminationGracePeriodSeconds"]


def test_files_that_a_kubelet_gave_to_the_group_are_taken(release: Any) -> None:
    """A claim that comes from elsewhere: its root is another's, so every file gets the group's mode."""
    made = release()
    pod = made.run()
    pod.wait_ready()
    with _remote(made.target) as client:
        _write(client, "alice")
    pod.stop()
    pod.remove()
    claim = made.cluster.claim("data-cache-ctxcache-0")
    os.chown(claim, 0, 0)
    claim.chmod(0o755)
    again = made.run()
    again.wait_ready()

    with _remote(made.target) as client:
        _assert_rows_are_there(client, "alice")


def test_callers_show_certificates_and_tokens_and_backups_come_back(release: Any, tmp_path: Path) -> None:
    """TLS, tokens, and metrics for who shows one; the CronJob's pod copies the store.

    Its file is restored and served.
    """
    pki = Pki(tmp_path)
    keys = _keys(pki)
    made = release(
        {
            "tls": {"mode": "secret", "secretName": "store-tls", "requireClientCertificate": False},
            "auth": {"tokenHashesSecret": "store-tokens"},
            "metrics": {"tokenSecret": "metrics-token", "tls": {"enabled": True}},
            "backup": {
                "enabled": True,
                "keep": 1,
                "tlsSecret": "client-tls",
                "tokenSecret": "operator-token",
            },
        },
        keys,
    )
    pod = made.run()
    pod.wait_ready()
    tls = ClientTls(ca=tmp_path / "authority.pem")
    options = {"tls": tls, "token_file": tmp_path / "token"}
    with _remote(made.target, **options) as client:
        _write(client, "alice")
    with _remote(made.target, tls=tls) as stranger, pytest.raises(Unauthenticated):
        stranger.sessions.get("sessions/alice")
    port, authority = made.values["metrics"]["port"], tmp_path / "authority.pem"
    assert _metrics_status(port, "", authority) == 401
    assert _metrics_status(port, METRICS_TOKEN, authority) == 200
    for number in (1, 2):
        backup = made.run("cronjob/cache-ctxcache-backup")
        assert backup.wait(120) == {"backup": 0}, (number, backup.log())
        backup.remove()
        # Its file is named by the second.
        _until(partial(_is_past, int(time.time())))
    (file,) = [path for path in made.cluster.claim("cache-ctxcache-backup").iterdir() if path.is_file()]
    assert file.suffix == ".ctxarchive"
    tested = made.run("pod/cache-ctxcache-test")
    assert tested.wait(60) == {"ask": 0}, tested.log()
    assert pod.stop()["store"][0] == 0
    made.end()

    restored = release(
        made.values
        | {
            "store": SMALL | {"data": {"existingClaim": "restored"}},
            "backup": {"enabled": False},
        },
        keys,
    )
    example = (CHART / "examples" / "restore.yaml").read_text().replace("FILE", file.name)
    # A release with other names.
    _, job = yaml.safe_load_all(
        example.replace("name: ctxcache\n", "name: cache-ctxcache\n").replace(
            "ctxcache-backup", "cache-ctxcache-backup"
        )
    )
    restored.cluster.objects["job", "restore"] = job
    restore = restored.run("job/restore")
    assert restore.wait(60) == {"restore": 0}, restore.log()
    restored.run().wait_ready()
    with _remote(restored.target, **options) as client:
        _assert_rows_are_there(client, "alice")


def test_a_store_becomes_one_of_a_fleet_with_what_it_has(release: Any, tmp_path: Path) -> None:
    """The procedure of docs/fleet.md, over a real object store.

    A store that was alone, its pod made anew with a bucket, and a second store, which finds what the first
    had. They verify each other by a name: no certificate has a pod's address.
    """
    pki, name = Pki(tmp_path), "stores.example"
    pki.authority("authority")
    pki.issue("stores", "authority", names=f"DNS:{name}", address="")
    files = {"tls.crt": "stores.pem", "tls.key": "stores.key", "ca.crt": "authority.pem"}
    secrets = {
        "stores-tls": {key: (tmp_path / file).read_bytes() for key, file in files.items()},
        "fleet": {"secret": b"one secret of all these stores"},
        "seaweedfs": {key: value.encode() for key, value in seaweed.VARIABLES.items()},
    }
    tls = ClientTls(tmp_path / "authority.pem", tmp_path / "stores.pem", tmp_path / "stores.key", name)
    values = {"tls": {"mode": "secret", "secretName": "stores-tls"}}
    alone = release(values, secrets)
    pod = alone.run()
    pod.wait_ready()
    with _remote(alone.target, tls=tls) as client:
        _write(client, "alice")
    assert pod.stop()["store"][0] == 0
    alone.end()

    with seaweed.Seaweed(tmp_path) as bucket:
        fleet = {
            "bucket": f"s3://{seaweed.BUCKET}/pods",
            "endpoint": bucket.endpoint,
            "secretName": "fleet",
            "credentialsSecret": "seaweedfs",
            "serverName": name,
        }
        first = release(alone.values | {"store": SMALL | {"fleet": fleet}}, secrets)
        other = release(values | {"store": {"fleet": fleet}}, secrets, "other")
        one, two = first.run(), other.run()
        one.wait_ready()
        two.wait_ready()
        page = (ROOT / "docs" / "fleet.md").read_text()
        (lines,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
        # A machine that starts all of this at once may let a store wait for longer than a peer waits.
        _until(lambda: one.execute("store", ["python", "-c", lines]).returncode == 0)
        _until(lambda: _answers(one) == [(True, "")] * 2)
        with _remote(other.target, tls=tls) as client:
            _until(lambda: _has(client, "alice"))
            _assert_rows_are_there(client, "alice")

        assert two.stop()["store"][0] == 0, two.log()
        assert one.stop()["store"][0] == 0, one.log()


def _answers(pod: Pod) -> list[tuple[bool, str]]:
    """Of each store of the fleet whether it answers, and its problem."""
    socket_ = "unix:/run/ctxcache/ctxcache.sock"
    said = pod.execute("store", ["ctxcache", "--target", socket_, "fleet", "status", "--output", "json"])
    nodes = json.loads(said.stdout)["nodes"] if said.returncode == 0 else ()
    return [(node["is_answering"], node.get("problem", "")) for node in nodes]


def _has(client: Client, session_id: str) -> bool:
    try:
        return bool(client.sessions.get(f"sessions/{session_id}").token_count)
    except SessionNotFound:
        return False


def _is_past(second: int) -> bool:
    return int(time.time()) > second


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_platform_gives_it_a_user_of_its_own(release: Any) -> None:
    """As OpenShift does, where the values leave user and group out: volumes are the group's."""
    made = release(
        {"store": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}}
    )
    security = made.cluster.objects["statefulset", "cache-ctxcache"]["spec"]["template"]["spec"][
        "securityContext"
    ]
    assert not {"runAsUser", "fsGroup"} & security.keys()
    security |= {"runAsUser": 1000680000, "fsGroup": 1000680000, "supplementalGroups": [1000680000]}
    pod = made.run()
    pod.wait_ready()
    with _remote(made.target) as client:
        _write(client, "alice")
    assert pod.execute("store", ["id", "-u"]).stdout == "1000680000\n"
    assert pod.stop()["store"][0] == 0
    pod.remove()
    made.run().wait_ready()
    with _remote(made.target) as client:
        _assert_rows_are_there(client, "alice")


@needs_worker
def test_workers_map_the_arena_of_their_nodes_store(release: Any) -> None:
    """A DaemonSet of stores that share their sockets, and workers beside them, in the node's directories."""
    made = release(
        {
            "store": {"kind": "DaemonSet", "shareWithNode": {"enabled": True}},
            "worker": {"enabled": True, "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
            "metrics": {"podMonitor": {"enabled": True}, "tokenSecret": "metrics-token"},
            "networkPolicy": {"metricsFrom": [{"podSelector": {}}]},
        },
        {"metrics-token": {"token": METRICS_TOKEN.encode()}},
    )
    for path in ("/var/lib/ctxcache", "/run/ctxcache", "/run/ctxcache-worker"):
        place = made.cluster.node_path({"path": path, "type": "DirectoryOrCreate"})
        os.chown(place, 10001, 10001)
    store = made.run("daemonset/cache-ctxcache")
    store.wait_ready()
    worker = made.run("daemonset/cache-ctxcache-worker")
    asked = worker.wait_ready()
    port = made.values["metrics"]["podMonitor"]["port"]

    assert asked["worker readinessProbe"] >= 1
    assert _metrics_status(port, "") == 401
    assert _metrics_status(port, METRICS_TOKEN) == 200
    assert worker.containers["worker"].environment["OMP_NUM_THREADS"] == "1"
    assert worker.stop()["worker"][0] == 0, worker.log()
    assert store.stop()["store"][0] == 0, store.log()


@needs_worker
def test_the_workers_default_command_serves(release: Any) -> None:
    """No argument: it listens at its socket, and its health check finds it."""
    made = release()
    made.cluster.objects["pod", "plain"] = {
        "kind": "Pod",
        "metadata": {"name": "plain"},
        "spec": {
            "containers": [
                {
                    "name": "worker",
                    "image": image_of("worker"),
                    "securityContext": {"readOnlyRootFilesystem": True},
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108  # its place in the pod
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }
    pod = made.run("pod/plain")
    check = IMAGES[image_of("worker")].configuration["Healthcheck"]["Test"][1:]
    while '"listen"' not in pod.log():
        assert pod.containers["worker"].command.poll() is None, pod.log()
        time.sleep(0.1)

    assert pod.execute("worker", check).returncode == 0
    assert pod.stop()["worker"][0] == 0, pod.log()


def _keys(pki: Pki) -> dict[str, dict[str, bytes]]:
    """Every secret that the values below name, and the client's files."""
    pki.authority("authority")
    service = "cache-ctxcache"
    names = ",".join(f"DNS:{service}{suffix}" for suffix in ("", "-metrics", f".{NAMESPACE}.svc"))
    pki.issue("store", "authority", names=names)
    pki.issue("client", "authority")
    secret = new_secret()
    (pki.directory / "token").write_text(secret)
    (pki.directory / "token").chmod(0o600)
    line = Token("operator", digest_of(secret), parse_grant("default", role="operator")).line()

    def pair(name: str) -> dict[str, bytes]:
        files = {"tls.crt": f"{name}.pem", "tls.key": f"{name}.key", "ca.crt": "authority.pem"}
        return {key: (pki.directory / file).read_bytes() for key, file in files.items()}

    return {
        "store-tls": pair("store"),
        "client-tls": pair("client"),
        "store-tokens": {"hashes": f"{line}\n".encode()},
        "operator-token": {"token": secret.encode()},
        "metrics-token": {"token": METRICS_TOKEN.encode()},
    }


def _metrics_status(port: int, token: str, authority: Path | None = None) -> int:
    connection: http.client.HTTPConnection
    if authority is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    else:
        context = ssl.create_default_context(cafile=str(authority))
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
        return connection.getresponse().status


def _until_listening(pod: Pod) -> None:
    while "is ready" not in pod.log():
        assert pod.containers["store"].command.poll() is None, pod.log()
        time.sleep(0.1)
