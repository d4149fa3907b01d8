"""The chart's fleets: what their pods are told, who reaches whom, and what is refused."""

import base64
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import CHART, RenderError, helm, kinds, named, objects, only, render, store_pod
from test_chart_switches import notes_of

BUCKET, SECRET = 'store.fleet.bucket="s3://kv/fleet"', 'store.fleet.secretName="fleet"'
FLEET = (BUCKET, SECRET)
MANY = ("store.replicas=3",)


def settings(found: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """The server's configuration."""
    return tomllib.loads(found["ConfigMap", "cache-ctxcache"]["data"]["ctxcache.toml"])


def peer_selector(found: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """The labels by which a policy names the stores."""
    policy = found["NetworkPolicy", "cache-ctxcache"]["spec"]
    return dict(policy["podSelector"])


@pytest.mark.parametrize("case", ["fleet", "fleet-set"])
def test_a_pod_says_where_it_is_reached_and_shows_the_fleets_secret(case: str) -> None:
    """By its own address, and by a file that only the store's group may read."""
    found = objects(render(case))
    pod = store_pod(found)
    (container,) = pod["containers"]
    told = settings(found)

    assert "--fleet-address=$(POD_IP):7420" in container["args"]
    ip = named(container["env"], "POD_IP")
    assert ip["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    mount = named(container["volumeMounts"], "fleet")
    assert told["fleet_secret_file"] == f"{mount['mountPath']}/secret"
    assert mount["readOnly"]
    assert named(pod["volumes"], "fleet")["secret"]["defaultMode"] == 0o440
    assert told["fleet_bucket"] == "s3://kv/fleet"


def test_a_store_that_is_alone_is_told_nothing_of_it() -> None:
    """No address, no variable, no way out."""
    found = objects(render())
    (container,) = store_pod(found)["containers"]
    assert container["args"] == ["serve", "--output", "json"]
    assert [one["name"] for one in container["env"]] == ["CTXCACHE_CONFIG"]
    assert not [name for name in settings(found) if name.startswith("fleet")]


def test_the_buckets_client_gets_what_it_asks_its_environment_for() -> None:
    """Credentials out of a secret, or by the service account; endpoint and region."""
    (by_secret,) = store_pod(objects(render("fleet")))["containers"]
    assert by_secret["envFrom"] == [{"secretRef": {"name": "fleet-bucket"}}]
    assert named(by_secret["env"], "AWS_REGION")["value"] == "eu-central-1"
    found = objects(render("fleet-set"))
    (container,) = store_pod(found)["containers"]
    assert named(container["env"], "AWS_ENDPOINT_URL")["value"] == "http://seaweedfs.storage:8333"
    account = found["ServiceAccount", "cache-ctxcache"]["metadata"]["annotations"]
    assert "eks.amazonaws.com/role-arn" in account
    more = 'store.extraEnvFrom=[{"configMapRef":{"name":"more"}}]'
    (both,) = store_pod(objects(render("fleet", more)))["containers"]
    assert [list(one) for one in both["envFrom"]] == [["secretRef"], ["configMapRef"]]


def test_stores_reach_each_other_and_the_bucket() -> None:
    """Out to stores and bucket; in from stores; by the same labels, which no other pod has."""
    found = objects(render("default", *FLEET))
    policy = found["NetworkPolicy", "cache-ctxcache"]["spec"]
    stores, bucket = policy["egress"]
    assert stores["to"] == [{"podSelector": peer_selector(found)}]
    assert [port["port"] for port in stores["ports"]] == [7420, 7422]
    assert [(port["port"], port.get("protocol", "TCP")) for port in bucket["ports"]] == [
        (53, "UDP"),
        (53, "TCP"),
        (443, "TCP"),
    ]
    rows, _ = policy["ingress"]
    assert {"podSelector": peer_selector(found)} in rows["from"]
    assert {"podSelector": peer_selector(objects(render()))} not in only(objects(render()), "NetworkPolicy")[
        "spec"
    ]["ingress"][0]["from"]


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://seaweedfs.storage:8333", 8333),
        ("http://minio.storage", 80),
        ("https://s3.example.com", 443),
        ("https://s3.example.com:9000/", 9000),
    ],
)
def test_the_way_to_the_bucket_is_as_wide_as_its_endpoint(endpoint: str, port: int) -> None:
    """One port; where more is known, `networkPolicy.bucketEgress` says it."""
    found = objects(render("default", *FLEET, f'store.fleet.endpoint="{endpoint}"'))
    (_, bucket) = found["NetworkPolicy", "cache-ctxcache"]["spec"]["egress"]
    assert bucket["ports"][-1] == {"port": port}
    told = objects(render("fleet-set"))["NetworkPolicy", "cache-ctxcache"]["spec"]["egress"]
    assert [one["ports"][0]["port"] for one in told] == [7420, 8333, 53, 4317]


def test_a_fleet_has_replicas_and_one_leaves_at_a_time() -> None:
    """Without saying that clients choose; each store by its name, since the bulk channel is of one store."""
    found = objects(render("default", *FLEET, *MANY))
    assert only(found, "StatefulSet")["spec"]["replicas"] == 3
    assert only(found, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert ("Service", "cache-ctxcache") not in found
    assert ("Service", "cache-ctxcache-stores") in found
    of_nodes = objects(render("fleet"))
    assert only(of_nodes, "DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == 1
    assert of_nodes["Service", "cache-ctxcache"]["spec"]["internalTrafficPolicy"] == "Local"


def test_stores_know_each_other_by_a_name_that_their_certificate_has() -> None:
    """By addresses they could not; and the certificate is good for asking as well as for answering."""
    found = objects(render("fleet"))
    certificate = only(found, "Certificate")["spec"]
    assert settings(found)["fleet_server_name"] == "cache-ctxcache.inference.svc"
    assert settings(found)["fleet_server_name"] in certificate["dnsNames"]
    assert certificate["usages"] == ["server auth", "client auth"]
    assert settings(found)["tls_client_ca"]
    other = objects(render("fleet", 'store.fleet.serverName="stores.example.com"'))
    assert "stores.example.com" in only(other, "Certificate")["spec"]["dnsNames"]
    assert "fleet_server_name" not in settings(objects(render("default", *FLEET)))


def test_where_callers_are_told_apart_stores_have_the_role_peer() -> None:
    """By the first rule, before those that are given; where nobody is told apart there is no rule."""
    assert settings(objects(render("fleet-set")))["identities"][0] == {
        "subject": "dns:stores.example.com",
        "tenant": "fleet",
        "role": "peer",
    }
    assert "identities" not in settings(objects(render("fleet")))
    by_token = settings(objects(render("fleet", 'auth.tokenHashesSecret="hashes"')))
    assert [rule["role"] for rule in by_token["identities"]] == ["peer"]
    text = settings(objects(render("fleet", 'store.settings={"identities":"cn:a=b"}')))
    assert text["identities"] == "dns:cache-ctxcache.inference.svc=fleet:peer,cn:a=b"


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([BUCKET], "store.fleet.bucket without a secret: name one by store.fleet.secretName"),
        ([SECRET], "store.fleet.secretName is of a fleet: it needs store.fleet.bucket"),
        (['store.fleet.bucket="file:///srv/fleet"', SECRET], "file:// is a directory of one machine"),
        (['store.fleet.bucket="kv/fleet"', SECRET], "store.fleet.bucket is s3://BUCKET/PREFIX"),
        (['store.fleet.bucket="s3://k:v@kv"', SECRET], "store.fleet.bucket is s3://BUCKET/PREFIX"),
        ([*FLEET, "store.fleet.makeSecret=true"], "set one of them"),
        (['store.fleet.bucket="gs://kv"', SECRET, 'store.fleet.region="eu"'], "are of an s3:// bucket"),
        ([*FLEET, 'store.fleet.endpoint="seaweedfs:8333"'], "store.fleet.endpoint"),
        (
            [*FLEET, 'tls={"mode":"secret","secretName":"x","requireClientCertificate":false}'],
            "store.fleet with TLS needs tls.requireClientCertificate",
        ),
        ([*FLEET, 'auth.tokenHashesSecret="x"'], "store.fleet.tokenSecret is needed"),
        ([*FLEET, *MANY, 'store.data.existingClaim="x"'], "store.data.existingClaim is of one store"),
        ([*FLEET, *MANY, 'worker={"enabled":true}'], "worker.storeTarget is needed"),
        ([*FLEET, 'store.settings={"fleet_address":"x:1"}'], "fleet_address"),
    ],
)
def test_what_is_no_fleet_is_refused_with_its_reason(sets: list[str], said: str) -> None:
    """At install, and never as pods that start and are alone."""
    with pytest.raises(RenderError, match=re.escape(said)):
        render("default", *sets)


def test_notes_say_how_to_look(tmp_path: Path) -> None:
    """The stores that answer, by one of them; engines take any."""
    notes = notes_of("fleet", tmp_path / "one")
    assert (
        "exec ds/cache-ctxcache -- ctxcache --target unix:/run/ctxcache/ctxcache.sock fleet status" in notes
    )
    many = notes_of("fleet-set", tmp_path / "two")
    assert "fleet status" in many
    assert "They share nothing" not in many
    assert "cache-ctxcache-2.cache-ctxcache-stores.default.svc:7420" in many
    assert "fleet" not in notes_of("default", tmp_path / "three")


# -- the secret that the chart makes -------------------------------------------------------------


def made_secret(text: str) -> Any:
    """The fleet's secret in a render."""
    found = objects(text)
    return found["Secret", next(name for kind, name in found if kind == "Secret")]


def test_a_secret_that_is_made_outlives_the_release_and_cannot_be_changed() -> None:
    """Long, drawn, kept when the release goes; a render without the cluster is refused by Kubernetes."""
    one, other = made_secret(render("fleet-set")), made_secret(render("fleet-set"))
    assert len(base64.b64decode(one["data"]["secret"])) == 64
    assert one["data"] != other["data"]
    assert one["immutable"]
    assert one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert "Secret" not in kinds(objects(render("fleet")))


def test_an_upgrade_keeps_the_secret_that_is_there(tmp_path: Path) -> None:
    """Helm asks the cluster: what it has is rendered again, and nothing is drawn."""
    there = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "cache-ctxcache-fleet", "namespace": "default"},
        "data": {"secret": base64.b64encode(b"the secret of all these sessions").decode()},
    }
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"store": {"fleet": {"bucket": "s3://kv", "makeSecret": True}}}))
    with _api(there) as url:
        options = ("--dry-run=server", "--kube-apiserver", url, "--values", str(values))
        text = helm("template", "cache", str(CHART), "--is-upgrade", "--disable-openapi-validation", *options)
    assert made_secret(text)["data"] == there["data"]


@contextmanager
def _api(secret: dict[str, Any]) -> Iterator[str]:
    """As much of a Kubernetes API server as helm asks for one secret; its URL."""
    resource = {"name": "secrets", "namespaced": True, "kind": "Secret", "verbs": ["get"], "singularName": ""}
    name = secret["metadata"]["name"]
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [resource]},
        f"/api/v1/namespaces/default/secrets/{name}": secret,
    }
    missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
