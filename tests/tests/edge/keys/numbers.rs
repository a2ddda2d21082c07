//! Numbers of policies and filters: each is set to two values by a flag, and the same scene is then decided
//! otherwise.

use std::collections::BTreeSet;

use grapevine::config::{Sources, numbers, read};
use rand::SeedableRng as _;
use routing::endpoint::{EndpointSpec, Served, Signal};
use routing::facts::{LedgerRecord, LoadRow, ObservedRow, Pulse, SpeedRow};
use routing::request::{RequestShape, Route};
use routing::{Decision, EndpointId, Moment, ReplicaId, Rng, Router};

/// A number, two values of it, and what shows that they differ.
struct Shown {
    key: &'static str,
    values: [&'static str; 2],
    /// What is seen with each of them.
    seen: [&'static str; 2],
    look: fn(&Scene) -> String,
}

const NUMBERS: &[Shown] = &[
    // 250 ms of warmth, and as much again for those whom recomputing delays, against 1 s of waiting.
    Shown {
        key: "policy.cost.tie_ms",
        values: ["2", "1000"],
        seen: ["leaves", "stays"],
        look: |scene| scene.of_a_warm_prompt(|scene| scene.load_at_home(2, 4_000, 0)),
    },
    Shown {
        key: "policy.cost.wait_weight",
        values: ["1", "0"],
        seen: ["leaves", "stays"],
        look: |scene| scene.of_a_warm_prompt(|scene| scene.load_at_home(2, 4_000, 0)),
    },
    // The same against 125 ms.
    Shown {
        key: "policy.cost.prefill_weight",
        values: ["0", "1"],
        seen: ["leaves", "stays"],
        look: |scene| scene.of_a_warm_prompt(|scene| scene.load_at_home(1, 500, 0)),
    },
    // 2,000 tokens of others that decode there come 375 us later each: 750 ms of theirs.
    Shown {
        key: "policy.cost.decode_weight",
        values: ["1", "0.1"],
        seen: ["leaves", "stays"],
        look: |scene| scene.of_a_warm_prompt(|scene| scene.load_at_home(4, 0, 2_000)),
    },
    Shown {
        key: "policy.cost.kv_pressure_ms",
        values: ["2000", "0"],
        seen: ["leaves", "stays"],
        look: |scene| scene.of_a_warm_prompt(|scene| scene.look_at_home(0, 1.0)),
    },
    Shown {
        key: "policy.cost.waiting_request_tokens",
        values: ["512", "0"],
        seen: ["leaves", "stays"],
        look: |scene| scene.of_a_warm_prompt(|scene| scene.look_at_home(10, 0.1)),
    },
    Shown {
        key: "policy.cache-aware.imbalance_abs",
        values: ["64", "1000"],
        seen: ["leaves", "stays"],
        look: |scene| scene.of_a_warm_prompt(|scene| scene.load_at_home(100, 0, 0)),
    },
    Shown {
        key: "policy.cache-aware.imbalance_ratio",
        values: ["1.5", "3"],
        seen: ["leaves", "stays"],
        look: |scene| {
            scene.of_a_warm_prompt(|scene| {
                scene.load(
                    &scene
                        .ids
                        .iter()
                        .map(|id| (*id, if *id == scene.home() { 200 } else { 100 }, 0, 0))
                        .collect::<Vec<_>>(),
                );
            })
        },
    },
    // 4,000 bytes of 20,000.
    Shown {
        key: "policy.cache-aware.match_ratio_min",
        values: ["0.3", "0.1"],
        seen: ["leaves", "stays"],
        look: |scene| {
            scene.warm_up(&text("warm", 4_000));
            scene.load_at_home(1, 0, 0);
            scene.whether_home(&(text("warm", 4_000) + &text("more", 16_000)))
        },
    },
    Shown {
        key: "policy.prefix-longest.chunk_chars",
        values: ["4096", "128"],
        seen: ["leaves", "stays"],
        look: |scene| {
            scene.warm_up(&text("warm", 1_000));
            scene.load_at_home(1, 0, 0);
            scene.whether_home(&(text("warm", 1_000) + &text("more", 1_000)))
        },
    },
    Shown {
        key: "policy.prefix-ring.prefix_chars",
        values: ["16", "512"],
        seen: ["together", "apart"],
        look: |scene| scene.homes(|number| format!("sixteen of these, {}", text(&number.to_string(), 600))),
    },
    Shown {
        key: "policy.prefix-ring.hash",
        values: ["simhash", "xxhash"],
        seen: ["together", "apart"],
        // No word is told from another but by its order, which only the exact hash sees.
        look: |scene| {
            scene.homes(|number| {
                let mut words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"];
                words.rotate_left(number);
                words.join(" ")
            })
        },
    },
    Shown {
        key: "policy.prefix-ring.bound",
        values: ["1.25", "100"],
        seen: ["spread", "piled up"],
        look: |scene| {
            let shape = scene.shape(&text("hot", 600));
            let held: Vec<_> =
                (0..20).filter_map(|_| scene.router.choose(&shape, &[], NOW, &mut rng()).ok()).collect();
            let first = held[0].endpoint.id;
            if held.iter().all(|chosen| chosen.endpoint.id == first) { "piled up" } else { "spread" }
                .to_owned()
        },
    },
    Shown {
        key: "policy.pd-cost.split_tokens_min",
        values: ["256", "4000"],
        seen: ["paid", "short"],
        look: |scene| scene.whether_split(1_000),
    },
    Shown {
        key: "policy.pd-cost.transfer_us_per_token",
        values: ["5", "5000"],
        seen: ["paid", "costlier"],
        look: |scene| scene.whether_split(1_000),
    },
    Shown {
        key: "policy.pd-cost.handoff_ms",
        values: ["10", "10000"],
        seen: ["paid", "costlier"],
        look: |scene| scene.whether_split(1_000),
    },
    Shown {
        key: "policy.pd-cost.zone_ms",
        values: ["10", "10000"],
        seen: ["paid", "costlier"],
        look: |scene| scene.whether_split(1_000),
    },
    // Serving it whole takes nothing from anybody.
    Shown {
        key: "policy.pd-cost.slowdown",
        values: ["0.75", "0"],
        seen: ["paid", "costlier"],
        look: |scene| scene.whether_split(1_000),
    },
    // Nobody else is to decode there.
    Shown {
        key: "policy.pd-cost.decodes_expected",
        values: ["2", "0"],
        seen: ["paid", "costlier"],
        look: |scene| scene.whether_split(1_000),
    },
    Shown {
        key: "policy.pd-load-aware.imbalance_abs",
        values: ["8", "9"],
        seen: ["leaves", "stays"],
        look: |scene| scene.prefill_of_a_warm_prompt(&[(9, 0), (9, 0), (0, 0)]),
    },
    // Mean 2.7, deviation 4.6.
    Shown {
        key: "policy.pd-load-aware.sigma_factor",
        values: ["1", "2"],
        seen: ["leaves", "stays"],
        look: |scene| scene.prefill_of_a_warm_prompt(&[(8, 0), (0, 0), (0, 0)]),
    },
    // All of them later than the first token is expected, the warm one by 100 ms more.
    Shown {
        key: "policy.pd-qoe.tie_qoe",
        values: ["0.01", "1"],
        seen: ["leaves", "stays"],
        look: |scene| scene.prefill_of_a_warm_prompt(&[(1, 8_600), (1, 7_200), (1, 7_200)]),
    },
    Shown {
        key: "filter.kv-pressure.kv_ratio_max",
        values: ["0.9", "1"],
        seen: ["kv-pressure", "kept"],
        look: |scene| scene.dropped_after(|scene| scene.look_at_home(0, 0.95)),
    },
    Shown {
        key: "filter.queue-percentile.percentile",
        values: ["0.9", "1"],
        seen: ["queue-percentile", "kept"],
        look: |scene| scene.dropped_after(|scene| scene.look_at_home(20, 0.1)),
    },
    // Two are near each other and one is far off; the median deviation is 150 us.
    Shown {
        key: "filter.latency-outlier.sigma_factor",
        values: ["3", "100"],
        seen: ["latency-outlier", "kept"],
        look: |scene| scene.dropped_after(|scene| scene.speeds(&[1_900.0, 100.0, 250.0, 600.0])),
    },
];

const NOW: Moment = Moment::from_millis(1_000);
const EARLIER: Moment = Moment::from_millis(500);
/// The other numbers of `cost`, so that a change of a default does not change a scene.
const COST: &str = ",tie_ms=2,wait_weight=1,prefill_weight=1,decode_weight=0.1,kv_pressure_ms=500,waiting_request_tokens=512";
/// Endpoints of a scene.
const ENDPOINTS: usize = 4;

fn rng() -> Rng {
    Rng::seed_from_u64(7)
}

/// Text of `bytes` bytes that begins unlike that of any other name.
fn text(name: &str, bytes: usize) -> String {
    (0..)
        .map(|line| format!("{name} {line}; "))
        .flat_map(String::into_bytes)
        .take(bytes)
        .map(char::from)
        .collect()
}

/// A core as a flag has made it, with endpoints that are in use. The first of them is called home. Where the policy
/// is one for pairs, the last one decodes, in another zone than the others, which prefill.
struct Scene {
    router: Router,
    ids: Vec<EndpointId>,
}

impl Scene {
    /// `kind.name.number = value` as a flag; of two values for one number the last counts.
    fn with(key: &str, value: &str) -> Self {
        let [kind, name, number] = key.split('.').collect::<Vec<_>>()[..] else { panic!("{key}") };
        let flag = if kind == "filter" { "endpoint_filter" } else { "policy" };
        let others = if name == "cost" { COST } else { "" };
        let mut flags = vec![(flag, vec![format!("{name}{others},{number}={value}")])];
        let has_roles = name.starts_with("pd-");
        if has_roles && name != "pd-cost" {
            flags.push(("split", vec!["always".to_owned()]));
        }
        let config =
            read(&Sources { flags, ..Sources::default() }).unwrap_or_else(|faults| panic!("{faults}"));
        let router = Router::new(ReplicaId::new("a"), 1, config.core).expect("checked settings");
        let role = |number| match number {
            _ if !has_roles => "",
            number if number + 1 == ENDPOINTS => ",role=decode,zone=b",
            _ => ",role=prefill,zone=a",
        };
        let urls = (0..ENDPOINTS).map(|number| format!("http://10.0.0.{number}:8000{}", role(number)));
        let specs: Vec<_> = urls.flat_map(|url| EndpointSpec::parse(&url).expect("a URL")).collect();
        let ids: Vec<_> = specs.iter().map(EndpointSpec::id).collect();
        router.set_endpoints(specs, NOW);
        for id in &ids {
            router.report(*id, Signal::ProbeOk, NOW);
            router.set_served(*id, Served::Any);
        }
        Self { router, ids }
    }

    fn home(&self) -> EndpointId {
        self.ids[0]
    }

    fn shape(&self, prompt: &str) -> RequestShape {
        let body = serde_json::json!({"model": "m", "prompt": prompt, "stream": true, "max_tokens": 16});
        let none: [(&str, &str); 0] = [];
        RequestShape::read(Route::Completions, &none, body.to_string().as_bytes(), &self.router.rules())
            .expect("a good body")
    }

    fn explained(&self, prompt: &str) -> Decision {
        self.router.explain(&self.shape(prompt), NOW, &mut rng()).expect("somebody can serve it")
    }

    /// Serves a prompt at home.
    fn warm_up(&self, prompt: &str) {
        drop(
            self.router
                .choose(&self.shape(prompt), &self.ids[1..], NOW, &mut rng())
                .expect("home can serve it"),
        );
    }

    /// Another replica says what it runs where: requests, prefill tokens, decode tokens.
    fn load(&self, rows: &[(EndpointId, u32, u32, u32)]) {
        let row = |&(endpoint, running, prefill_tokens, decode_tokens): &_| LoadRow {
            endpoint,
            running,
            prefill_tokens,
            decode_tokens,
            placed_tokens: 0,
        };
        let pulse = Pulse { epoch: 1, version: 1, load: rows.iter().map(row).collect(), ..Pulse::default() };
        self.router.merge_pulse(&ReplicaId::new("b"), &pulse, NOW);
    }

    fn load_at_home(&self, running: u32, prefill_tokens: u32, decode_tokens: u32) {
        self.load(&[(self.home(), running, prefill_tokens, decode_tokens)]);
    }

    /// What the engines say of themselves: nothing, but for the one at home.
    fn look_at_home(&self, waiting: u32, kv_ratio: f32) {
        for id in &self.ids {
            let at_home = *id == self.home();
            let row = ObservedRow {
                endpoint: *id,
                age_ms: 0,
                running: 0,
                waiting: if at_home { waiting } else { 0 },
                kv_ratio: Some(if at_home { kv_ratio } else { 0.1 }),
                engine_epoch: 0,
            };
            self.router.observe(&row, NOW);
        }
    }

    /// What another replica has learned of the endpoints' prefill, in us per token.
    fn speeds(&self, prefill: &[f32; ENDPOINTS]) {
        let row = |(id, prefill): (&EndpointId, &f32)| SpeedRow {
            endpoint: *id,
            prefill_us_per_token: *prefill,
            itl_us: 12_000.0,
            prefill_samples: 1_000,
            itl_samples: 1_000,
        };
        let speed = self.ids.iter().zip(prefill).map(row).collect();
        let pulse = Pulse { epoch: 1, version: 1, speed, ..Pulse::default() };
        self.router.merge_pulse(&ReplicaId::new("b"), &pulse, NOW);
        self.router.pulse(NOW);
    }

    /// Whether the prompt would go home.
    fn whether_home(&self, prompt: &str) -> String {
        if self.explained(prompt).chosen == self.home() { "stays" } else { "leaves" }.to_owned()
    }

    /// Whether a prompt of 1,000 tokens that is warm at home would go there after `then`.
    fn of_a_warm_prompt(&self, then: impl FnOnce(&Self)) -> String {
        let prompt = text("warm", 4_000);
        self.warm_up(&prompt);
        then(self);
        self.whether_home(&prompt)
    }

    /// Whether a cold prompt of so many tokens would be split, and why.
    fn whether_split(&self, tokens: usize) -> String {
        let decision = self.explained(&text("cold", tokens * 4));
        decision.split.expect("there are roles").reason.as_str().to_owned()
    }

    /// Whether a prompt of 1,000 tokens that is warm at home would be prefilled there, beside requests in flight
    /// and prompt tokens of others at each.
    fn prefill_of_a_warm_prompt(&self, loads: &[(u32, u32)]) -> String {
        let prompt = text("warm", 4_000);
        let blocks = self.shape(&prompt).blocks;
        // Long enough ago for it not to be a request in flight.
        self.router.merge_ledger(&[LedgerRecord::Place { endpoint: self.home(), blocks }], EARLIER);
        let row = |(id, load): (&EndpointId, &(u32, u32))| (*id, load.0, load.1, 0);
        self.load(&self.ids.iter().zip(loads).map(row).collect::<Vec<_>>());
        let at_home = self.explained(&prompt).prefill() == Some(self.home());
        if at_home { "stays" } else { "leaves" }.to_owned()
    }

    /// What leaves home out after `then`.
    fn dropped_after(&self, then: impl FnOnce(&Self)) -> String {
        then(self);
        let decision = self.explained("any prompt");
        let home = decision.candidates.iter().find(|each| each.endpoint == self.home()).expect("a candidate");
        home.dropped_by.unwrap_or("kept").to_owned()
    }

    /// Whether prompts have one home or several.
    fn homes(&self, prompt: impl Fn(usize) -> String) -> String {
        let homes: BTreeSet<_> = (0..8).map(|number| self.explained(&prompt(number)).chosen).collect();
        if homes.len() == 1 { "together" } else { "apart" }.to_owned()
    }
}

#[test]
fn every_number_of_a_policy_or_filter_decides_something() {
    for Shown { key, values, seen, look } in NUMBERS {
        for (value, seen) in values.iter().zip(seen) {
            assert_eq!(look(&Scene::with(key, value)), *seen, "{key} = {value}");
        }
        assert_ne!(seen[0], seen[1], "{key}");
    }
    let shown: Vec<&str> = NUMBERS.iter().map(|shown| shown.key).collect();
    let all: BTreeSet<String> = numbers().into_iter().map(|(key, _)| key).collect();
    let missing: Vec<&String> = all.iter().filter(|key| !shown.contains(&key.as_str())).collect();
    assert!(missing.is_empty(), "nothing shows what these do: {missing:?}");
    assert_eq!(shown.len(), all.len(), "each number once");
}
