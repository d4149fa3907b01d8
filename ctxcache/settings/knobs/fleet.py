"""Knobs of a store that is one of several, on as many hosts."""

from ctxcache.settings.knobs.knob import Knob, KnobKind, Section

FLEET = Section(
    "Fleet",
    "A store on every host: a conversation goes on wherever it lands.",
    (
        Knob(
            name="fleet_bucket",
            kind=KnobKind.URL,
            default="",
            help="Bucket in which hosts agree who continues a session, s3://BUCKET/PREFIX; empty for none.",
            more=(
                "Also gs://, az:// and, for stores of one machine, file:///DIRECTORY. Credentials and"
                " endpoint come from the service's own variables, as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL."
                " A bucket that does not honour conditions is refused. Needs `pip install"
                " 'ctxcache[fleet]'`. See fleet.md."
            ),
            advice="one bucket in the cluster's own region for all stores of a fleet",
            watch="ctxcache_fleet_head_reads_total",
        ),
        Knob(
            name="fleet_secret_file",
            kind=KnobKind.FILE,
            help="File of the secret that all stores of the fleet share: 16 bytes or more.",
            more="Names in the bucket are digests under it, and what others write there is refused.",
            advice="`openssl rand -hex 32`, one for each fleet",
        ),
        Knob(
            name="fleet_address",
            kind=KnobKind.ADDRESS,
            default="",
            shown="the first of `listen`",
            help="Where other stores of the fleet reach this one.",
            more="Their certificates are verified by `tls_client_ca`, and ours is shown to them.",
            advice="the pod's or host's own address, never a service that may choose another store",
        ),
        Knob(
            name="fleet_server_name",
            kind=KnobKind.NAME,
            default="",
            shown="the host of each one's address",
            help="Name that every store's certificate has, where it does not have its address.",
            more="Pods have addresses that no certificate can know: stores of a fleet share a name then.",
            advice="a name that only the fleet's stores have certificates of",
        ),
        Knob(
            name="fleet_token_file",
            kind=KnobKind.FILE,
            help="Token of the role `peer` that this store shows to others that have `token_hashes`.",
            advice="none where certificates say who a store is",
        ),
        Knob(
            name="fleet_patience_s",
            kind=KnobKind.SECONDS,
            default=0.5,
            help="How long the bucket may take to say who continues a session: its user waits.",
            more="A bucket that takes longer counts as silent for that session, which is then computed.",
            advice="0.5; less where a prompt is computed sooner than that",
            watch="ctxcache_fleet_no_answers_total",
            least=0.01,
            most=300,
        ),
        Knob(
            name="fleet_beat_s",
            kind=KnobKind.SECONDS,
            default=10.0,
            help="How often this store says where it is, and hears what was taken over from it.",
            more="After three beats without an answer the bucket is asked before each session is used.",
            advice="10",
            least=0.2,
            most=300,
        ),
        Knob(
            name="fleet_share",
            kind=KnobKind.WORD,
            default="asked",
            help="Which sessions' rows the bucket has, to outlive their host: `asked`, `worth` or `all`.",
            more=(
                "`asked`: what is committed as `DURABILITY_SHARED`. `all`: every session, a second after each"
                " turn; its rows cross the network once and are kept until it expires. `worth`: of these"
                " the ones whose return is expected to save more, at `engine_cents_per_hour`, than the bucket"
                " costs."
            ),
            advice="`all` where a lost host's prefill costs more than requests and storage: docs/fleet.md",
            watch="ctxcache_fleet_shared_bytes_total",
            choices=("asked", "all", "worth"),
        ),
        Knob(
            name="fleet_share_bytes_per_s",
            kind=KnobKind.SIZE,
            default=0,
            unit="bytes/s",
            help="Most bytes a second that are put into the bucket; 0 for as many as it takes.",
            advice="what the network has beside the engines' own traffic",
            watch="ctxcache_fleet_unshared_sessions",
            least=0,
            most=10**12,
        ),
        Knob(
            name="fleet_prefixes",
            kind=KnobKind.SWITCH,
            default=True,
            help="Whether the bucket knows which host has a prefix of 1,024 tokens, of 2,048, and so on.",
            more=(
                "A prompt of 2,048 tokens or more, of which less than a quarter is here, is looked for there,"
                " and comes from that host where that is sooner than to compute it."
            ),
            advice="false where every request names its session, or a router says which host has its prompt",
            watch="ctxcache_fleet_borrowed_tokens_total",
        ),
    ),
)
