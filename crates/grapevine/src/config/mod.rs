//! What an operator asks for: flags, environment and a TOML file, read into one checked [`Config`].
//!
//! The main choice: [`KEYS`] lists every key once, with its help, its default and what it allows. The flag,
//! the environment variable, the TOML key, `--help`, the reference in `docs/config.md` and every error message
//! come from that list, so none of them can say something else. All faults are collected and reported
//! together, each with its key, its value and what is allowed.

mod core;
mod keys;
mod reference;
mod sources;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use gossip::ClusterKey;
use routing::ReplicaId;
use routing::endpoint::EndpointSpec;
use routing::policy::SplitMode;
use routing::settings::{Fault, Settings};

pub use keys::{KEYS, Key, Kind};
pub use reference::{numbers, reference};
use sources::Values;
pub use sources::{Sources, read};

/// How much of a faulty value is shown.
const SHOWN_MAX: usize = 120;

/// Every fault of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0.len();
        write!(f, "the configuration has {n} {}", if n == 1 { "fault" } else { "faults" })?;
        self.0.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

impl std::error::Error for Faults {}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Everything about one replica, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Public listener.
    pub listen: SocketAddr,
    /// Admin listener.
    pub admin: SocketAddr,
    /// Gossip port.
    pub gossip: SocketAddr,
    /// How others reach the gossip port, `HOST:PORT`; none: as it is bound.
    pub advertise: Option<String>,
    /// Gossip addresses of others.
    pub seeds: Vec<String>,
    /// The replica's name.
    pub replica: ReplicaId,
    /// Which cluster it belongs to.
    pub cluster_id: String,
    /// The cluster keys, the newest first.
    pub cluster_keys: Vec<ClusterKey>,
    /// The engines.
    pub endpoints: Vec<EndpointSpec>,
    /// The core's settings: policy, filters, limits of its maps, how requests are read.
    pub core: Settings,
    /// What the admin listener asks for.
    pub admin_token: Option<String>,
    /// Threads that serve requests.
    pub workers: usize,
    /// Whether replies say how they were routed.
    pub explain_headers: bool,
    /// Log filter.
    pub log: String,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// What the bodies of all requests may take together, in bytes.
    pub body_room_bytes: u64,
    /// Limit for a request's body to arrive.
    pub body_timeout: Duration,
    /// Limit for a connection to an engine.
    pub connect_timeout: Duration,
    /// Limit for a stream's first byte.
    pub first_byte_timeout: Duration,
    /// For the prefill leg of a split request.
    pub prefill_timeout: Duration,
    /// From the handoff to the first byte of a stream.
    pub handoff_timeout: Duration,
    /// Limit for silence within a stream.
    pub idle_timeout: Duration,
    /// Silence within a stream after which its engine is looked at.
    pub quiet: Duration,
    /// Whether streams that break go on elsewhere.
    pub resume: bool,
    /// What is kept of one stream for that, in bytes.
    pub resume_bytes_max: u64,
    /// Limit for a whole stream.
    pub total_timeout: Duration,
    /// Limit for a reply in one piece.
    pub total_timeout_whole: Duration,
    /// Endpoints that one request may be sent to.
    pub tries_max: u32,
    /// Sessions with an actor of their own.
    pub session_actors_max: usize,
    /// Period of scrapes.
    pub scrape_every: Duration,
    /// Limit for a probe or scrape.
    pub probe_timeout: Duration,
    /// Gossip period of load and membership.
    pub pulse_every: Duration,
    /// Gossip period of placements.
    pub ledger_every: Duration,
    /// Shortest time between two pushes.
    pub push_every: Duration,
    /// Silence after which a replica is dead.
    pub dead_after: Duration,
    /// Longest wait for a snapshot.
    pub snapshot_wait: Duration,
    /// Time between "not ready" and the end of accepting.
    pub drain_settle: Duration,
    /// Longest time that streams may run after SIGTERM.
    pub drain_deadline: Duration,
    values: Values,
}

impl Config {
    /// Builds the configuration of `values`, whose kinds have been checked; further faults are added.
    fn from_values(values: &Values, faults: &mut Vec<Fault>) -> Option<Self> {
        let checked = Checked(values);
        let core = core::settings(values, &checked, faults);
        let endpoints = endpoints(values, faults);
        never_split(&core, &endpoints, faults);
        let admin_token = match values.one("admin_token_file") {
            Some(file) => secret("admin_token_file", &file, faults),
            None => None,
        };
        let cluster_keys = cluster_keys(values, faults);
        unreachable_gossip(values, &checked, faults);
        shared_addresses(&checked, faults);
        let listen: SocketAddr = checked.get("listen")?;
        let replica = values.one("replica_id").unwrap_or_else(|| made_up_name(listen));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Some(Self {
            listen,
            admin: checked.get("admin")?,
            gossip: checked.get("gossip")?,
            advertise: values.one("advertise"),
            seeds: values.all("seed"),
            replica: ReplicaId::new(&replica),
            cluster_id: values.one("cluster_id")?,
            cluster_keys,
            endpoints,
            core,
            admin_token,
            workers: checked.get("workers").unwrap_or(cores),
            explain_headers: checked.get("explain_headers")?,
            log: values.one("log")?,
            log_format: if values.one("log_format")? == "json" { LogFormat::Json } else { LogFormat::Text },
            body_bytes_max: checked.get("body_bytes_max")?,
            body_room_bytes: checked.get("body_room_bytes")?,
            body_timeout: checked.millis("body_timeout_ms")?,
            connect_timeout: checked.millis("connect_timeout_ms")?,
            first_byte_timeout: checked.millis("first_byte_timeout_ms")?,
            prefill_timeout: checked.millis("prefill_timeout_ms")?,
            handoff_timeout: checked.millis("handoff_timeout_ms")?,
            idle_timeout: checked.millis("idle_timeout_ms")?,
            quiet: checked.millis("quiet_ms")?,
            resume: checked.get("resume")?,
            resume_bytes_max: checked.get("resume_bytes_max")?,
            total_timeout: checked.millis("total_timeout_ms")?,
            total_timeout_whole: checked.millis("total_timeout_whole_ms")?,
            tries_max: checked.get("tries_max")?,
            session_actors_max: checked.get("session_actors_max")?,
            scrape_every: checked.millis("scrape_every_ms")?,
            probe_timeout: checked.millis("probe_timeout_ms")?,
            pulse_every: checked.millis("pulse_every_ms")?,
            ledger_every: checked.millis("ledger_every_ms")?,
            push_every: checked.millis("push_every_ms")?,
            dead_after: checked.millis("dead_after_ms")?,
            snapshot_wait: checked.millis("snapshot_wait_ms")?,
            drain_settle: checked.millis("drain_settle_ms")?,
            drain_deadline: checked.millis("drain_deadline_ms")?,
            values: values.clone(),
        })
    }

    /// What `newer` would change that only a restart can change.
    pub fn fixed_changes(&self, newer: &Self) -> Vec<Fault> {
        let fixed = KEYS.iter().filter(|key| !key.reload);
        let changed = fixed.filter(|key| self.values.all(key.name) != newer.values.all(key.name));
        changed
            .map(|key| {
                let running = self.values.all(key.name).join(" ");
                fault(
                    key.name,
                    &newer.values.all(key.name).join(" "),
                    &format!("`{running}` until a restart"),
                )
            })
            .collect()
    }
}

/// Values whose kinds have been checked: what still can't be read has its fault reported already.
struct Checked<'a>(&'a Values);

impl Checked<'_> {
    fn get<T: FromStr>(&self, name: &str) -> Option<T> {
        self.0.one(name)?.parse().ok()
    }

    fn millis(&self, name: &str) -> Option<Duration> {
        self.get(name).map(Duration::from_millis)
    }
}

fn endpoints(values: &Values, faults: &mut Vec<Fault>) -> Vec<EndpointSpec> {
    let mut specs: Vec<EndpointSpec> = Vec::new();
    for text in values.all("endpoint") {
        match EndpointSpec::parse(&text) {
            Ok(parsed) => {
                for spec in parsed {
                    if specs.iter().any(|other| other.id() == spec.id()) {
                        faults.push(fault("endpoint", &text, "each endpoint once"));
                    } else {
                        specs.push(spec);
                    }
                }
            }
            Err(error) => faults.push(fault("endpoint", &text, &error.to_string())),
        }
    }
    specs
}

/// Engines that serve nothing but pairs are of no use where nothing is split.
fn never_split(core: &Settings, endpoints: &[EndpointSpec], faults: &mut Vec<Fault>) {
    let mut splits_only = endpoints.iter().filter(|spec| !spec.serves_whole());
    if let Some(spec) = splits_only.next().filter(|_| core.split == SplitMode::Never) {
        let allowed = format!("auto or always, for {} ({}) serves nothing whole", spec.url, spec.connector());
        faults.push(fault("split", SplitMode::Never.as_str(), &allowed));
    }
}

/// The most keys at once: one seals, a second is accepted while keys change.
const CLUSTER_KEYS_MAX: usize = 2;

fn cluster_keys(values: &Values, faults: &mut Vec<Fault>) -> Vec<ClusterKey> {
    let files = values.all("cluster_key_file");
    if files.len() > CLUSTER_KEYS_MAX {
        faults.push(fault("cluster_key_file", &format!("{} files", files.len()), "at most two"));
    }
    let mut keys = Vec::new();
    for file in &files {
        // A file that can't be read has been reported by its kind.
        let Ok(text) = std::fs::read_to_string(file) else { continue };
        match ClusterKey::parse(&text) {
            Some(key) => keys.push(key),
            None => faults.push(fault("cluster_key_file", file, "a file with 32 bytes in hex or base64")),
        }
    }
    keys
}

/// Others must be told of an address that means this machine and no other.
fn unreachable_gossip(values: &Values, checked: &Checked<'_>, faults: &mut Vec<Fault>) {
    let advertised = values.one("advertise").map(|text| (text.parse::<SocketAddr>().ok(), text));
    let (address, shown) = match advertised {
        Some((address, text)) => (address, text),
        None => (checked.get::<SocketAddr>("gossip"), values.one("gossip").unwrap_or_default()),
    };
    if address.is_some_and(|address| address.ip().is_unspecified()) {
        let allowed = "an address that other replicas can reach, where `gossip` is every address of the host";
        faults.push(fault("advertise", &shown, allowed));
    }
}

/// Three listeners on TCP need three addresses, and gossip the port behind its own as well.
fn shared_addresses(checked: &Checked<'_>, faults: &mut Vec<Fault>) {
    let address = |key| checked.get::<SocketAddr>(key);
    let (listen, admin, gossip) = (address("listen"), address("admin"), address("gossip"));
    // Port 0 stands for any free one.
    let clash = |one: Option<SocketAddr>, other| one.is_some_and(|one| one.port() != 0) && one == other;
    for (key, own, others) in [("admin", admin, [listen, None]), ("gossip", gossip, [listen, admin])] {
        if let Some(own) = own
            && others.into_iter().any(|other| clash(other, Some(own)))
        {
            faults.push(fault(key, &own.to_string(), "an address of its own"));
        }
    }
    if let Some(gossip) = gossip.filter(|gossip| gossip.port() == u16::MAX) {
        faults.push(fault(
            "gossip",
            &gossip.to_string(),
            "a port below 65535: the one behind it is used too",
        ));
    }
}

fn secret(key: &'static str, file: &str, faults: &mut Vec<Fault>) -> Option<String> {
    // A file that can't be read has been reported by its kind.
    let text = std::fs::read_to_string(file).ok()?;
    let token = text.trim();
    if token.is_empty() || token.len() > 1_024 || !token.is_ascii() {
        faults.push(fault(key, file, "a file with one line of 1 to 1,024 ASCII characters"));
        return None;
    }
    Some(token.to_owned())
}

/// A name that two replicas hardly share: host, port and the time of the start.
fn made_up_name(listen: SocketAddr) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host: String = host.trim().chars().filter(char::is_ascii_graphic).take(32).collect();
    let host = if host.is_empty() { "replica".to_owned() } else { host };
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{host}-{}-{:x}", listen.port(), since.as_micros())
}

fn fault(key: &str, value: &str, allowed: &str) -> Fault {
    let shown: String = value.chars().take(SHOWN_MAX).collect();
    Fault { key: key.to_owned(), value: shown, allowed: allowed.to_owned() }
}
