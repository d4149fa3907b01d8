"""The effect of every switch of the chart, and its refusals."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from chart import CHART, RenderError, helm, kinds, named, objects, only, render, store_pod

PLAIN = [
    "ConfigMap",
    "NetworkPolicy",
    "Pod",
    "PodDisruptionBudget",
    "Service",
    "Service",
    "Service",
    "ServiceAccount",
    "StatefulSet",
]


def test_by_default_there_is_one_store() -> None:
    """And nothing that needs an operator of somebody else's."""
    assert kinds(objects(render())) == PLAIN


@pytest.mark.parametrize(
    ("switch", "kind"),
    [
        ("tests.enabled=false", "Pod"),
        ("serviceAccount.create=false", "ServiceAccount"),
        ("podDisruptionBudget.enabled=false", "PodDisruptionBudget"),
        ("networkPolicy.enabled=false", "NetworkPolicy"),
    ],
)
def test_what_is_there_can_be_left_out(switch: str, kind: str) -> None:
    """One object less, and no other."""
    expected = PLAIN.copy()
    expected.remove(kind)
    assert kinds(objects(render("default", switch))) == expected


@pytest.mark.parametrize(
    ("switches", "kind"),
    [
        (
            ['metrics.serviceMonitor={"enabled":true}', 'networkPolicy.metricsFrom=[{"podSelector":{}}]'],
            "ServiceMonitor",
        ),
        (['metrics.prometheusRule={"enabled":true}'], "PrometheusRule"),
        (['metrics.dashboard={"enabled":true}'], "ConfigMap"),
        (['tls={"mode":"cert-manager","issuerRef":{"name":"i"}}'], "Certificate"),
        (['worker={"enabled":true}', "networkPolicy.enabled=false"], "DaemonSet"),
        (['backup={"enabled":true,"existingClaim":"b"}'], "CronJob"),
    ],
)
def test_what_is_not_there_can_be_had(switches: list[str], kind: str) -> None:
    """One object more, and no other."""
    expected = [*PLAIN, kind]
    if "networkPolicy.enabled=false" in switches:
        # A worker has a policy of its own.
        expected.remove("NetworkPolicy")
    assert kinds(objects(render("default", *switches))) == sorted(expected)


def test_a_worker_is_watched_where_that_is_asked_for() -> None:
    """By a port of that name, and as a job that the alerts know, however the release is called."""
    found = objects(render("node-local"))
    (endpoint,) = only(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    (container,) = pod_of(found["DaemonSet", "cache-ctxcache-worker"])["containers"]

    assert container["ports"] == [{"name": endpoint["port"], "containerPort": 7423}]
    assert "--metrics-listen=0.0.0.0:7423" in container["args"]
    (plain,) = pod_of(only(objects(render("default", 'worker={"enabled":true}')), "DaemonSet"))["containers"]
    assert "ports" not in plain
    assert not any(text.startswith("--metrics-listen") for text in plain["args"])
    (of_store,) = only(objects(render("watched")), "ServiceMonitor")["spec"]["endpoints"]
    for one in (endpoint, of_store):
        (relabeling,) = one["relabelings"]
        assert relabeling["targetLabel"] == "job"
        assert "ctxcache" in relabeling["replacement"]


def test_a_daemon_set_is_one_store_per_node() -> None:
    """No claims, no budget, no names of single stores; traffic stays on the node."""
    found = objects(render("node-local"))
    assert "StatefulSet" not in kinds(found)
    assert "PodDisruptionBudget" not in kinds(found)
    assert found["Service", "cache-ctxcache"]["spec"]["internalTrafficPolicy"] == "Local"
    assert "internalTrafficPolicy" not in found["Service", "cache-ctxcache-metrics"]["spec"]


def test_memory_is_the_arena_and_the_process() -> None:
    """Request and limit, so that no node promises what it does not have; huge pages are counted apart."""
    container = store_pod(objects(render()))["containers"][0]
    huge = store_pod(objects(render("node-local")))["containers"][0]

    assert (
        container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"] == "5120Mi"
    )
    assert huge["resources"]["limits"] == {"memory": "1024Mi", "hugepages-2Mi": "65536Mi"}


def test_an_arena_of_terabytes_is_spelt_out() -> None:
    """Not as a power of ten, which is no size: neither to the server nor to Kubernetes."""
    found = objects(render("default", 'store.arena={"sizeMiB":2097152}'))
    text = found["ConfigMap", "cache-ctxcache"]["data"]["ctxcache.toml"]
    huge = render("node-local", 'store.arena={"sizeMiB":2097152,"hugePages":true}')

    assert 'arena_size_bytes = "2097152MiB"' in text
    assert store_pod(objects(huge))["containers"][0]["resources"]["limits"]["hugepages-2Mi"] == "2097152Mi"


def test_helm_test_gets_through_to_metrics_that_few_may_read() -> None:
    """By labels of its own, which are nobody else's."""
    peer = 'networkPolicy.metricsFrom=[{"namespaceSelector":{"matchLabels":{"team":"watch"}}}]'
    found = objects(render("default", peer))
    (_, metrics) = only(found, "NetworkPolicy")["spec"]["ingress"]
    (asker,) = [one["podSelector"]["matchLabels"] for one in metrics["from"] if "podSelector" in one]
    labels = {kind: item["metadata"]["labels"] for (kind, _), item in found.items()}

    assert len(metrics["from"]) == 2
    assert asker.items() <= labels["Pod"].items()
    assert not asker.items() <= labels["StatefulSet"].items()
    without = only(objects(render("default", peer, "tests.enabled=false")), "NetworkPolicy")
    assert len(without["spec"]["ingress"][1]["from"]) == 1


def test_nobody_reads_metrics_who_was_not_named() -> None:
    """By default only `helm test`; without it nobody; a LoadBalancer has no port for them."""
    (_, metrics) = only(objects(render()), "NetworkPolicy")["spec"]["ingress"]
    untested = only(objects(render("default", "tests.enabled=false")), "NetworkPolicy")["spec"]["ingress"]
    exposed = objects(render("tls-secret"))

    assert [list(peer) for peer in metrics["from"]] == [["podSelector"]]
    assert [[port["port"] for port in rule["ports"]] for rule in untested] == [["grpc", "bulk"]]
    assert exposed["Service", "cache-ctxcache"]["spec"]["type"] == "LoadBalancer"
    for (kind, name), item in exposed.items():
        if kind == "Service":
            ports = {port["name"] for port in item["spec"]["ports"]}
            assert ("metrics" in ports) == (name == "cache-ctxcache-metrics")
    assert exposed["Service", "cache-ctxcache-metrics"]["spec"]["type"] == "ClusterIP"
    assert objects(render("platform"))["NetworkPolicy", "cache-ctxcache-worker"]["spec"]["ingress"] == []
    (of_workers,) = objects(render("kept"))["NetworkPolicy", "cache-ctxcache-worker"]["spec"]["ingress"]
    assert [port["port"] for port in of_workers["ports"]] == ["metrics"]


def test_stores_that_share_nothing_have_no_common_address() -> None:
    """Each has its own name, and where it is asked for an address outside of the cluster."""
    inside = objects(render("tls-cert-manager"))
    outside = objects(render("shards"))

    def services(found: dict[tuple[str, str], Any]) -> set[str]:
        return {name for kind, name in found if kind == "Service"}

    assert services(inside) == {"cache-ctxcache-stores", "cache-ctxcache-metrics"}
    assert services(outside) - services(inside) == {"cache-ctxcache-0", "cache-ctxcache-1"}
    for number in (0, 1):
        spec = outside["Service", f"cache-ctxcache-{number}"]["spec"]
        assert spec["selector"]["statefulset.kubernetes.io/pod-name"] == f"cache-ctxcache-{number}"
        assert spec["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    rows, *_ = outside["NetworkPolicy", "cache-ctxcache"]["spec"]["ingress"]
    assert {"ipBlock": {"cidr": "10.0.0.0/8"}} in rows["from"]
    asked = outside["Pod", "cache-ctxcache-test"]["spec"]["containers"][0]["args"][1:]
    assert asked == [f"cache-ctxcache-{number}.cache-ctxcache-stores" for number in (0, 1)]


def test_a_platform_that_assigns_users_is_let() -> None:
    """A key that is set to null is left out, in every pod; the rest stays."""
    found = objects(render("platform"))
    pods = [pod_of(item) for item in found.values() if pod_of(item)]

    assert len(pods) == 3
    for pod in pods:
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys()
        assert pod["securityContext"]["runAsNonRoot"]
    (main, _) = store_pod(found)["containers"]
    assert main["securityContext"]["seLinuxOptions"] == {"level": "s0:c26,c5"}
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("case", "switches", "paths"),
    [
        ("default", [], None),
        ("default", ['store={"shareWithNode":{"enabled":true}}'], ["/run/ctxcache"]),
        (
            "node-local",
            [],
            [
                "/var/lib/ctxcache",
                "/run/ctxcache",
                "/var/lib/ctxcache-ssd/nvme0",
                "/var/lib/ctxcache-ssd/nvme1",
            ],
        ),
        ("node-local", ["store.ownHostPaths=false"], None),
        # Such a platform assigns a user that nobody knows here.
        ("platform", ['store.shareWithNode={"enabled":true}', "store.ownHostPaths=true"], None),
    ],
)
def test_directories_of_the_node_become_the_stores(
    case: str, switches: list[str], paths: list[str] | None
) -> None:
    """By root with one capability, before the store starts; other containers of that sort come behind."""
    own = 'store.initContainers=[{"name":"own","image":"own"}]'
    containers = store_pod(objects(render(case, *switches, own)))["initContainers"]
    assert containers[-1]["name"] == "own"
    assert len(containers) == (1 if paths is None else 2)
    if paths is not None:
        first = containers[0]
        assert first["command"][:2] == ["chown", "10001:10001"]
        assert sorted(first["command"][2:]) == sorted(paths)
        assert sorted(mount["mountPath"] for mount in first["volumeMounts"]) == sorted(paths)
        assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}


def test_a_workers_directory_becomes_the_workers() -> None:
    """Unless it is root itself."""
    worker = pod_of(only(objects(render("default", 'worker={"enabled":true}')), "DaemonSet"))
    assert worker["initContainers"][0]["command"] == ["chown", "10001:10001", "/run/ctxcache-worker"]
    assert "initContainers" not in pod_of(objects(render("node-local"))["DaemonSet", "cache-ctxcache-worker"])


def test_claims_that_are_there_are_taken() -> None:
    """And none is made in their place."""
    found = objects(render("platform"))
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in store_pod(found)["volumes"]
        if "persistentVolumeClaim" in volume
    }

    assert claims == {"data": "store-data", "ssd-fast": "store-fast"}
    assert "volumeClaimTemplates" not in only(found, "StatefulSet")["spec"]


def test_metrics_are_asked_for_as_they_answer() -> None:
    """Server, probes and monitor agree on TLS and token, of stores and of workers."""
    found = objects(render("kept"))
    toml = found["ConfigMap", "cache-ctxcache"]["data"]["ctxcache.toml"]
    container = store_pod(found)["containers"][0]
    (of_store,) = only(found, "ServiceMonitor")["spec"]["endpoints"]
    (of_workers,) = only(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    (worker,) = pod_of(only(found, "DaemonSet"))["containers"]

    assert 'metrics_token_file = "/etc/ctxcache-metrics-token/token"' in toml
    assert 'metrics_tls_key = "/etc/ctxcache-metrics-tls/tls.key"' in toml
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    for endpoint in (of_store, of_workers):
        assert endpoint["scheme"] == "https"
        assert endpoint["authorization"]["credentials"] == {"name": "metrics-token", "key": "token"}
    assert of_store["tlsConfig"]["serverName"] == "cache.example.com"
    assert "--metrics-token-file=/etc/ctxcache-metrics-token/token" in worker["args"]
    by_own = objects(render("claims"))
    (endpoint,) = only(by_own, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["tlsConfig"]["serverName"] in only(by_own, "Certificate")["spec"]["dnsNames"]
    assert "authorization" not in endpoint


def test_alerts_lead_to_the_runbook_where_it_is_published() -> None:
    """Each to its own entry."""
    (group,) = only(objects(render("kept")), "PrometheusRule")["spec"]["groups"]
    for rule in group["rules"]:
        url = rule["annotations"]["runbook_url"]
        assert url == f"https://docs.example.com/runbook#{rule['alert'].lower()}"


def test_a_backup_is_of_every_store_and_shows_who_it_is() -> None:
    """By the name that the store's certificate has."""

    def container(case: str) -> Any:
        spec = only(objects(render(case)), "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        assert spec["restartPolicy"] == "Never"
        return spec["containers"][0]

    assert container("kept")["args"][2:] == ["cache-ctxcache.inference.svc:7420"]
    assert container("shards")["args"][2:] == [
        f"cache-ctxcache-{number}.cache-ctxcache-stores.inference.svc:7420" for number in (0, 1)
    ]
    assert {one["name"] for one in container("kept")["env"]} == {"CTXCACHE_TOKEN_FILE"}
    assert {one["name"] for one in container("claims")["env"]} == {
        "CTXCACHE_TLS_CA",
        "CTXCACHE_TLS_CLIENT_CERTIFICATE",
        "CTXCACHE_TLS_CLIENT_KEY",
    }


def test_a_start_has_the_time_that_it_is_given() -> None:
    """A rebuild of a large SSD tier is not ended, again and again, before it is done."""
    probe = store_pod(objects(render("default", "store.startSeconds=7200")))["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 7200


def test_the_arena_fits_its_volume() -> None:
    """The arena is allocated whole, its volume has room for it and a little more."""
    arena = named(store_pod(objects(render()))["volumes"], "arena")
    assert arena["emptyDir"] == {"medium": "Memory", "sizeLimit": "4160Mi"}


def test_the_end_has_the_time_that_it_needs() -> None:
    """Sleep, drain, flush and a margin, by the settings that are given or their defaults."""
    assert store_pod(objects(render()))["terminationGracePeriodSeconds"] == 5 + 30 + 120 + 15
    assert (
        store_pod(objects(render("tls-cert-manager")))["terminationGracePeriodSeconds"] == 5 + 60 + 300 + 15
    )


@pytest.mark.parametrize("case", ["default", "tls-cert-manager", "tls-secret", "watched"])
def test_pods_are_restricted(case: str) -> None:
    """Every pod keeps to the restricted level of pod security."""
    pods = [pod_of(item) for item in objects(render(case, "tests.enabled=true")).values() if pod_of(item)]
    assert len(pods) == 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert not pod["automountServiceAccountToken"]
        assert not any("hostPath" in volume for volume in pod.get("volumes", []))
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert "limits" in container["resources"]


def pod_of(item: Any) -> Any:
    """The pod's spec in an object; None where there is none."""
    if item["kind"] == "Pod":
        return item["spec"]
    return item["spec"]["template"]["spec"] if "template" in (item.get("spec") or {}) else None


def test_only_direct_storage_is_privileged() -> None:
    """A worker without it is restricted but for its host paths."""
    plain = only(objects(render("default", 'worker={"enabled":true}')), "DaemonSet")
    direct = objects(render("node-local"))["DaemonSet", "cache-ctxcache-worker"]

    assert pod_of(plain)["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod_of(direct)["containers"][0]["securityContext"] == {"privileged": True}


def test_probes_speak_tls_where_the_port_does() -> None:
    """The kubelet's gRPC probe does not: with TLS readiness is asked for by HTTP."""
    assert "grpc" in store_pod(objects(render()))["containers"][0]["readinessProbe"]
    assert "httpGet" in store_pod(objects(render("tls-secret")))["containers"][0]["readinessProbe"]


def test_clients_show_certificates_unless_told_otherwise() -> None:
    """MTLS is what one gets with TLS."""

    def toml(case: str) -> str:
        return str(only(objects(render(case)), "ConfigMap")["data"]["ctxcache.toml"])

    assert 'tls_client_ca = "/etc/ctxcache-tls/ca.crt"' in toml("tls-cert-manager")
    assert "tls_client_ca" not in toml("tls-secret")
    assert "insecure_listen = true" in toml("default")


def test_the_store_asks_nobody() -> None:
    """No way out, and in only for clients, workers and metrics."""
    policy = only(objects(render()), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    rows, metrics = policy["ingress"]
    assert [port["port"] for port in rows["ports"]] == ["grpc", "bulk"]
    assert [list(peer) for peer in rows["from"]] == [["podSelector"], ["podSelector"]]
    assert [port["port"] for port in metrics["ports"]] == ["metrics"]


def test_a_digest_wins_over_a_tag() -> None:
    """A pinned digest is the image that runs."""
    assert store_pod(objects(render("tls-cert-manager")))["containers"][0]["image"].startswith(
        "registry.example.com/ctxcache@sha256:aaaa"
    )
    assert (
        store_pod(objects(render("default", 'image.tag="1.2.3"')))["containers"][0]["image"]
        == "ctxcache:1.2.3"
    )


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["storee={}"], "storee"),
        (['store.settings={"max_leses":5}'], "max_leses"),
        (['store.settings={"dirty_limit":1.5}'], "dirty_limit"),
        (['store.settings={"listen":"x:1"}'], "listen"),
        (['store.kind="Deployment"'], "store.kind"),
        (["store.replicas=0"], "store.replicas"),
        (['image.digest="sha256:1"'], "image.digest"),
        (['tls={"mode":"secret"}'], "tls.secretName is needed where tls.mode is secret"),
        (['tls={"mode":"cert-manager"}'], "tls.issuerRef.name is needed"),
        (['store.ssd=[{"name":"a"}]'], "a has no size, which a StatefulSet needs"),
        (['store={"kind":"DaemonSet","ssd":[{"name":"a","size":"1Gi"}]}'], "a has no hostPath"),
        (["service.port=70000"], "service.port"),
        (["store.replicas=2"], "Set store.fleet.bucket: a fleet's sessions go on"),
        (["store.replicas=2"], "Or set store.clientsChooseTheirStore where each client"),
        (
            ["store.replicas=2", "store.clientsChooseTheirStore=true", 'store.data.existingClaim="x"'],
            "store.data.existingClaim is of one store",
        ),
        (
            ["store.replicas=2", "store.clientsChooseTheirStore=true", 'worker={"enabled":true}'],
            "worker.storeTarget is needed",
        ),
        (
            ['store={"kind":"DaemonSet","data":{"existingClaim":"x"}}'],
            "store.data.existingClaim is of a StatefulSet",
        ),
        (['service.type="LoadBalancer"'], "service.type LoadBalancer without TLS"),
        (['service.loadBalancerSourceRanges=["10.0.0.1"]'], "service.loadBalancerSourceRanges"),
        (["metrics.tls.enabled=true"], "metrics.tls needs a certificate"),
        (["metrics.serviceMonitor.enabled=true"], "networkPolicy.metricsFrom is needed with a monitor"),
        (['store.kind="DaemonSet"', "backup.enabled=true"], "backup is of a StatefulSet's stores"),
        (['backup.rateLimit="1; rm -rf /"'], "backup.rateLimit"),
        (["backup.keep=0"], "backup.keep"),
        (
            ['tls={"mode":"secret","secretName":"x"}', "backup.enabled=true"],
            "backup.tlsSecret is needed where the stores speak TLS",
        ),
        (
            ['metrics.podMonitor={"enabled":true}'],
            "metrics.podMonitor is of workers: it needs worker.enabled",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(sets: list[str], said: str) -> None:
    """At install, not at start."""
    with pytest.raises(RenderError, match=re.escape(said)):
        render("default", *sets)


def test_a_refusal_does_not_rest_on_the_schema() -> None:
    """It is said in a sentence where schemas are passed over."""
    skipped = ("--skip-schema-validation", "--set", "store.replicas=2")
    with pytest.raises(RenderError, match=r"Set store\.fleet\.bucket"):
        helm("template", "cache", str(CHART), *skipped)


def test_a_worker_image_is_asked_for_where_it_cannot_be_known() -> None:
    """A digest names one image, and the worker's is another."""
    with pytest.raises(RenderError, match=r"worker\.image is needed"):
        render("tls-cert-manager", 'worker={"enabled":true}')


def test_every_value_is_used() -> None:
    """A key of values.yaml that no template reads would be a promise."""
    text = "".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    keys = re.findall(r"^\| `([^`]+)` \|", (CHART / "README.md").read_text(), re.MULTILINE)
    unused = [
        key
        for key in keys
        if f".Values.{key}" not in text and f".Values.{key.rpartition('.')[0]} " not in text
    ]
    assert len(keys) > 50
    assert not unused


@pytest.mark.parametrize("case", ["default", "node-local"])
def test_notes_warn(case: str, tmp_path: Path) -> None:
    """Dangerous settings are told at install."""
    notes = notes_of(case, tmp_path)
    assert "WARNING: tls.mode is none" in notes
    assert ("host paths are used" in notes) == (case == "node-local")
    assert ("nothing is backed up" in notes) == (case == "default")
    assert ("nobody reads metrics" in notes) == (case == "default")
    assert "no public registry has" in notes


def notes_of(case: str, tmp_path: Path) -> str:
    """The notes that an installation of a case shows."""
    copy = tmp_path / "ctxcache"
    shutil.copytree(CHART, copy)
    # Only an installation shows notes, and that needs a cluster: so as an object.
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    (copy / "templates" / "notes.yaml").write_text(f"# NOTES\n{notes}# END\n".replace("\n", "\n# "))
    values = str(CHART.parents[1] / "tests" / "helm" / "cases" / f"{case}.yaml")
    return helm("template", "cache", str(copy), "--values", values, "--show-only", "templates/notes.yaml")


def test_notes_say_how_a_client_chooses(tmp_path: Path) -> None:
    """Every store by its name, and no address of all."""
    notes = notes_of("shards", tmp_path)
    for number in (0, 1):
        assert f"cache-ctxcache-{number}.cache-ctxcache-stores.default.svc:7420" in notes
    assert "They share nothing" in notes
    assert "Engines reach it at" not in notes


def test_a_worker_shows_the_store_who_it_is() -> None:
    """By certificate and token where these are asked for; on the node's socket it needs neither."""
    by_tls = objects(render("tenants"))["DaemonSet", "cache-ctxcache-worker"]
    by_socket = objects(render("node-local"))["DaemonSet", "cache-ctxcache-worker"]

    arguments = pod_of(by_tls)["containers"][0]["args"]
    assert "--store-ca=/etc/ctxcache-store/ca.crt" in arguments
    assert "--store-token-file=/etc/ctxcache-store-token/token" in arguments
    assert not any(text.startswith("--store-") for text in pod_of(by_socket)["containers"][0]["args"])
    with pytest.raises(RenderError, match=r"worker\.storeTlsSecret is needed"):
        render("tenants", 'worker.storeTlsSecret=""')


def test_whom_the_store_may_reach_is_given() -> None:
    """The collector of its traces, and nobody else."""
    (only_one,) = objects(render("tenants"))["NetworkPolicy", "cache-ctxcache"]["spec"]["egress"]
    assert only_one["ports"] == [{"port": 4317}]
