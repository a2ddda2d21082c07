//! The list of keys: one entry is a flag, an environment variable and a TOML key at once.

use std::net::SocketAddr;

use routing::affinity::AffinityName;
use routing::endpoint_filter::FilterName;
use routing::policy::PolicyName;
use routing::request::TARGET_MS_MAX;
use routing::retry::TRIES_MAX;
use routing::settings::{QUEUE_REQUESTS_MAX, TARGET_MS_MIN};
use tracing_subscriber::EnvFilter;

/// What a key's value can be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// `IP:PORT` to bind; port 0 picks a free one.
    Address,
    /// `HOST:PORT` to reach, where the port after it belongs to it too.
    HostPort,
    /// A whole number.
    Integer(u64, u64),
    /// A number.
    Number(f64, f64),
    /// One of these words.
    Choice(&'static [&'static str]),
    /// `true` or `false`; the bare flag means `true`.
    Switch,
    /// A text of 1 to this many bytes.
    Text(usize),
    /// The name of a header.
    Header,
    /// What is logged, as [`tracing_subscriber::EnvFilter`] reads it.
    LogFilter,
    /// A file that can be read.
    File,
    /// An endpoint, `URL[,key=value]...`; read by [`routing::endpoint::EndpointSpec::parse`].
    Endpoint,
    /// `NAME[,key=value]...` of a policy.
    Policy,
    /// The same of one that chooses a single endpoint.
    LegPolicy,
    /// `NAME[,key=value]...` of an endpoint filter.
    Filter,
    /// `NAME[,key=value]...` of an affinity.
    Affinity,
}

impl Kind {
    /// What is allowed, in words.
    pub fn allowed(self) -> String {
        match self {
            Self::Address => "IP:PORT, such as 127.0.0.1:8080 or [::]:8080".to_owned(),
            Self::HostPort => "HOST:PORT with a port from 1 to 65534".to_owned(),
            Self::Integer(min, max) => format!("a whole number from {min} to {max}"),
            Self::Number(min, max) => format!("a number from {min} to {max}"),
            Self::Choice(words) => words.join(", "),
            Self::Switch => "true, false".to_owned(),
            Self::Text(max) => format!("1 to {max} bytes of text"),
            Self::Header => "the name of a header".to_owned(),
            Self::LogFilter => {
                "LEVEL or TARGET=LEVEL with commas between; levels: off, error, warn, info, debug, trace"
                    .to_owned()
            }
            Self::File => "a file that can be read".to_owned(),
            Self::Endpoint => {
                "URL[,role=R][,model=M][,group=G][,zone=Z][,connector=C][,bootstrap=A][,dp=N]".to_owned()
            }
            Self::Policy => {
                format!("{}, each with [,key=value]...", names(PolicyName::ALL, PolicyName::as_str))
            }
            Self::LegPolicy => {
                let apart: Vec<PolicyName> =
                    PolicyName::ALL.iter().copied().filter(|policy| !policy.is_joint()).collect();
                format!("{}, each with [,key=value]...", names(&apart, PolicyName::as_str))
            }
            Self::Filter => {
                format!("{}, each with [,key=value]...", names(FilterName::ALL, FilterName::as_str))
            }
            Self::Affinity => {
                format!("{}, each with [,key=value]...", names(AffinityName::ALL, AffinityName::as_str))
            }
        }
    }

    /// Whether `value` will do, as far as it can be told from the value alone.
    pub fn admits(self, value: &str) -> bool {
        match self {
            Self::Address => value.parse::<SocketAddr>().is_ok(),
            Self::HostPort => value.rsplit_once(':').is_some_and(|(host, port)| {
                !host.is_empty() && port.parse::<u16>().is_ok_and(|port| (1..u16::MAX).contains(&port))
            }),
            Self::Integer(min, max) => value.parse::<u64>().is_ok_and(|n| (min..=max).contains(&n)),
            Self::Number(min, max) => value.parse::<f64>().is_ok_and(|n| (min..=max).contains(&n)),
            Self::Choice(words) => words.contains(&value),
            Self::Switch => matches!(value, "true" | "false"),
            Self::Text(max) => (1..=max).contains(&value.len()) && !value.contains(char::is_control),
            Self::Header => value.parse::<hyper::header::HeaderName>().is_ok(),
            Self::LogFilter => EnvFilter::builder().parse(value).is_ok() && !value.is_empty(),
            Self::File => std::fs::File::open(value).is_ok(),
            Self::Endpoint | Self::Policy | Self::LegPolicy | Self::Filter | Self::Affinity => {
                !value.is_empty()
            }
        }
    }
}

/// The names with commas between them.
fn names<T: Copy>(all: &[T], name: fn(T) -> &'static str) -> String {
    all.iter().map(|each| name(*each)).collect::<Vec<_>>().join(", ")
}

/// One key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The TOML key; with dashes it is the flag, in capitals after `GRAPEVINE_` the environment variable.
    pub name: &'static str,
    /// What its value can be.
    pub kind: Kind,
    /// Whether it can be given several times (a list in TOML, commas in the environment become blanks).
    pub many: bool,
    /// The value when nothing is given; empty for none.
    pub default: &'static str,
    /// Whether SIGHUP can change it.
    pub reload: bool,
    /// One line of help.
    pub help: &'static str,
}

impl Key {
    /// The flag, without its dashes.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }

    /// The environment variable.
    pub fn variable(&self) -> String {
        format!("GRAPEVINE_{}", self.name.to_ascii_uppercase())
    }
}

const fn key(name: &'static str, kind: Kind, default: &'static str, help: &'static str) -> Key {
    Key { name, kind, many: false, default, reload: false, help }
}

const fn many(mut key: Key) -> Key {
    key.many = true;
    key
}

const fn live(mut key: Key) -> Key {
    key.reload = true;
    key
}

use Kind::{
    Address, Affinity, Choice, Endpoint, File, Filter, Header, HostPort, Integer, LegPolicy, LogFilter,
    Number, Policy, Switch, Text,
};

/// A day in ms: the most that any time limit can be.
const DAY_MS: u64 = 86_400_000;

/// What a class can expect of a token, in ms.
const TARGET: Kind = Number(TARGET_MS_MIN, TARGET_MS_MAX);

/// Every key of `serve`, in the order of the reference.
pub const KEYS: &[Key] = &[
    key("listen", Address, "127.0.0.1:8080", "public listener: OpenAI routes, /livez, /readyz"),
    key(
        "admin",
        Address,
        "127.0.0.1:9090",
        "admin listener: metrics, cluster, endpoints, explain, dashboard",
    ),
    key("gossip", Address, "127.0.0.1:7946", "gossip port P: UDP P, UDP P+1 and TCP P are used"),
    key("advertise", HostPort, "", "how other replicas reach the gossip port; default: the gossip address"),
    many(key("seed", HostPort, "", "gossip address of another replica; DNS names are asked again for ever")),
    key(
        "replica_id",
        Text(64),
        "",
        "this replica's name, unique in the cluster; default: made from host, port and time",
    ),
    key("cluster_id", Text(64), "grapevine", "replicas of another cluster id are not listened to"),
    many(key(
        "cluster_key_file",
        File,
        "",
        "file with a cluster key, the newest first, two at most: gossip is sealed with it",
    )),
    many(live(key("endpoint", Endpoint, "", "an engine"))),
    live(key("policy", Policy, "cost", "how an endpoint is chosen")),
    live(key(
        "split",
        Choice(&["auto", "always", "never"]),
        "auto",
        "where endpoints have roles: when one computes a request's prompt and another decodes; auto: when it pays",
    )),
    live(key(
        "prefill_policy",
        LegPolicy,
        "",
        "where endpoints have roles: how the one that prefills is chosen; default: as `policy` says",
    )),
    live(key(
        "decode_policy",
        LegPolicy,
        "",
        "where endpoints have roles: how the one that decodes, or serves whole, is chosen; default: as `policy` says",
    )),
    many(live(key(
        "endpoint_filter",
        Filter,
        "",
        "narrows the candidates before the choice, in the given order",
    ))),
    live(key(
        "affinity",
        Affinity,
        "",
        "preference put before the policy's own pick; default: the policy's own",
    )),
    many(live(key(
        "session_header",
        Header,
        "x-session-id x-user-id",
        "request headers that name a session, the first present counts",
    ))),
    live(key(
        "session_from_user",
        Switch,
        "false",
        "whether the body's `user` names a session when nothing else does",
    )),
    live(key(
        "admin_token_file",
        File,
        "",
        "file with the token that the admin listener asks for (Authorization: Bearer)",
    )),
    key("workers", Integer(1, 256), "", "threads that serve requests; default: the number of cores"),
    live(key(
        "explain_headers",
        Switch,
        "false",
        "reply headers x-grapevine-replica, -endpoint, -prefill-endpoint, -decision",
    )),
    key("log", LogFilter, "info", "log filter, such as info or grapevine=debug,routing=debug"),
    key("log_format", Choice(&["text", "json"]), "text", "log lines for people or for machines"),
    live(key(
        "body_bytes_max",
        Integer(1_024, 4_294_967_296),
        "67108864",
        "largest request body; larger gets 413",
    )),
    live(key(
        "body_room_bytes",
        Integer(1_024, 1 << 44),
        "1073741824",
        "what the bodies of all requests may take together; what does not fit gets 503",
    )),
    live(key(
        "body_timeout_ms",
        Integer(1, DAY_MS),
        "300000",
        "limit for a request's body to arrive; 408 beyond it",
    )),
    key("connect_timeout_ms", Integer(1, 600_000), "2000", "limit for a connection to an engine"),
    live(key(
        "first_byte_timeout_ms",
        Integer(1, DAY_MS),
        "60000",
        "limit for a stream's first byte, shared by all tries",
    )),
    live(key(
        "prefill_timeout_ms",
        Integer(1, DAY_MS),
        "20000",
        "limit for the prefill leg of a split request; then another prefill endpoint, or none, is tried",
    )),
    live(key(
        "handoff_timeout_ms",
        Integer(1, DAY_MS),
        "20000",
        "limit from the prefill leg's end to the first byte of a split stream; then another decode endpoint is tried",
    )),
    live(key(
        "idle_timeout_ms",
        Integer(1, DAY_MS),
        "60000",
        "limit for silence between two chunks of a stream",
    )),
    live(key(
        "quiet_ms",
        Integer(10, DAY_MS),
        "1000",
        "silence within a stream after which its engine's health is looked at (at the least: 20 tokens of its pace, if they take longer); an engine that does not answer is left",
    )),
    live(key(
        "resume",
        Switch,
        "true",
        "whether a stream whose engine dies, freezes or aborts goes on at another one, where that is exact to the client; else it ends in an error event",
    )),
    live(key(
        "resume_bytes_max",
        Integer(1_024, 1 << 32),
        "2097152",
        "what is kept of one stream for that, its request and what the client has of the answer; a longer one ends in an error event if it breaks",
    )),
    live(key("total_timeout_ms", Integer(1, DAY_MS), "3600000", "limit for a whole stream")),
    live(key("total_timeout_whole_ms", Integer(1, DAY_MS), "600000", "limit for a reply in one piece")),
    live(key(
        "tries_max",
        Integer(1, TRIES_MAX as u64),
        "3",
        "endpoints that one request may be sent to before its first byte",
    )),
    live(key(
        "running_max",
        Integer(0, 1_000_000),
        "0",
        "requests that may run at one endpoint through all replicas; 0: how much it can take is learned",
    )),
    live(key(
        "queue_requests_max",
        Integer(0, QUEUE_REQUESTS_MAX),
        "1024",
        "requests that may wait when every endpoint is busy, beyond which 429; 0: none waits, all are sent but for those beyond running_max",
    )),
    live(key(
        "queue_bytes_max",
        Integer(0, 1 << 40),
        "268435456",
        "bytes of the bodies of those that wait; beyond it 429",
    )),
    live(key("queue_wait_ms_max", Integer(1, DAY_MS), "10000", "how long a request may wait; then 429")),
    key("index_bytes_max", Integer(1 << 20, 1 << 40), "268435456", "memory of the prefix index"),
    live(key("session_table_max", Integer(16, 100_000_000), "100000", "sessions remembered")),
    key("session_actors_max", Integer(0, 1_000_000), "10000", "sessions with an actor of their own"),
    key(
        "scrape_every_ms",
        Integer(20, 60_000),
        "250",
        "period in which the scrape's owner reads an engine's /metrics",
    ),
    key(
        "probe_every_ms",
        Integer(20, 600_000),
        "2000",
        "period in which each replica probes an engine's health",
    ),
    key("probe_timeout_ms", Integer(1, 600_000), "1000", "limit for a probe or scrape"),
    live(key(
        "prefill_us_per_token",
        Number(1.0, 1e6),
        "250",
        "assumed prefill time of an unknown engine, us per token",
    )),
    live(key("itl_ms", Number(0.01, 1e4), "12", "assumed time between tokens of an unknown engine, ms")),
    live(key(
        "bytes_per_token",
        Number(0.5, 64.0),
        "4",
        "assumed prompt bytes per token until an engine's usage says better",
    )),
    live(key(
        "priority_1_ttft_ms",
        TARGET,
        "1000",
        "first token that requests of priority 1 (high) expect, ms",
    )),
    live(key("priority_1_tpot_ms", TARGET, "50", "time between tokens that they expect, ms")),
    live(key(
        "priority_2_ttft_ms",
        TARGET,
        "2000",
        "first token that requests of priority 2 (and of none) expect, ms",
    )),
    live(key("priority_2_tpot_ms", TARGET, "50", "time between tokens that they expect, ms")),
    live(key(
        "priority_3_ttft_ms",
        TARGET,
        "3000",
        "first token that requests of priority 3 (low) expect, ms",
    )),
    live(key("priority_3_tpot_ms", TARGET, "100", "time between tokens that they expect, ms")),
    key("pulse_every_ms", Integer(20, 10_000), "100", "gossip period of load and membership"),
    key("ledger_every_ms", Integer(20, 10_000), "200", "gossip period of placements"),
    key(
        "push_every_ms",
        Integer(1, 1_000),
        "2",
        "time between two direct pushes of changed facts to the live replicas on average; after a pause a few go out at once",
    ),
    key(
        "dead_after_ms",
        Integer(200, 60_000),
        "1500",
        "silence after which a replica's load no longer counts",
    ),
    key("snapshot_wait_ms", Integer(0, 600_000), "5000", "longest wait for a snapshot before saying ready"),
    live(key(
        "drain_settle_ms",
        Integer(0, 600_000),
        "2000",
        "after SIGTERM: not ready, but still accepting, for this long",
    )),
    live(key("drain_deadline_ms", Integer(0, DAY_MS), "60000", "after SIGTERM: streams may run this long")),
];

/// The key called `name`.
pub(super) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}
