use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

fn key(n: u64) -> SessionKey {
    SessionKey::of("x-session-id", &n.to_le_bytes())
}

fn endpoint(n: u64) -> EndpointId {
    EndpointId::from_raw(n)
}

fn at(ms: u64) -> Moment {
    Moment::from_millis(ms)
}

#[test]
fn a_session_goes_from_new_over_active_to_idle_and_wakes_at_its_endpoint() {
    let table = SessionTable::new(10);
    assert_eq!(table.state(key(1)), SessionState::New);
    assert_eq!(table.begin(key(1), endpoint(7), at(1)), Began::First);
    let home = Home { endpoint: endpoint(7), prefill: None, warm_tokens: 0, qoe: None };
    assert_eq!(table.state(key(1)), SessionState::Active { home: Some(home), in_flight: 1 });
    table.end(key(1), endpoint(7), Some(900), Some(0.5), at(2));
    let home = Home { warm_tokens: 900, qoe: Some(0.5), ..home };
    assert_eq!(table.state(key(1)), SessionState::Idle { home, since: at(2) });
    assert_eq!(table.begin(key(1), endpoint(7), at(3)), Began::AtHome);
    assert_eq!(table.state(key(1)).home(), Some(home));
}

#[test]
fn a_session_that_moves_takes_nothing_warm_along() {
    let table = SessionTable::new(10);
    table.begin(key(1), endpoint(7), at(1));
    table.end(key(1), endpoint(7), Some(900), None, at(2));
    assert_eq!(table.begin(key(1), endpoint(8), at(3)), Began::Moved { from: endpoint(7) });
    let home = table.state(key(1)).home().unwrap();
    assert_eq!((home.endpoint, home.warm_tokens), (endpoint(8), 0));
    // The request that still runs at the old home says nothing of the new one.
    table.end(key(1), endpoint(7), Some(1_000), None, at(4));
    assert_eq!(table.state(key(1)).home().unwrap().warm_tokens, 0);
}

#[test]
fn a_pin_told_by_others_is_a_home_without_requests() {
    let table = SessionTable::new(10);
    table.pin(key(1), endpoint(7), at(1));
    assert_eq!(table.state(key(1)).as_str(), "homed");
    table.unpin(key(1));
    assert_eq!(table.state(key(1)), SessionState::New);
    assert!(table.is_empty());
}

#[test]
fn who_lived_at_a_gone_endpoint_has_no_home() {
    let table = SessionTable::new(10);
    table.pin(key(1), endpoint(7), at(1));
    table.begin(key(2), endpoint(7), at(2));
    table.pin(key(3), endpoint(8), at(3));
    table.endpoint_gone(endpoint(7));
    assert_eq!(table.state(key(1)), SessionState::New);
    assert_eq!(table.state(key(2)), SessionState::Active { home: None, in_flight: 1 });
    table.end(key(2), endpoint(7), None, None, at(4));
    assert_eq!(table.state(key(2)), SessionState::New);
    assert_eq!(table.homes(10), vec![(key(3), endpoint(8))]);
}

#[test]
fn qoe_is_a_running_mean_that_stays_a_ratio() {
    let table = SessionTable::new(10);
    for qoe in [1.0, 0.0, f32::NAN] {
        table.begin(key(1), endpoint(7), at(1));
        table.end(key(1), endpoint(7), Some(1), Some(qoe), at(1));
    }
    assert_eq!(table.state(key(1)).home().unwrap().qoe, Some(0.7));
}

#[test]
fn a_request_that_outlives_its_entry_brings_the_session_back() {
    let table = SessionTable::new(1);
    table.begin(key(1), endpoint(7), at(1));
    table.begin(key(2), endpoint(8), at(2));
    assert_eq!(table.state(key(1)), SessionState::New);
    table.end(key(1), endpoint(7), Some(50), None, at(3));
    assert_eq!(table.state(key(1)).as_str(), "idle");
    assert_eq!(table.len(), 1);
}

#[test]
fn two_hundred_thousand_sessions_stay_within_the_cap_and_the_oldest_leave() {
    const CAP: u64 = 100_000;
    let table = SessionTable::new(CAP as usize);
    for n in 0..2 * CAP {
        table.begin(key(n), endpoint(n % 4), at(n));
        table.end(key(n), endpoint(n % 4), Some(10), None, at(n));
        assert!(table.len() <= CAP as usize);
    }
    assert_eq!(table.left(), CAP);
    assert!((0..CAP).all(|n| table.state(key(n)) == SessionState::New));
    assert!((CAP..2 * CAP).all(|n| table.state(key(n)).home().unwrap().endpoint == endpoint(n % 4)));
    assert!(table.bytes() < 12_000_000, "{} bytes", table.bytes());
    table.set_max(10);
    assert_eq!(table.len(), 10);
    assert!((2 * CAP - 10..2 * CAP).all(|n| table.state(key(n)) != SessionState::New));
}

/// What the table must do, done plainly.
struct Model {
    cap: usize,
    used: VecDeque<u64>,
    homes: BTreeMap<u64, (Option<u64>, u32)>,
}

impl Model {
    fn enter(&mut self, n: u64) -> bool {
        let known = self.homes.contains_key(&n);
        self.used.retain(|other| *other != n);
        if !known && self.homes.len() == self.cap {
            let oldest = self.used.pop_front().unwrap();
            self.homes.remove(&oldest);
        }
        self.used.push_back(n);
        self.homes.entry(n).or_default();
        known
    }

    fn tidy(&mut self, among: impl Fn(u64) -> bool) {
        self.homes.retain(|n, entry| !among(*n) || *entry != (None, 0));
        let homes = &self.homes;
        self.used.retain(|n| homes.contains_key(n));
    }
}

#[derive(Clone, Debug)]
enum Step {
    Begin(u64, u64),
    End(u64, u64),
    Pin(u64, u64),
    Unpin(u64),
    Gone(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let (key, endpoint) = (0_u64..12, 0_u64..3);
    prop_oneof![
        4 => (key.clone(), endpoint.clone()).prop_map(|(key, endpoint)| Step::Begin(key, endpoint)),
        4 => (key.clone(), endpoint.clone()).prop_map(|(key, endpoint)| Step::End(key, endpoint)),
        2 => (key.clone(), endpoint.clone()).prop_map(|(key, endpoint)| Step::Pin(key, endpoint)),
        1 => key.prop_map(Step::Unpin),
        1 => endpoint.prop_map(Step::Gone),
    ]
}

proptest! {
    #[test]
    fn the_table_does_what_a_plain_model_does(cap in 1_usize..8, steps in prop::collection::vec(step(), 0..200)) {
        let table = SessionTable::new(cap);
        let mut model = Model { cap, used: VecDeque::new(), homes: BTreeMap::new() };
        for (ms, step) in (0..).zip(steps) {
            match step {
                Step::Begin(n, home) => {
                    table.begin(key(n), endpoint(home), at(ms));
                    model.enter(n);
                    let entry = model.homes.get_mut(&n).unwrap();
                    *entry = (Some(home), entry.1 + 1);
                }
                Step::End(n, home) => {
                    table.end(key(n), endpoint(home), Some(1), None, at(ms));
                    let known = model.enter(n);
                    let entry = model.homes.get_mut(&n).unwrap();
                    let at_home = if known { entry.0 } else { Some(home) };
                    *entry = (at_home, entry.1.saturating_sub(1));
                    model.tidy(|other| other == n);
                }
                Step::Pin(n, home) => {
                    table.pin(key(n), endpoint(home), at(ms));
                    model.enter(n);
                    model.homes.get_mut(&n).unwrap().0 = Some(home);
                }
                Step::Unpin(n) => {
                    table.unpin(key(n));
                    if let Some(entry) = model.homes.get_mut(&n) {
                        entry.0 = None;
                    }
                    model.tidy(|other| other == n);
                }
                Step::Gone(home) => {
                    table.endpoint_gone(endpoint(home));
                    for entry in model.homes.values_mut().filter(|entry| entry.0 == Some(home)) {
                        entry.0 = None;
                    }
                    model.tidy(|_| true);
                }
            }
            prop_assert!(table.len() <= cap);
            prop_assert_eq!(table.len(), model.homes.len());
            for n in 0..12 {
                let state = table.state(key(n));
                let (home, in_flight) = model.homes.get(&n).copied().unwrap_or_default();
                prop_assert_eq!(state.home().map(|home| home.endpoint), home.map(endpoint));
                let active = match state { SessionState::Active { in_flight, .. } => in_flight, _ => 0 };
                prop_assert_eq!(active, in_flight);
            }
        }
    }
}
