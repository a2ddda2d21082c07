//! What an operator says of an endpoint: `URL[,role=prefill][,model=M]...`.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::EndpointId;

/// The most data-parallel ranks that one `dp=` may name.
const DP_RANKS_MAX: u16 = 1_024;

/// The connector of endpoints that name none: what the engines named most often use.
pub const CONNECTOR_DEFAULT: &str = "vllm-nixl";

/// The connector whose prefill and decode engines serve nothing but pairs.
const CONNECTOR_OF_PAIRS: &str = "sglang-bootstrap";

/// Which phases of a request an endpoint serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prompts only: its KV is handed to a decode endpoint.
    Prefill,
    /// Output tokens, from KV that a prefill endpoint made (or from its own prefill when aggregated).
    Decode,
    /// Both, on one engine.
    #[default]
    Both,
}

impl Role {
    /// The name in flags, JSON and labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One addressable engine: a process, or one data-parallel rank of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointSpec {
    /// `scheme://host:port[/base]`, lower-cased host, port explicit, no trailing slash.
    pub url: String,
    /// The rank that `X-data-parallel-rank` names, if the engine has several.
    pub rank: Option<u16>,
    /// Which phases it serves.
    pub role: Role,
    /// The models it is said to serve; empty: ask it.
    pub models: Vec<String>,
    /// The role set it belongs to.
    pub group: Option<String>,
    /// Where it stands.
    pub zone: Option<String>,
    /// How its KV is handed over, if that is said.
    pub connector: Option<String>,
    /// The bootstrap address of an SGLang prefill server.
    pub bootstrap: Option<String>,
}

/// Why a text does not name an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SpecError {
    /// The URL can't be used.
    #[error("endpoint URL `{value}`: {why}; allowed: http://HOST[:PORT][/BASE]")]
    Url {
        /// What was given.
        value: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A key that no endpoint has.
    #[error("endpoint key `{key}`: unknown; allowed: role, model, group, zone, connector, bootstrap, dp")]
    Key {
        /// What was given.
        key: String,
    },
    /// A key with a value it can't have.
    #[error("endpoint key `{key}`: value `{value}`; allowed: {allowed}")]
    Value {
        /// Which key.
        key: &'static str,
        /// What was given.
        value: String,
        /// What would do.
        allowed: &'static str,
    },
}

impl EndpointSpec {
    /// An endpoint at `url` that serves both phases of whatever model it says it has.
    ///
    /// # Errors
    /// When the URL can't be used.
    pub fn at(url: &str) -> Result<Self, SpecError> {
        Ok(Self {
            url: normalise(url)?,
            rank: None,
            role: Role::Both,
            models: Vec::new(),
            group: None,
            zone: None,
            connector: None,
            bootstrap: None,
        })
    }

    /// Reads `URL[,key=value]...`; `dp=N` gives N endpoints, one a rank, else there is one.
    ///
    /// # Errors
    /// On the first part that can't be read, naming it and what is allowed.
    pub fn parse(text: &str) -> Result<Vec<Self>, SpecError> {
        let mut parts = text.split(',').map(str::trim);
        let mut spec = Self::at(parts.next().unwrap_or_default())?;
        let mut ranks = None;
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            match key {
                "role" => spec.role = parse_role(value)?,
                "model" => spec.models.push(given("model", value)?),
                "group" => spec.group = Some(given("group", value)?),
                "zone" => spec.zone = Some(given("zone", value)?),
                "connector" => spec.connector = Some(parse_connector(value)?),
                "bootstrap" => spec.bootstrap = Some(given("bootstrap", value)?),
                "dp" => ranks = Some(parse_ranks(value)?),
                _ => return Err(SpecError::Key { key: key.to_owned() }),
            }
        }
        Ok(match ranks {
            None => vec![spec],
            Some(ranks) => (0..ranks).map(|rank| Self { rank: Some(rank), ..spec.clone() }).collect(),
        })
    }

    /// Its id, the same on every replica.
    pub fn id(&self) -> EndpointId {
        EndpointId::of(&self.url, self.rank)
    }

    /// How its KV is handed over: as configured, else [`CONNECTOR_DEFAULT`].
    pub fn connector(&self) -> &str {
        self.connector.as_deref().unwrap_or(CONNECTOR_DEFAULT)
    }

    /// Whether it can answer a request that is not split. The two sides of SGLang's exchange can not: each refuses
    /// what does not name the room in which it meets the other.
    pub fn serves_whole(&self) -> bool {
        self.role == Role::Both || self.connector() != CONNECTOR_OF_PAIRS
    }

    /// Whether the KV that it makes can go to `decode`: by the same connector, and within its group if it
    /// has one.
    pub fn hands_over_to(&self, decode: &Self) -> bool {
        self.connector() == decode.connector() && (self.group.is_none() || self.group == decode.group)
    }

    /// The URL with `#rank` where there is one: how people tell endpoints apart.
    pub fn label(&self) -> String {
        self.rank.map_or_else(|| self.url.clone(), |rank| format!("{}#{rank}", self.url))
    }
}

fn given(key: &'static str, value: &str) -> Result<String, SpecError> {
    if value.is_empty() || value.len() > 256 {
        return Err(SpecError::Value { key, value: value.to_owned(), allowed: "1 to 256 characters" });
    }
    Ok(value.to_owned())
}

fn parse_role(value: &str) -> Result<Role, SpecError> {
    match value {
        "prefill" => Ok(Role::Prefill),
        "decode" => Ok(Role::Decode),
        "both" => Ok(Role::Both),
        _ => Err(SpecError::Value { key: "role", value: value.to_owned(), allowed: "prefill, decode, both" }),
    }
}

fn parse_connector(value: &str) -> Result<String, SpecError> {
    match value {
        "vllm-nixl" | "sglang-bootstrap" | "none" => Ok(value.to_owned()),
        _ => Err(SpecError::Value {
            key: "connector",
            value: value.to_owned(),
            allowed: "vllm-nixl, sglang-bootstrap, none",
        }),
    }
}

fn parse_ranks(value: &str) -> Result<u16, SpecError> {
    match value.parse() {
        Ok(ranks) if (1..=DP_RANKS_MAX).contains(&ranks) => Ok(ranks),
        _ => Err(SpecError::Value { key: "dp", value: value.to_owned(), allowed: "1 to 1024" }),
    }
}

/// Brings a URL to the one form that ids are made of.
fn normalise(url: &str) -> Result<String, SpecError> {
    let fault = |why| SpecError::Url { value: url.chars().take(200).collect(), why };
    let rest = url.strip_prefix("http://").ok_or_else(|| fault("must begin with http://"))?;
    let (authority, base) = rest.split_once('/').map_or((rest, ""), |(authority, base)| (authority, base));
    if authority.contains('@') {
        return Err(fault("must not carry a user or password"));
    }
    if url.len() > 1_024
        || base.contains(['?', '#'])
        || url.contains(|c: char| c.is_whitespace() || c.is_control())
    {
        return Err(fault("must be at most 1,024 characters, without blanks, query or fragment"));
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port),
        _ => (authority, "80"),
    };
    let port: u16 =
        port.parse().ok().filter(|port| *port != 0).ok_or_else(|| fault("port must be 1 to 65535"))?;
    let bracketed = host.starts_with('[') && host.ends_with(']');
    if host.is_empty() || (host.contains(':') && !bracketed) {
        return Err(fault("must name a host"));
    }
    let base = base.trim_end_matches('/');
    let slash = if base.is_empty() { "" } else { "/" };
    Ok(format!("http://{}:{port}{slash}{base}", host.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, want: Result<&str, &str>) {
        match (EndpointSpec::parse(text), want) {
            (Ok(specs), Ok(label)) => assert_eq!(specs[0].label(), label, "{text}"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{text}: {error}"),
            (got, want) => panic!("{text}: got {got:?}, want {want:?}"),
        }
    }

    #[test]
    fn urls_that_mean_the_same_read_the_same() {
        check("http://Host:8000/", Ok("http://host:8000"));
        check("http://host", Ok("http://host:80"));
        check("http://[::1]:8000", Ok("http://[::1]:8000"));
        check("http://[::1]", Ok("http://[::1]:80"));
        check("http://h:1/base//", Ok("http://h:1/base"));
    }

    #[test]
    fn each_fault_names_the_key_the_value_and_what_is_allowed() {
        check("h:1", Err("must begin with http://"));
        check("http://h:0", Err("port"));
        check("http://h:99999", Err("port"));
        check("http://u:p@h:1", Err("password"));
        check("http://h:1,role=boss", Err("`role`: value `boss`; allowed: prefill, decode, both"));
        check("http://h:1,colour=red", Err("`colour`: unknown; allowed: role, model"));
        check("http://h:1,dp=0", Err("1 to 1024"));
        check("http://h:1,model=", Err("`model`"));
        check("", Err("http://"));
    }

    #[test]
    fn ranks_of_one_engine_are_endpoints_of_their_own() {
        let specs = EndpointSpec::parse("http://h:1,role=decode,model=m,dp=3").unwrap();
        assert_eq!(specs.len(), 3);
        assert_eq!(specs[2].label(), "http://h:1#2");
        assert_eq!(specs[2].role, Role::Decode);
        assert_ne!(specs[0].id(), specs[1].id());
    }
}
