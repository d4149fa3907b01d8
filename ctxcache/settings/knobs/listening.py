"""Knobs of who may come in, and by which door."""

from ctxcache.settings.knobs.knob import Knob, KnobKind, Section

LISTENING = Section(
    "Listening",
    "Where the server listens, and to whom.",
    (
        Knob(
            name="listen",
            kind=KnobKind.ADDRESS,
            default="127.0.0.1:7420",
            help="TCP address; port 0 takes a free one; empty for none.",
            advice="loopback, or with TLS the address of the network that the engines are in",
        ),
        Knob(
            name="unix_socket",
            kind=KnobKind.PATH,
            default="auto",
            help="Unix socket; `auto` is in the data directory; empty for none.",
            more=(
                "`auto` is `ctxcache.sock`, left out with a warning where its path would be longer than 100"
                " bytes."
            ),
            advice="auto; empty where every caller comes by TCP",
        ),
        Knob(
            name="control_socket",
            kind=KnobKind.PATH,
            default="auto",
            help="Socket of local clients; `auto` is `control.sock` in the data directory; empty for none.",
            more="Left out as above where its path would be too long.",
            advice="auto; a path of its own where a pod mounts the socket's directory",
        ),
        Knob(
            name="tls_certificate",
            kind=KnobKind.FILE,
            help="Certificate of the TCP ports with its chain, PEM; none: no TLS.",
            advice="set wherever the address is not loopback",
        ),
        Knob(
            name="tls_key",
            kind=KnobKind.FILE,
            help="Its key, PEM.",
            advice="a file that only the server's user may read",
        ),
        Knob(
            name="tls_client_ca",
            kind=KnobKind.FILE,
            help="Authorities of clients' certificates, PEM: then every client on TCP needs one.",
            advice="set wherever more than one party reaches the port",
        ),
        Knob(
            name="identities",
            kind=KnobKind.IDENTITIES,
            default=(),
            shown="none",
            help=(
                "Whom a certificate or a user is let in as; `:operator`, `:shared-memory` and"
                " `:write-in-place` at the end give more."
            ),
            more=(
                "SUBJECT is `spiffe://…`, `dns:…`, `cn:…` or `uid:…`; `*` is one part of it, `$1` in TENANT"
                " the first such part. Tables in the file: `[[identities]]` with `subject`, `tenant`, `role`,"
                " `shared_memory`, `write_in_place`. The first that fits decides. Without any, and without"
                " `token_hashes`, everybody is tenant `default` and an operator."
            ),
            advice=(
                "set, or `token_hashes`, wherever callers shall not have each other's sessions; see"
                " operations.md, Security"
            ),
        ),
        Knob(
            name="token_hashes",
            kind=KnobKind.FILE,
            help="Hashes of tokens and whom each is let in as, as `ctxcache token new` writes it.",
            more="Read again when it changes, looked at every second, and at SIGHUP.",
            advice="a file that only the server's user may write",
        ),
        Knob(
            name="insecure_listen",
            kind=KnobKind.SWITCH,
            default=False,
            help="Listen off loopback without TLS: whoever reaches the port may do everything.",
            advice="false; true only behind a network policy of your own",
        ),
        Knob(
            name="bulk_listen",
            kind=KnobKind.ADDRESS,
            default="auto",
            help="Bulk channel; `auto` is a free port beside the TCP address; empty for none.",
            more=(
                "For rows of clients elsewhere; beside a Unix socket there is one more with `.bulk` at its"
                " end."
            ),
            advice="name a port where a firewall has to know it",
        ),
        Knob(
            name="metrics_listen",
            kind=KnobKind.ADDRESS,
            default="auto",
            help="Metrics and health by HTTP; `auto` is loopback, the TCP port plus one; empty for none.",
            more=(
                "`auto` takes a free port where the TCP port is 0, and none, with a warning, where it is"
                " taken."
            ),
            advice="an address that Prometheus reaches, where the network in front of it is yours",
            watch="ctxcache_scrape_seconds",
        ),
        Knob(
            name="metrics_tls_certificate",
            kind=KnobKind.FILE,
            help="Certificate of the metrics' port with its chain, PEM; none: no TLS there.",
            more=(
                "Taken over when it is renewed. It may be the one of `tls_certificate`; scrapers show none of"
                " their own."
            ),
            advice="set, with a token, wherever the metrics' address is not loopback",
        ),
        Knob(
            name="metrics_tls_key",
            kind=KnobKind.FILE,
            help="Its key, PEM.",
            advice="a file that only the server's user may read",
        ),
        Knob(
            name="metrics_token_file",
            kind=KnobKind.FILE,
            help=(
                "Token that whoever reads metrics shows, as a bearer or as a password; none: nobody is asked."
            ),
            more=(
                "One word of 16 characters or more; read again when it changes. `/healthz` and `/readyz` ask"
                " nobody."
            ),
            advice="set where others than the scraper reach the port; with TLS, or it can be read on its way",
        ),
        Knob(
            name="status_names",
            kind=KnobKind.WORD,
            default="auto",
            help="Whether the status page, which asks nobody who they are, names sessions and engines.",
            more=(
                "`auto`: where the metrics' address is loopback and callers are not told apart, so that"
                " whoever sees the page could list them anyway."
            ),
            advice="auto; `on` where only operators reach the metrics' address",
            choices=("auto", "on", "off"),
        ),
        Knob(
            name="max_concurrent_rpcs",
            kind=KnobKind.COUNT,
            default=256,
            unit="rpcs",
            help="Small calls at a time; more are refused with a retry delay.",
            watch="ctxcache_refused_rpcs_total",
            least=1,
            advice="the default; more where calls are refused and the machine has CPU to spare",
        ),
        Knob(
            name="max_concurrent_streams",
            kind=KnobKind.COUNT,
            default=32,
            unit="streams",
            help="Appends and reads of rows at a time; more are refused with a retry delay.",
            more="Over gRPC and the bulk channel together.",
            watch="ctxcache_refused_rpcs_total",
            least=1,
            advice="the default; more where streams are refused and the disks are not busy",
        ),
        Knob(
            name="stall_timeout_s",
            kind=KnobKind.SECONDS,
            default=30,
            help="How long a reader over gRPC may take nothing of what waits for it before it is cut off.",
            above=0,
            most=86400,
            advice="the default; more where readers are paused by their host",
            watch="ctxcache_rpc_seconds",
        ),
        Knob(
            name="max_local_clients",
            kind=KnobKind.COUNT,
            default=256,
            unit="clients",
            help="Clients that map the arena at a time; more are refused with a retry delay.",
            watch="ctxcache_refused_rpcs_total",
            least=1,
            advice="at least twice the engines and workers of the host",
        ),
        Knob(
            name="keepalive_s",
            kind=KnobKind.SECONDS,
            default=20,
            help="Silence after which a client over gRPC is pinged.",
            more="One that does not answer for half as long again is given up, and what it held ends.",
            advice="less than any idle timeout of what is between client and server",
            least=1,
            most=3600,
            watch="ctxcache_connections",
        ),
        Knob(
            name="max_connections",
            kind=KnobKind.COUNT,
            default=1024,
            unit="connections",
            help="Connections to each gRPC address at a time; one more is closed at once.",
            more=(
                "Less where the limit of descriptors (raised to the hard limit at start) leaves less beside"
                " 512 for storage."
            ),
            watch="ctxcache_connections",
            least=1,
            advice="the default; less where descriptors are scarce",
        ),
        Knob(
            name="max_connections_per_host",
            kind=KnobKind.COUNT,
            default=256,
            unit="connections",
            help="Of those, how many one host may have over TCP; the newest of more are ended.",
            more="Looked at twice a second.",
            advice="as many as all clients need that come by one address, a proxy's or a node's",
            watch="ctxcache_ended_connections_total",
            least=1,
        ),
        Knob(
            name="max_bulk_connections",
            kind=KnobKind.COUNT,
            default=64,
            unit="connections",
            help=(
                "Connections to the bulk channel at a time, a thread each; one more is closed and uses gRPC."
            ),
            watch="ctxcache_bulk_connections",
            least=1,
            most=1024,
            advice="at least the clients on other hosts",
        ),
    ),
)
