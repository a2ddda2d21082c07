use rand::{Rng as _, SeedableRng as _};

use super::*;
use crate::endpoint::{EndpointSpec, Role};
use crate::prefix::WarmDepths;
use crate::request::{RequestShape, Route, ShapeRules};
use crate::router::Rng;
use crate::settings::Settings;
use crate::{Moment, ReplicaId, Router};

/// Some endpoints of any roles, connectors, groups and zones.
fn fleet(count: usize, rng: &mut Rng) -> Router {
    let mut one_of = |key: &str, values: &[&str]| match values[rng.random_range(0..values.len())] {
        "" => String::new(),
        value => format!(",{key}={value}"),
    };
    let specs = (0..count).map(|number| {
        let keys = [
            one_of("role", &["prefill", "decode", "both"]),
            one_of("connector", &["", "", "none"]),
            one_of("group", &["", "g", "h"]),
            one_of("zone", &["", "a", "b"]),
        ];
        EndpointSpec::parse(&format!("http://10.0.1.{number}:8000{}", keys.concat())).unwrap().remove(0)
    });
    let router = Router::new(ReplicaId::new("a"), 1, Settings::default()).unwrap();
    router.set_endpoints(specs.collect(), Moment::default());
    router
}

fn costs(count: usize, rng: &mut Rng) -> Costs {
    let cost = |_| Cost { total_ms: rng.random_range(0.0..100.0), ..Cost::default() };
    (0..count).map(cost).collect()
}

#[test]
fn the_pair_found_is_the_cheapest_of_all() {
    const ZONE_MS: f64 = 25.0;
    let headers: [(&str, &str); 0] = [];
    let body = br#"{"prompt": "x"}"#;
    let request = RequestShape::read(Route::Completions, &headers, body, &ShapeRules::default()).unwrap();
    let homes = WarmDepths::default();
    let mut found = 0;
    for seed in 0..400 {
        let mut rng = Rng::seed_from_u64(seed);
        let count = rng.random_range(2..14);
        let view = fleet(count, &mut rng).view();
        let Some(pools) = &view.pools else { continue };
        let of = |unwanted: Role| {
            let wanted = view.endpoints.iter().filter(move |each| each.spec.role != unwanted);
            Candidates::of(wanted, Moment::default())
        };
        let (from, to) = (of(Role::Decode), of(Role::Prefill));
        let prefill = Side::new(&from, costs(from.all().len(), &mut rng), &view, pools);
        let decode = Side::new(&to, costs(to.all().len(), &mut rng), &view, pools);
        let scene = |candidates, costs| Scene {
            request: &request,
            candidates,
            costs,
            session_home: None,
            conversation_homes: &homes,
            rendezvous: seed,
            now: Moment::default(),
        };
        let scenes = [&scene(&from, &prefill.costs), &scene(&to, &decode.costs)];
        let ways = Ways { pools, zone_ms: ZONE_MS };
        let got = ways.cheapest(&prefill, &decode, scenes, 0.0).map(|pair| pair.total_ms);

        let mut best = f64::INFINITY;
        for (one, one_cost) in from.all().iter().zip(&prefill.costs) {
            for (other, other_cost) in to.all().iter().zip(&decode.costs) {
                let (one, other) = (one.endpoint, other.endpoint);
                if one.id == other.id || !one.spec.hands_over_to(&other.spec) {
                    continue;
                }
                let apart = one.spec.zone.is_some() && other.spec.zone.is_some();
                let far_ms = if apart && one.spec.zone != other.spec.zone { ZONE_MS } else { 0.0 };
                best = f64::min(best, one_cost.total_ms + other_cost.total_ms + far_ms);
            }
        }
        match got {
            Some(got) => assert!((got - best).abs() < 1e-9, "seed {seed}: {got} found, {best} is the least"),
            None => assert!(best.is_infinite(), "seed {seed}: none found, {best} is the least"),
        }
        found += usize::from(got.is_some());
    }
    assert!(found > 200, "only {found} fleets had a pair");
}
