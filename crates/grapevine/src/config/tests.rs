use std::io::Write as _;

use actors::ActorSettings;
use actors::lifecycle::LifecycleSettings;
use gateway::GatewaySettings;
use gossip::GossipConfig;
use routing::endpoint_filter::FilterName;
use routing::lifecycle::Limits;
use routing::liveness::LivenessConfig;
use routing::policy::PolicyName;

use super::*;

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn from_file(text: &str) -> Result<Config, Faults> {
    let file = file(text);
    read(&Sources { file: Some(file.path().to_owned()), ..Sources::default() })
}

fn from_flags(flags: &[(&'static str, &str)]) -> Result<Config, Faults> {
    let flags = flags.iter().map(|(key, value)| (*key, vec![(*value).to_owned()])).collect();
    read(&Sources { flags, ..Sources::default() })
}

/// A value that differs from the default, for every key.
fn other_value(key: &Key) -> String {
    match key.kind {
        Kind::Address => "127.0.0.1:4444".to_owned(),
        Kind::HostPort => "other:4444".to_owned(),
        Kind::Integer(min, max) => {
            if key.default == (min + 1).to_string() { max } else { min + 1 }.to_string()
        }
        Kind::Number(min, _) => (min + 0.25).to_string(),
        Kind::Choice(words) => (*words.last().unwrap()).to_owned(),
        Kind::Switch => if key.default == "true" { "false" } else { "true" }.to_owned(),
        Kind::Text(_) | Kind::Header => "other".to_owned(),
        Kind::LogFilter => "debug".to_owned(),
        Kind::File => concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").to_owned(),
        Kind::Endpoint => "http://other:4444,role=decode".to_owned(),
        Kind::Policy | Kind::LegPolicy => "round-robin".to_owned(),
        Kind::Filter => "kv-pressure".to_owned(),
        Kind::Affinity => "none".to_owned(),
    }
}

#[test]
fn engines_that_serve_nothing_but_pairs_are_not_to_be_configured_with_split_never() {
    let of = |split: &str, keys: &str| {
        from_file(&format!("split = {split:?}\nendpoint = [\"http://a:1,{keys}\", \"http://b:1\"]\n"))
    };
    let pairs = "role=decode,connector=sglang-bootstrap";
    let faults = of("never", pairs).unwrap_err().0;
    assert_eq!((faults.len(), faults[0].key.as_str(), faults[0].value.as_str()), (1, "split", "never"));
    assert!(faults[0].allowed.contains("http://a:1 (sglang-bootstrap)"), "{}", faults[0].allowed);
    for (split, keys) in [("auto", pairs), ("never", "role=decode"), ("never", "connector=sglang-bootstrap")]
    {
        assert!(of(split, keys).is_ok(), "{split} {keys}");
    }
}

#[test]
fn a_key_means_the_same_in_a_flag_a_variable_and_a_file() {
    for key in KEYS.iter().filter(|key| !matches!(key.kind, Kind::File)) {
        let value = other_value(key);
        let flag =
            from_flags(&[(key.name, &value)]).unwrap_or_else(|faults| panic!("{}: {faults}", key.name));
        let environment = vec![(key.variable(), value.clone())];
        let variable = read(&Sources { environment, ..Sources::default() }).unwrap();
        let quoted = if key.many { format!("[{value:?}]") } else { format!("{value:?}") };
        let file = from_file(&format!("{} = {quoted}\n", key.name)).unwrap();
        for other in [&variable, &file] {
            assert_eq!(flag.values, other.values, "{}", key.name);
        }
        assert_eq!(flag.values.all(key.name), [value.as_str()], "{}", key.name);
    }
}

#[test]
fn a_flag_beats_a_variable_which_beats_the_file() {
    let file = file("tries_max = 1\nidle_timeout_ms = 1\nconnect_timeout_ms = 1\n");
    let environment = vec![
        ("GRAPEVINE_TRIES_MAX".to_owned(), "2".to_owned()),
        ("GRAPEVINE_IDLE_TIMEOUT_MS".to_owned(), "2".to_owned()),
    ];
    let flags = vec![("tries_max", vec!["3".to_owned()])];
    let sources = Sources { file: Some(file.path().to_owned()), flags, environment, ..Sources::default() };
    let config = read(&sources).unwrap();
    assert_eq!(config.tries_max, 3);
    assert_eq!(config.idle_timeout, Duration::from_millis(2));
    assert_eq!(config.connect_timeout, Duration::from_millis(1));
}

#[test]
fn numbers_of_policies_and_filters_come_from_tables_or_behind_the_name() {
    let tables = "endpoint_filter = [\"queue-percentile\"]\n[policy]\nname = \"prefix-ring\"\n\
        [policy.prefix-ring]\nbound = 2\nhash = \"simhash\"\n[filter.queue-percentile]\npercentile = 0.5\n";
    let file = from_file(tables).unwrap();
    assert_eq!(file.core.policy, PolicyName::PrefixRing);
    assert_eq!(file.core.filters, [FilterName::QueuePercentile]);
    let flags = from_flags(&[
        ("policy", "prefix-ring,bound=2,hash=simhash"),
        ("endpoint_filter", "queue-percentile,percentile=0.5"),
    ])
    .unwrap();
    assert_eq!(file.core, flags.core);
    assert_ne!(file.core.policy_tables, Settings::default().policy_tables);
    assert_ne!(file.core.filter_tables, Settings::default().filter_tables);
}

#[test]
fn all_faults_are_reported_at_once_with_key_value_and_what_is_allowed() {
    let text = "listen = \"nowhere\"\ncolour = \"red\"\nendpoint = [\"http://a:1,role=boss\", \"ftp://b\"]\n\
        endpoint_filter = [\"sieve\"]\ntries_max = 99\n[policy]\nname = \"guess\"\n[policy.cost]\nspeed = 3\ntie_ms = \"x\"\n\
        [policy.moon]\nphase = 1\n";
    let faults = from_file(text).unwrap_err();
    let shown = faults.to_string();
    for part in [
        "listen",
        "nowhere",
        "colour",
        "`boss`; allowed: prefill, decode, both",
        "ftp://b",
        "sieve",
        "queue-percentile",
        "tries_max",
        "99",
        "1 to 8",
        "guess",
        "prefix-longest",
        "policy.cost.speed",
        "tie_ms",
        "policy.moon.phase",
    ] {
        assert!(shown.contains(part), "{part} is missing in: {shown}");
    }
    assert_eq!(faults.0.len(), 10, "{shown}");
}

#[test]
fn numbers_out_of_range_are_faults_though_each_can_be_read() {
    let shown = from_flags(&[("policy", "cost,tie_ms=-1")]).unwrap_err().to_string();
    assert!(shown.contains("policy.cost.tie_ms") && shown.contains("-1"), "{shown}");
}

#[test]
fn broken_files_variables_and_flags_are_named() {
    assert!(from_file("listen = ").unwrap_err().to_string().contains("TOML"));
    let missing = Sources { file: Some("/nonexistent/g.toml".into()), ..Sources::default() };
    assert!(read(&missing).unwrap_err().to_string().contains("/nonexistent/g.toml"));
    let environment = vec![("GRAPEVINE_LISEN".to_owned(), "x".to_owned())];
    let shown = read(&Sources { environment, ..Sources::default() }).unwrap_err().to_string();
    assert!(shown.contains("GRAPEVINE_LISEN"), "{shown}");
    let unknown_flags = vec!["--colour".to_owned()];
    let shown = read(&Sources { unknown_flags, ..Sources::default() }).unwrap_err().to_string();
    assert!(shown.contains("--colour"), "{shown}");
}

#[test]
fn what_only_a_start_would_stumble_over_is_found_before_it() {
    let not_a_key = file("not a key");
    let path = not_a_key.path().display().to_string();
    for (key, value) in [
        ("cluster_key_file", path.as_str()),
        ("log", "grapevine=loud"),
        ("session_header", "not a header"),
        ("seed", "somewhere:65535"),
        ("ledger_every_ms", "30000"),
        ("tries_max", "9"),
    ] {
        let faults = from_flags(&[(key, value)]).unwrap_err();
        assert_eq!(faults.0.iter().map(|fault| fault.key.as_str()).collect::<Vec<_>>(), [key], "{value}");
    }
    let long = "é".repeat(40);
    assert_eq!(from_flags(&[("replica_id", &long)]).unwrap_err().0[0].key, "replica_id");
    assert_eq!(from_flags(&[("gossip", "0.0.0.0:7946")]).unwrap_err().0[0].key, "advertise");
    assert_eq!(from_flags(&[("advertise", "[::]:7946")]).unwrap_err().0[0].key, "advertise");
    assert!(from_flags(&[("gossip", "0.0.0.0:7946"), ("advertise", "replica-1:7946")]).is_ok());
}

#[test]
fn what_kubernetes_puts_into_the_environment_is_not_a_fault() {
    let environment = [
        "GRAPEVINE_SERVICE_HOST",
        "GRAPEVINE_PORT",
        "GRAPEVINE_PORT_8080_TCP",
        "GRAPEVINE_SERVICE_PORT_HTTP",
    ]
    .map(|name| (name.to_owned(), "tcp://10.0.0.1:8080".to_owned()));
    assert!(read(&Sources { environment: environment.to_vec(), ..Sources::default() }).is_ok());
}

#[test]
fn the_same_endpoint_twice_is_a_fault() {
    let text = "endpoint = [\"http://a:1\", \"http://A:1/\"]\n";
    assert!(from_file(text).unwrap_err().to_string().contains("each endpoint once"));
}

#[test]
fn only_live_keys_can_be_changed_without_a_restart() {
    let before = from_file("listen = \"127.0.0.1:1\"\n").unwrap();
    let live = from_file("listen = \"127.0.0.1:1\"\npolicy = \"random\"\n").unwrap();
    assert!(before.fixed_changes(&live).is_empty());
    let fixed = from_file("listen = \"127.0.0.1:2\"\n").unwrap();
    assert_eq!(before.fixed_changes(&fixed)[0].key, "listen");
}

#[test]
fn without_a_word_each_part_gets_the_defaults_that_it_documents() {
    let config = read(&Sources::default()).unwrap();
    assert_eq!(config.core, Settings::default());
    let limits = Limits {
        connect: config.connect_timeout,
        first_byte: config.first_byte_timeout,
        quiet: config.quiet,
        idle: config.idle_timeout,
        total: config.total_timeout,
        total_whole: config.total_timeout_whole,
        ..Limits::default()
    };
    assert_eq!(limits, Limits::default());
    let lifecycle = LifecycleSettings::default();
    assert_eq!((config.tries_max, config.resume), (lifecycle.tries_max, lifecycle.resume));
    let actors = ActorSettings::default();
    assert_eq!(
        (config.scrape_every, config.probe_timeout, config.session_actors_max, config.dead_after),
        (actors.scrape_every, actors.probe_timeout, actors.session_actors_max, actors.dead_after)
    );
    assert_eq!(config.dead_after, LivenessConfig::default().silence_max);
    let gateway = GatewaySettings::default();
    assert_eq!(config.body_bytes_max as u64, gateway.body_bytes_max);
    assert_eq!(
        (config.body_room_bytes, config.body_timeout),
        (gateway.body_room_bytes, gateway.body_timeout)
    );
    assert_eq!(config.resume_bytes_max, gateway.resume_bytes_max);
    assert_eq!(config.explain_headers, gateway.explain_headers);
    assert_eq!(config.connect_timeout, gateway.upstream.connect);
    let gossip = GossipConfig::new(config.replica.clone(), config.gossip);
    assert_eq!(
        (config.pulse_every, config.ledger_every, config.push_every, config.snapshot_wait),
        (gossip.pulse_every, gossip.ledger_every, gossip.push_every, gossip.snapshot_wait)
    );
    assert_eq!(config.cluster_id, gossip.cluster_id);
}

#[test]
fn a_number_that_is_unset_is_in_the_reference_too() {
    assert!(numbers().contains(&("policy.prefix-ring.bound".to_owned(), None)));
}

#[test]
fn the_reference_is_what_the_code_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.md");
    let written = std::fs::read_to_string(path).unwrap_or_default();
    let is_new = |line: &&str| !written.lines().any(|old| old == *line);
    let reference = reference();
    let new: Vec<&str> = reference.lines().filter(is_new).collect();
    assert!(written == reference, "run `grapevine check --reference > docs/config.md`; new lines: {new:#?}");
}
