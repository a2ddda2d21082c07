//! The part of the configuration that belongs to the core: policy, filters, affinity and their numbers.

use std::str::FromStr;

use routing::affinity::AffinityName;
use routing::endpoint_filter::{FilterName, FilterTables};
use routing::policy::{PolicyName, PolicyTables};
use routing::settings::{Fault, Settings};
use serde::de::DeserializeOwned;

use super::sources::{Number, Values};
use super::{Checked, fault};

/// Reads the core's settings; what is wrong is added to `faults`.
pub(super) fn settings(values: &Values, checked: &Checked<'_>, faults: &mut Vec<Fault>) -> Settings {
    let mut settings = Settings::default();
    let mut numbers = values.numbers.clone();
    if let Some(policy) = named::<PolicyName>("policy", values.one("policy"), &mut numbers, faults) {
        settings.policy = policy;
    }
    let mut leg =
        |key, faults: &mut Vec<Fault>| named::<PolicyName>(key, values.one(key), &mut numbers, faults);
    settings.prefill_policy = leg("prefill_policy", faults);
    settings.decode_policy = leg("decode_policy", faults);
    if let Some(split) = checked.get("split") {
        settings.split = split;
    }
    settings.affinity = named::<AffinityName>("affinity", values.one("affinity"), &mut numbers, faults);
    for text in values.all("endpoint_filter") {
        settings.filters.extend(named::<FilterName>("endpoint_filter", Some(text), &mut numbers, faults));
    }
    settings.policy_tables = tables::<PolicyTables, PolicyName>("policy", &numbers, faults);
    settings.filter_tables = tables::<FilterTables, FilterName>("filter", &numbers, faults);
    for number in numbers.iter().filter(|number| number.kind == "affinity") {
        let key = format!("affinity.{}.{}", number.name, number.key);
        faults.push(fault(&key, &number.text, "no numbers; affinities take theirs from [policy.NAME]"));
    }
    if let Some(us) = checked.get("prefill_us_per_token") {
        settings.speed.prefill_us_per_token = us;
    }
    if let Some(ms) = checked.get::<f32>("itl_ms") {
        settings.speed.itl_us = ms * 1_000.0;
    }
    if let Some(every) = checked.millis("probe_every_ms") {
        settings.breaker.probe_every = every;
    }
    if let Some(limit) = checked.millis("probe_timeout_ms") {
        settings.breaker.probe_timeout = limit;
    }
    if let Some(bytes) = checked.get("bytes_per_token") {
        settings.rules.bytes_per_token = bytes;
    }
    if let Some(switch) = checked.get("session_from_user") {
        settings.rules.session_from_user = switch;
    }
    let targets = &mut settings.rules.targets;
    for (slo, ttft, tpot) in [
        (&mut targets.high, "priority_1_ttft_ms", "priority_1_tpot_ms"),
        (&mut targets.normal, "priority_2_ttft_ms", "priority_2_tpot_ms"),
        (&mut targets.low, "priority_3_ttft_ms", "priority_3_tpot_ms"),
    ] {
        slo.ttft_ms = checked.get(ttft).unwrap_or(slo.ttft_ms);
        slo.tpot_ms = checked.get(tpot).unwrap_or(slo.tpot_ms);
    }
    settings.rules.session_headers =
        values.all("session_header").iter().map(|name| name.to_ascii_lowercase()).collect();
    let admission = &mut settings.admission;
    admission.running_max = checked.get("running_max").unwrap_or(admission.running_max);
    admission.queue_requests_max = checked.get("queue_requests_max").unwrap_or(admission.queue_requests_max);
    admission.queue_bytes_max = checked.get("queue_bytes_max").unwrap_or(admission.queue_bytes_max);
    admission.queue_wait_max = checked.millis("queue_wait_ms_max").unwrap_or(admission.queue_wait_max);
    if let Some(bytes) = checked.get("index_bytes_max") {
        settings.index_bytes_max = bytes;
    }
    if let Some(sessions) = checked.get("session_table_max") {
        settings.session_table_max = sessions;
    }
    // The numbers of policies and filters have their ranges in the core; a number that could not be read has its
    // default there. What the core says of anything else would repeat faults that have been found by now.
    let (of_tables, others): (Vec<_>, Vec<_>) = settings
        .faults()
        .into_iter()
        .partition(|fault| fault.key.starts_with("policy.") || fault.key.starts_with("filter."));
    if faults.is_empty() {
        faults.extend(others);
    }
    faults.extend(of_tables);
    settings
}

/// Splits `NAME[,key=value]...`: the numbers go to their table.
fn named<T: FromStr + Copy + AsName>(
    key: &'static str,
    text: Option<String>,
    numbers: &mut Vec<Number>,
    faults: &mut Vec<Fault>,
) -> Option<T> {
    let text = text?;
    let mut parts = text.split(',').map(str::trim);
    let name = parts.next().unwrap_or_default();
    let kind = match key {
        "endpoint_filter" => "filter",
        "prefill_policy" | "decode_policy" => "policy",
        _ => key,
    };
    for part in parts {
        match part.split_once('=') {
            Some((number, value)) => numbers.push(Number {
                kind,
                name: name.to_owned(),
                key: number.trim().to_owned(),
                text: value.trim().to_owned(),
            }),
            None => faults.push(fault(key, &text, "NAME[,key=value]...")),
        }
    }
    let parsed = name.parse().ok();
    if parsed.is_none() {
        faults.push(fault(key, name, &T::all()));
    }
    parsed
}

/// Names that can list themselves.
trait AsName: Sized + 'static {
    fn all() -> String;
}

macro_rules! as_name {
    ($($name:ident),+) => {$(
        impl AsName for $name {
            fn all() -> String {
                Self::ALL.iter().map(|each| each.as_str()).collect::<Vec<_>>().join(", ")
            }
        }
    )+};
}
as_name!(PolicyName, FilterName, AffinityName);

/// Reads the tables of one kind, number by number, so that every fault is found and not only the first.
fn tables<T: DeserializeOwned + Default, N: FromStr + AsName>(
    kind: &'static str,
    numbers: &[Number],
    faults: &mut Vec<Fault>,
) -> T {
    let mut whole = toml::Table::new();
    for number in numbers.iter().filter(|number| number.kind == kind) {
        let full = format!("{kind}.{}.{}", number.name, number.key);
        if number.name.parse::<N>().is_err() {
            faults.push(fault(&full, &number.text, &format!("a table of {}", N::all())));
            continue;
        }
        let one = toml::Table::from_iter([(number.key.clone(), value(&number.text))]);
        let alone = toml::Table::from_iter([(number.name.clone(), toml::Value::Table(one.clone()))]);
        match alone.try_into::<T>() {
            Ok(_) => {
                let entry = whole
                    .entry(number.name.clone())
                    .or_insert_with(|| toml::Value::Table(toml::Table::new()));
                if let toml::Value::Table(entry) = entry {
                    entry.extend(one);
                }
            }
            Err(error) => faults.push(fault(&full, &number.text, error.message())),
        }
    }
    whole.try_into().unwrap_or_default()
}

/// The value that a text stands for.
fn value(text: &str) -> toml::Value {
    if let Ok(number) = text.parse::<i64>() {
        toml::Value::Integer(number)
    } else if let Ok(number) = text.parse::<f64>() {
        toml::Value::Float(number)
    } else if let Ok(switch) = text.parse::<bool>() {
        toml::Value::Boolean(switch)
    } else {
        toml::Value::String(text.to_owned())
    }
}
