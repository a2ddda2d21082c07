//! More comes than the engines have places for: who is served in time, at one replica and at three.

mod play;

use play::{Figures, Play, Scenario};
use routing::settings::Settings;

/// Four engines of eight places, of which each is taken for 1.8 s; 1.3 times as much comes.
fn overloaded(replicas: usize, seed: u64) -> Scenario {
    Scenario {
        replicas,
        engines: 4,
        places: 8,
        prefill_us: 20_000,
        itl_us: 7_000,
        output_tokens: 256,
        load: 1.3,
        seconds: 20,
        push_us: 1_000,
        loss: 0.0,
        sessions: 40,
        dies_at_s: None,
        settings: Settings::default(),
        seed,
    }
}

fn play(name: &str, scenario: &Scenario) -> Figures {
    let figures = Play::run(scenario);
    println!("{name:28} seed {}: {figures:?}", scenario.seed);
    figures
}

/// Whoever waits is served or refused within the limit, a look later at most.
fn assert_bounded(figures: &Figures, scenario: &Scenario) {
    let limit_ms = scenario.settings.admission.queue_wait_max.as_millis() as f64;
    assert!(figures.waited_ms_max <= limit_ms + 10.0, "seed {}: {figures:?}", scenario.seed);
}

#[test]
fn the_urgent_are_served_in_time_and_no_place_idles_through_one_replica_and_through_three() {
    for seed in 1..3 {
        let one = play("one replica", &overloaded(1, seed));
        let scenario = overloaded(3, seed);
        let three = play("three replicas", &scenario);
        assert_bounded(&three, &scenario);
        for figures in [&one, &three] {
            let [urgent, patient] = figures.in_time;
            assert!(urgent > 0.6 && urgent >= 2.0 * patient, "seed {seed}: {figures:?}");
            assert!(figures.idle < 0.01, "seed {seed}: {figures:?}");
        }
        assert!(three.in_time[0] > 0.85 * one.in_time[0], "seed {seed}: {three:?} after {one:?}");
    }
}

#[test]
fn words_that_are_lost_cost_some_order_and_no_place() {
    let scenario = Scenario { loss: 0.3, ..overloaded(3, 1) };
    let figures = play("three in ten words lost", &scenario);
    assert_bounded(&figures, &scenario);
    assert!(figures.idle < 0.03, "{figures:?}");
    assert!(figures.in_time[0] >= 2.0 * figures.in_time[1], "{figures:?}");
}

#[test]
fn nobody_waits_long_for_a_replica_that_is_dead() {
    let scenario = Scenario { dies_at_s: Some(8), ..overloaded(3, 1) };
    let figures = play("one of three dies", &scenario);
    assert_bounded(&figures, &scenario);
    assert!(figures.in_time[0] >= 2.0 * figures.in_time[1], "{figures:?}");
}
