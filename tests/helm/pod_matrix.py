"""The images, and the pods that the chart renders, run as they are: `make pod`, minutes, no part of `make test`.

Built by scripts/build_image.py and run by scripts/run_pod.py; skipped where these cannot run. A client of this machine's
network writes durably, the store is killed, and runs again on the same volumes.
"""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml
from build_image import image_of
from chart import CHART, helm
from run_pod import Cluster, Pod, built_images, lacking

from ctxcache.client import Client
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.v1.session_pb2 import DURABILITY_DISK

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
STORE = "statefulset/cache-ctxcache"
SMALL = {
    "arena": {"sizeMiB": 128},
    "memoryOverheadMiB": 512,
    "ssdFileSize": "256MiB",
    "preStopSleepSeconds": 1,
}


def _ports() -> dict[str, Any]:
    """Free ports, since all pods share this machine's."""
    with socket.socket() as one, socket.socket() as two, socket.socket() as three, socket.socket() as four:
        for bound in (one, two, three, four):
            bound.bind(("127.0.0.1", 0))
        numbers = [bound.getsockname()[1] for bound in (one, two, three, four)]
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


class Release:
    """The chart, rendered for this machine."""

    def __init__(self, directory: Path, values: dict[str, Any]) -> None:
        self.values = _merged(_merged({"store": SMALL}, _ports()), values)
        self._file = directory / "values.yaml"
        self._file.write_text(yaml.safe_dump(self.values))
        text = helm("template", "cache", str(CHART), "--namespace", NAMESPACE, "--values", str(self._file))
        self.cluster = Cluster(text, directory / "node", images=IMAGES, namespace=NAMESPACE)
        self.pods: list[Pod] = []

    @property
    def target(self) -> str:
        """Where a client of this machine finds the store."""
        return f"127.0.0.1:{self.values['service']['port']}"

    def run(self, workload: str = STORE) -> Pod:
        """Start a pod; removed with the release."""
        pod = Pod(self.cluster, workload)
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

    def make(values: dict[str, Any] | None = None) -> Release:
        made.append(Release(tmp_path, values or {}))
        return made[-1]

    yield make
    for one in made:
        one.end()


def _spec() -> ModelSpec:
    return ModelSpec(
        model_id="tiny", architecture="TinyForCausalLM", revision="1", weights_digest="", tokenizer_digest="",
        dtype=DType.FLOAT16, layer_count=1, hidden_size=16, kv_head_count=1, head_size=16, rope="", norm="",
        is_relocatable=True, streams=(StreamSpec(HIDDEN, ROW_BYTES, DType.FLOAT16),),
    )  # fmt: skip


def _rows() -> dict[Stream, npt.NDArray[np.generic]]:
    random = np.random.default_rng(7)
    return {
        TOKENS: np.arange(TOKEN_COUNT, dtype=np.int32).reshape(-1, 1),
        HIDDEN: random.integers(0, 256, (TOKEN_COUNT, ROW_BYTES), np.uint8),
    }


def _write(client: Client, session_id: str) -> None:
    model = client.register_model(_spec())
    session = client.create_session(model.name, session_id=session_id, layout=[HIDDEN])
    client.append(session, model, _rows(), durability=DURABILITY_DISK)


def _assert_rows_are_there(client: Client, session_id: str) -> None:
    session = client.get_session(f"sessions/{session_id}")
    with client.read(session, client.register_model(_spec())) as rows:
        for stream, expected in _rows().items():
            assert rows.array(stream).tobytes() == expected.tobytes()


def _remote(target: str, **options: Any) -> Client:
    return Client(target, access="remote", **options)


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
        "kind": "Pod", "metadata": {"name": "plain"},
        "spec": {"containers": [container], "volumes": [tmp]},
    }  # fmt: skip
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
    """Probes as the kubelet asks them; a client writes, SIGKILL, the same claims again, and an orderly end."""
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
        for _ in client.drain():
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


def _until_listening(pod: Pod) -> None:
    while "is ready" not in pod.log():
        assert pod.containers["store"].command.poll() is None, pod.log()
        time.sleep(0.1)
