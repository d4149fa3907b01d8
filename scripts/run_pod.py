#!/usr/bin/env python3
"""Run a pod as its manifest says where no cluster runs.

By bubblewrap, over an image of scripts/build_image.py.

    helm template cache helm/ctxcache | scripts/run_pod.py statefulset/cache-ctxcache --state /tmp/node

It does what a kubelet does: user, groups, environment, arguments, memory limit, no capabilities and no new
privileges, a read-only root, volumes with the owners and modes that `fsGroup` gives them, probes, preStop,
SIGTERM and the grace period. The network namespace is the machine's: a pod listens at its ports there, and
services are names of 127.0.0.1. It lacks the seccomp profile and whatever needs a scheduler; a pod that asks
for privileges is refused. Needs root, bubblewrap, util-linux.
"""

import argparse
import base64
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from build_image import IMAGES, TARGETS, image_of
from pod_parts import (
    Identity,
    Image,
    Mount,
    PodRefusedError,
    Spec,
    arguments_of,
    ask,
    become,
    bytes_of,
    give_to_group,
    identity,
    sandbox,
    write_keys,
)

MEMORY_GROUP = Path("/sys/fs/cgroup/memory")


def built_images() -> dict[str, Image]:
    """Those of scripts/build_image.py, by their names."""
    found = {}
    for target in TARGETS:
        configuration = IMAGES / f"{target}.json"
        if configuration.exists():
            found[image_of(target)] = Image(IMAGES / target, json.loads(configuration.read_text()))
    return found


def lacking() -> str:
    """The tools that the machine lacks to run pods; empty where it has all."""
    programs = [name for name in ("bwrap", "nsenter", "mount") if shutil.which(name) is None]
    if programs:
        return f"{' and '.join(programs)} are not installed (apt-get install bubblewrap util-linux)"
    return "" if os.geteuid() == 0 else "pods run as other users, and only root can become these"


class Cluster:
    """The cluster as pods find it: manifests, claims, secrets, images.

    Claims stay below `state` until it is removed.
    """

    def __init__(self, manifests: str, state: Path, *, images: Mapping[str, Image], namespace: str) -> None:
        """Read manifests, as `helm template` writes them."""
        items = [item for item in yaml.safe_load_all(manifests) if item]
        self.objects = {(item["kind"].lower(), item["metadata"]["name"]): item for item in items}
        self.state, self.images, self.namespace = state, images, namespace
        self.state.mkdir(parents=True, exist_ok=True)
        # Other users pass through, and read nothing on the way.
        self.state.chmod(0o711)

    def add_secret(self, name: str, content: Mapping[str, bytes]) -> None:
        """A secret that somebody made beside the release."""
        data = {key: base64.b64encode(value).decode() for key, value in content.items()}
        self.objects["secret", name] = {"metadata": {"name": name}, "data": data}

    def content(self, kind: str, name: str) -> dict[str, bytes]:
        """Keys of a secret or a configMap. Raises PodRefusedError."""
        found = self.objects.get((kind, name))
        if found is None:
            raise PodRefusedError(f"there is no {kind} {name}")
        content = {key: text.encode() for key, text in (found.get("data") or {}).items()}
        if kind == "secret":
            content = {key: base64.b64decode(value) for key, value in content.items()}
        return content | {key: text.encode() for key, text in (found.get("stringData") or {}).items()}

    def template(self, workload: str) -> Spec:
        """The pod of a workload, `kind/name`; a CronJob's is that of its job."""
        kind, _, name = workload.lower().partition("/")
        item = self.objects.get((kind, name))
        if item is None:
            raise PodRefusedError(
                f"there is no {workload} among {sorted('/'.join(key) for key in self.objects)}"
            )
        if kind == "pod":
            return dict(item)
        spec = item["spec"]
        if kind == "cronjob":
            spec = spec["jobTemplate"]["spec"]
        # A StatefulSet's pods have a claim of each of its templates.
        claims = [
            {
                "name": of["metadata"]["name"],
                "persistentVolumeClaim": {"claimName": f"{of['metadata']['name']}-{name}-0"},
            }
            for of in spec.get("volumeClaimTemplates") or ()
        ]
        template = json.loads(json.dumps(spec["template"]))
        template["spec"].setdefault("volumes", []).extend(claims)
        template.setdefault("metadata", {})["name"] = (
            f"{name}-0" if kind == "statefulset" else f"{name}-abcde"
        )
        return dict(template)

    def hosts(self) -> str:
        """Every service's names: all of them are here."""
        names = [name for kind, name in self.objects if kind == "service"]
        pods = [f"{name[1]}-0" for name in self.objects if name[0] == "statefulset"]
        full = [
            f"{prefix}{name}{suffix}"
            for name in names
            for prefix in ("", *(f"{pod}." for pod in pods))
            for suffix in ("", f".{self.namespace}", f".{self.namespace}.svc")
        ]
        return "".join(f"127.0.0.1 {name}\n" for name in ("localhost", *full))

    def claim(self, name: str) -> Path:
        """A claim's volume: made at its first use, as a fresh ext4 is."""
        place = self.state / "claims" / name
        if not place.exists():
            place.mkdir(parents=True, mode=0o755)
            (place / "lost+found").mkdir(mode=0o700)
        return place

    def node_path(self, volume: Spec) -> Path:
        """A directory of the node. Raises PodRefusedError."""
        place = self.state / "node" / str(volume["path"]).lstrip("/")
        if not place.exists():
            if volume.get("type") != "DirectoryOrCreate":
                raise PodRefusedError(f"hostPath {volume['path']} is not there")
            place.mkdir(parents=True, mode=0o755)
        return place


@dataclasses.dataclass(slots=True)
class Running:
    """A container that runs: bubblewrap, and the container's first process as the machine sees it."""

    spec: Spec
    who: Identity
    environment: Mapping[str, str]
    command: subprocess.Popen[bytes]
    pid: int
    log: Path


class Pod:
    """One pod: its volumes from `start` to `remove`, its containers from `start` to `stop`."""

    def __init__(self, cluster: Cluster, workload: str) -> None:
        """Read what it is. Raises PodRefusedError."""
        self._cluster = cluster
        template = cluster.template(workload)
        self.spec: Spec = template["spec"]
        self.metadata: Spec = template["metadata"]
        self.place = cluster.state / "pods" / str(self.metadata["name"])
        self._mounted: list[Path] = []
        self._volumes: dict[str, Path] = {}
        self.containers: dict[str, Running] = {}

    def start(self) -> None:
        """Lay out the volumes, run the init containers to their ends, start the others.

        Raises PodRefusedError.
        """
        self.place.mkdir(parents=True)
        for volume in self.spec.get("volumes") or ():
            self._volumes[volume["name"]] = self._lay_out(volume)
        for container in self.spec.get("initContainers") or ():
            running = self._run(container)
            if container.get("restartPolicy") == "Always":
                self.containers[container["name"]] = running
                self._until(container, "startupProbe")
            elif code := running.command.wait():
                raise PodRefusedError(f"{container['name']} ended with {code}: {running.log.read_text()}")
        for container in self.spec["containers"]:
            self.containers[container["name"]] = self._run(container)

    def wait_ready(self, timeout_s: float = 120) -> dict[str, int]:
        """Startup, then readiness of each container; how often each was asked. Raises PodRefusedError."""
        deadline_s = time.monotonic() + timeout_s
        return {
            f"{container['name']} {name}": self._until(container, name, deadline_s)
            for container in self.spec["containers"]
            for name in ("startupProbe", "readinessProbe", "livenessProbe")
            if name in container
        }

    def probe(self, name: str, container: str = "") -> str:
        """Ask once; what is wrong, empty where nothing."""
        running = self.containers[container or self.spec["containers"][0]["name"]]
        ports = {
            port["name"]: port["containerPort"] for port in running.spec.get("ports") or () if "name" in port
        }

        def execute(command: Sequence[str], timeout_s: float) -> int:
            return self.execute(running.spec["name"], command, timeout_s).returncode

        return ask(running.spec[name], ports, execute)

    def execute(
        self, container: str, command: Sequence[str], timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run something in a container, as `kubectl exec` does."""
        running = self.containers[container]
        enter = ["nsenter", f"--target={running.pid}", "--mount", "--uts", "--ipc", "--pid", "--"]
        return subprocess.run(
            [*enter, *become(running.who), *command],
            env=running.environment,
            timeout=timeout_s,
            check=False,
            capture_output=True,
            text=True,
        )

    def wait(self, timeout_s: float) -> dict[str, int]:
        """Exit codes of the containers of a pod that ends by itself."""
        return {name: running.command.wait(timeout_s) for name, running in self.containers.items()}

    def kill(self) -> None:
        """SIGKILL to every container, as a machine that runs out of memory does."""
        for running in self.containers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGKILL)
        self.wait(30)

    def stop(self) -> dict[str, tuple[int, float]]:
        """End as a kubelet does; by container the exit code and how long it took. 137: it was killed."""
        grace_s = float(self.spec.get("terminationGracePeriodSeconds", 30))
        began_s = time.monotonic()
        found = {}
        for running in self.containers.values():
            hook = (running.spec.get("lifecycle") or {}).get("preStop") or {}
            if "sleep" in hook:
                time.sleep(hook["sleep"]["seconds"])
            elif "exec" in hook:
                self.execute(running.spec["name"], hook["exec"]["command"], grace_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGTERM)
        for name, running in self.containers.items():
            try:
                code = running.command.wait(max(0.0, began_s + grace_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.kill(running.pid, signal.SIGKILL)
                running.command.wait()
                code = 128 + signal.SIGKILL
            found[name] = (code, time.monotonic() - began_s)
        return found

    def remove(self) -> None:
        """Give back what it had, but for its claims and the node's directories."""
        for running in self.containers.values():
            if running.command.poll() is None:
                os.kill(running.pid, signal.SIGKILL)
                running.command.wait()
        self.containers.clear()
        for path in reversed(self._mounted):
            subprocess.run(["umount", path], check=True)
        self._mounted.clear()
        if not self._volumes:
            return
        self._volumes.clear()
        shutil.rmtree(self.place)
        for group in self._groups():
            # Ended processes leave the group a moment later.
            while group.exists():
                with contextlib.suppress(OSError):
                    group.rmdir()

    def log(self, container: str = "") -> str:
        """The output of a container."""
        return self.containers[container or self.spec["containers"][0]["name"]].log.read_text()

    def _until(self, container: Spec, name: str, deadline_s: float = float("inf")) -> int:
        probe, running = container.get(name), self.containers[container["name"]]
        if probe is None:
            return 0
        allowed = int(probe.get("failureThreshold", 3)) if name == "startupProbe" else sys.maxsize
        time.sleep(float(probe.get("initialDelaySeconds", 0)))
        for count in range(1, allowed + 1):
            wrong = self.probe(name, container["name"])
            if not wrong:
                return count
            ended = running.command.poll()
            if ended is not None or time.monotonic() > deadline_s:
                how = f"it ended with {ended}" if ended is not None else "it takes too long"
                raise PodRefusedError(
                    f"{container['name']}: {name}: {wrong}; {how}\n{running.log.read_text()}"
                )
            time.sleep(float(probe.get("periodSeconds", 10)))
        raise PodRefusedError(f"{container['name']}: {name} failed {allowed} times: {wrong}")

    def _lay_out(self, volume: Spec) -> Path:
        place = self.place / "volumes" / str(volume["name"])
        if "hostPath" in volume:
            return self._cluster.node_path(volume["hostPath"])
        is_read_only = False
        if "persistentVolumeClaim" in volume:
            place = self._cluster.claim(volume["persistentVolumeClaim"]["claimName"])
        else:
            place.mkdir(parents=True)
        if "emptyDir" in volume:
            self._empty(place, volume["emptyDir"] or {})
        for source in self._keys(volume):
            is_read_only = True
            write_keys(place, source[0], default_mode=source[1], items=source[2])
        security = self.spec.get("securityContext") or {}
        if security.get("fsGroup") is not None:
            only_on_mismatch = security.get("fsGroupChangePolicy") == "OnRootMismatch"
            give_to_group(
                place, security["fsGroup"], is_read_only=is_read_only, only_on_mismatch=only_on_mismatch
            )
        return place

    def _keys(self, volume: Spec) -> Iterator[tuple[dict[str, bytes], int, Sequence[Spec]]]:
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        mode = (volume.get("projected") or {}).get("defaultMode", 0o644)
        for source in sources:
            for kind, key, name in (("configmap", "configMap", "name"), ("secret", "secret", "secretName")):
                if key not in source:
                    continue
                given = source[key]
                content = self._cluster.content(kind, given.get(name) or given["name"])
                yield content, given.get("defaultMode", mode), given.get("items") or ()

    def _empty(self, place: Path, volume: Spec) -> None:
        if volume.get("medium") == "Memory":
            size = f",size={bytes_of(volume['sizeLimit'])}" if "sizeLimit" in volume else ""
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=0777{size}", "tmpfs", place], check=True)
            self._mounted.append(place)
        place.chmod(0o777)

    def _run(self, container: Spec) -> Running:
        image = self._cluster.images.get(container["image"])
        if image is None:
            raise PodRefusedError(
                f"{container['name']}: no image {container['image']}: see scripts/build_image.py"
            )
        who = identity(self.spec, container, image)
        environment = self._environment(container, image)
        root = self._root(container["name"], image)
        mounts = [*self._image_volumes(container, image), *self._mounts(container)]
        command = sandbox(root, mounts, who, hostname=str(self.metadata["name"]))
        log = self.place / f"{container['name']}.log"
        reading, writing = os.pipe()
        groups = self._memory_group(container)
        arguments = [*become(who), *arguments_of(container, image, environment)]
        with os.fdopen(reading) as said, log.open("ab") as output:
            started = subprocess.Popen(
                [*groups, *command, "--info-fd", str(writing), "--", *arguments],
                env=environment,
                pass_fds=(writing,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            os.close(writing)
            try:
                pid = int(json.load(said)["child-pid"])
            except ValueError as error:
                raise PodRefusedError(f"{container['name']}: {log.read_text()}") from error
        return Running(container, who, environment, started, pid, log)

    def _root(self, name: str, image: Image) -> Path:
        """The image's files, and above them a layer for where volumes are mounted."""
        places = [self.place / "roots" / name / part for part in ("upper", "work", "merged")]
        merged = places[2]
        if not merged.exists():
            for place in places:
                place.mkdir(parents=True)
            options = f"lowerdir={image.root},upperdir={places[0]},workdir={places[1]}"
            subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", merged], check=True)
            self._mounted.append(merged)
        return merged

    def _mounts(self, container: Spec) -> Iterator[Mount]:
        for name, text in (("hosts", self._cluster.hosts()), ("hostname", f"{self.metadata['name']}\n")):
            file = self.place / name
            file.write_text(text)
            yield Mount(file, f"/etc/{name}", is_read_only=True)
        yield Mount(Path("/etc/resolv.conf"), "/etc/resolv.conf", is_read_only=True)
        always_read = {
            volume["name"]
            for volume in self.spec.get("volumes") or ()
            if {"configMap", "secret", "projected"} & volume.keys()
        }
        for mount in sorted(container.get("volumeMounts") or (), key=lambda one: str(one["mountPath"])):
            if mount["name"] not in self._volumes:
                raise PodRefusedError(f"{container['name']}: there is no volume {mount['name']}")
            source = self._volumes[mount["name"]] / mount.get("subPath", "")
            source.mkdir(mode=0o750, exist_ok=True)
            is_read_only = bool(mount.get("readOnly")) or mount["name"] in always_read
            yield Mount(source, mount["mountPath"], is_read_only)

    def _image_volumes(self, container: Spec, image: Image) -> Iterator[Mount]:
        """Those that no volume of the pod's covers, as the image has them."""
        covered = {mount["mountPath"].rstrip("/") for mount in container.get("volumeMounts") or ()}
        for path in (image.configuration.get("Volumes") or {}).keys() - covered:
            place = self.place / "image" / container["name"] / path.strip("/").replace("/", "-")
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "--archive", image.root / path.strip("/"), place], check=True)
            yield Mount(place, path, is_read_only=False)

    def _environment(self, container: Spec, image: Image) -> dict[str, str]:
        found = image.environment
        for source in container.get("envFrom") or ():
            kind = "secret" if "secretRef" in source else "configmap"
            content = self._cluster.content(kind, (source.get("secretRef") or source["configMapRef"])["name"])
            found |= {f"{source.get('prefix', '')}{key}": value.decode() for key, value in content.items()}
        for one in container.get("env") or ():
            found[one["name"]] = self._value(one)
        return found | {"HOSTNAME": str(self.metadata["name"])}

    def _value(self, one: Spec) -> str:
        source = one.get("valueFrom") or {}
        for kind, key in (("secret", "secretKeyRef"), ("configmap", "configMapKeyRef")):
            if key in source:
                return self._cluster.content(kind, source[key]["name"])[source[key]["key"]].decode()
        if "fieldRef" in source:
            facts = {
                "metadata.name": self.metadata["name"],
                "metadata.namespace": self._cluster.namespace,
                "status.podIP": "127.0.0.1",
                "status.hostIP": "127.0.0.1",
                "spec.nodeName": socket.gethostname(),
            }
            return str(facts[source["fieldRef"]["fieldPath"]])
        return str(one.get("value", ""))

    def _groups(self) -> list[Path]:
        names = [one["name"] for one in (*(self.spec.get("initContainers") or ()), *self.spec["containers"])]
        return [MEMORY_GROUP / f"pod-{os.getpid()}-{self.metadata['name']}-{name}" for name in names]

    def _memory_group(self, container: Spec) -> list[str]:
        """The command that puts the container under its memory limit, where this machine can."""
        limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
        if limit is None or not os.access(MEMORY_GROUP / "cgroup.procs", os.W_OK):
            return []
        (group,) = [one for one in self._groups() if one.name.endswith(f"-{container['name']}")]
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(bytes_of(limit)))
        return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


def main() -> None:
    """Run one pod until it ends or is interrupted, and say what its probes say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workload", help="kind/name")
    parser.add_argument("--state", type=Path, required=True, help="directory of claims and of the node")
    parser.add_argument("--namespace", default="default")
    parser.add_argument(
        "--secret", action="append", default=[], metavar="NAME=DIRECTORY", help="files are keys"
    )
    arguments = parser.parse_args()
    if missing := lacking():
        sys.stderr.write(f"NOTICE: NO POD WAS RUN: {missing}\n")
        sys.exit(77)
    cluster = Cluster(sys.stdin.read(), arguments.state, images=built_images(), namespace=arguments.namespace)
    for name, _, directory in (text.partition("=") for text in arguments.secret):
        cluster.add_secret(name, {path.name: path.read_bytes() for path in Path(directory).iterdir()})
    try:
        pod = Pod(cluster, arguments.workload)
        _watch(pod)
    except PodRefusedError as error:
        sys.exit(str(error))


def _watch(pod: Pod) -> None:
    try:
        pod.start()
        sys.stdout.write(f"ready, asked by {pod.wait_ready(float('inf'))}\n")
        with contextlib.suppress(KeyboardInterrupt):
            before: dict[str, str] = {}
            while all(running.command.poll() is None for running in pod.containers.values()):
                now = {name: pod.probe(name) for name in ("readinessProbe", "livenessProbe")}
                for name in (name for name in now if now[name] != before.get(name)):
                    sys.stdout.write(f"{name}: {now[name] or 'ok'}\n")
                before = now
                time.sleep(5)
        sys.stdout.write(f"ended: {pod.stop()}\n")
    finally:
        pod.remove()


if __name__ == "__main__":
    main()
