//! Where values come from: a flag beats an environment variable, which beats the file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::keys::{KEYS, find};
use routing::settings::Fault;

use super::{Config, Faults, fault};

/// The values of every key that was given, and of the `[policy.NAME]` and `[filter.NAME]` tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Values {
    given: BTreeMap<&'static str, Vec<String>>,
    pub(super) numbers: Vec<Number>,
}

/// One number of a policy, filter or affinity, `[kind.name] key = text`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Number {
    pub(super) kind: &'static str,
    pub(super) name: String,
    pub(super) key: String,
    pub(super) text: String,
}

impl Values {
    /// The values of `name`, its default if none was given.
    pub(super) fn all(&self, name: &str) -> Vec<String> {
        self.given.get(name).cloned().unwrap_or_else(|| {
            let default = find(name).map_or("", |key| key.default);
            default.split(' ').filter(|part| !part.is_empty()).map(str::to_owned).collect()
        })
    }

    /// The one value of `name`, if it has one.
    pub(super) fn one(&self, name: &str) -> Option<String> {
        self.all(name).pop()
    }
}

/// Everything that says what the configuration is; read again on SIGHUP.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// `--config`.
    pub file: Option<PathBuf>,
    /// Flags: key name and values.
    pub flags: Vec<(&'static str, Vec<String>)>,
    /// Flags that name no key.
    pub unknown_flags: Vec<String>,
    /// Environment variables that begin with `GRAPEVINE_`.
    pub environment: Vec<(String, String)>,
}

impl Sources {
    /// The process's own environment, with `file` and `flags`.
    pub fn of_process(file: Option<PathBuf>, flags: Vec<(&'static str, Vec<String>)>) -> Self {
        // What is no text is read with replacement characters: as a value of ours it is a fault like any other,
        // and the rest of the environment is none of our business.
        let text = |part: std::ffi::OsString| part.to_string_lossy().into_owned();
        let environment = std::env::vars_os()
            .map(|(name, value)| (text(name), text(value)))
            .filter(|(name, _)| name.starts_with("GRAPEVINE_"))
            .collect();
        Self { file, flags, unknown_flags: Vec::new(), environment }
    }
}

/// Reads all sources and checks what they say.
///
/// # Errors
/// With every fault at once.
pub fn read(sources: &Sources) -> Result<Config, Faults> {
    let mut faults = Vec::new();
    let mut values = Values::default();
    for flag in &sources.unknown_flags {
        faults.push(Fault {
            key: flag.clone(),
            value: "unknown flag".to_owned(),
            allowed: "a flag of the reference; see --help".to_owned(),
        });
    }
    let from_environment = sources.environment.iter().find(|(name, _)| name == "GRAPEVINE_CONFIG");
    let file = sources.file.clone().or_else(|| from_environment.map(|(_, value)| PathBuf::from(value)));
    if let Some(file) = file {
        read_file(&file, &mut values, &mut faults);
    }
    read_environment(&sources.environment, &mut values, &mut faults);
    for (name, given) in &sources.flags {
        values.given.insert(name, given.clone());
    }
    check_kinds(&values, &mut faults);
    let config = Config::from_values(&values, &mut faults);
    match config {
        Some(config) if faults.is_empty() => Ok(config),
        _ => Err(Faults(faults)),
    }
}

fn read_environment(environment: &[(String, String)], values: &mut Values, faults: &mut Vec<Fault>) {
    for (variable, value) in environment {
        if variable == "GRAPEVINE_CONFIG" {
            continue;
        }
        if is_service_link(variable) {
            continue;
        }
        let Some(key) = KEYS.iter().find(|key| key.variable() == *variable) else {
            let allowed = "a variable of the reference; unset it or correct its name";
            faults.push(fault(variable, value, allowed));
            continue;
        };
        let given = if key.many {
            value.split_whitespace().map(str::to_owned).collect()
        } else {
            vec![value.clone()]
        };
        values.given.insert(key.name, given);
    }
}

/// Kubernetes gives every container of a namespace that has a Service `grapevine` variables of these names.
fn is_service_link(variable: &str) -> bool {
    ["_SERVICE_HOST", "_SERVICE_PORT", "_PORT_"].iter().any(|part| variable.contains(part))
        || variable.ends_with("_PORT")
}

fn read_file(path: &Path, values: &mut Values, faults: &mut Vec<Fault>) {
    let shown = path.display().to_string();
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            return faults.push(fault("config", &shown, &format!("a file that can be read ({error})")));
        }
    };
    let table: toml::Table = match text.parse() {
        Ok(table) => table,
        Err(error) => {
            let why = error.to_string().trim().replace('\n', " ");
            return faults.push(fault("config", &shown, &format!("TOML ({why})")));
        }
    };
    for (raw, value) in table {
        let name = raw.replace('-', "_");
        match (name.as_str(), value) {
            ("policy", toml::Value::Table(table)) => read_tables("policy", table, values, faults),
            ("filter", toml::Value::Table(table)) => read_tables("filter", table, values, faults),
            ("affinity", toml::Value::Table(table)) => read_tables("affinity", table, values, faults),
            (_, value) => match find(&name) {
                None => {
                    faults.push(fault(&raw, &plain(&value).unwrap_or_default(), "a key of the reference"));
                }
                Some(key) => match strings(&value, key.many) {
                    Some(given) => drop(values.given.insert(key.name, given)),
                    None => faults.push(fault(&raw, &value.to_string(), &key.kind.allowed())),
                },
            },
        }
    }
}

/// `[policy]` with `name = "cost"`, and `[policy.cost]` with its numbers; the same for filters.
fn read_tables(kind: &'static str, table: toml::Table, values: &mut Values, faults: &mut Vec<Fault>) {
    for (name, value) in table {
        match value {
            toml::Value::Table(numbers) => {
                for (key, value) in numbers {
                    match plain(&value) {
                        Some(text) => values.numbers.push(Number { kind, name: name.clone(), key, text }),
                        None => faults.push(fault(
                            &format!("{kind}.{name}.{key}"),
                            &value.to_string(),
                            "a number, a word, true or false",
                        )),
                    }
                }
            }
            toml::Value::String(text) if name == "name" && kind != "filter" => {
                drop(values.given.insert(kind, vec![text]));
            }
            value => {
                let allowed = format!("a table [{kind}.NAME]");
                faults.push(fault(&format!("{kind}.{name}"), &value.to_string(), &allowed));
            }
        }
    }
}

/// A scalar as the text that a flag would have.
fn plain(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(switch) => Some(switch.to_string()),
        toml::Value::Datetime(_) | toml::Value::Array(_) | toml::Value::Table(_) => None,
    }
}

fn strings(value: &toml::Value, many: bool) -> Option<Vec<String>> {
    match value {
        toml::Value::Array(items) if many => items.iter().map(plain).collect(),
        value => plain(value).map(|text| vec![text]),
    }
}

fn check_kinds(values: &Values, faults: &mut Vec<Fault>) {
    for key in KEYS {
        let Some(given) = values.given.get(key.name) else { continue };
        for value in given.iter().filter(|value| !key.kind.admits(value)) {
            faults.push(fault(key.name, value, &key.kind.allowed()));
        }
    }
}
