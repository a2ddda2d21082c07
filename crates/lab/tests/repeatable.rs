//! What the lab says of itself: a run can be repeated, whatever plays beside it, and the fluid model is what it says.

use std::time::Duration;

use lab::{
    ChatShape, Cut, Decider, EngineSpec, Figures, Gossip, Part, Profile, Scenario, Trace, TraceRow, Workload,
};
use routing::policy::PolicyName;
use routing::settings::Settings;

fn replicas(count: usize, policy: PolicyName) -> Decider {
    Decider::Replicas { count, settings: Box::new(Settings { policy, ..Settings::default() }) }
}

/// Sixty prompts a second apart in threes, of which each shares its first block with all, and two more with every
/// fifth.
fn trace(part: Part) -> Trace {
    let row = |at: u64| TraceRow {
        at: Duration::from_millis(at * 333),
        input_tokens: 2_000,
        output_tokens: 20,
        blocks: Some([0, 1 + at % 5, 10 + at % 5, 1_000 + at].into()),
    };
    Trace::new((0..180).map(row).collect(), part)
}

fn scenario(decider: Decider, workload: Workload) -> Scenario {
    Scenario {
        decider,
        engines: vec![EngineSpec::step(Profile::Llama8bH100); 3],
        workload,
        gossip: Gossip {
            loss: 0.1,
            cuts: vec![Cut { from: Duration::from_secs(10), until: Duration::from_secs(20) }],
            ..Gossip::default()
        },
        usage: true,
        seed: 7,
    }
}

fn scenarios() -> Vec<Scenario> {
    let chats = ChatShape { chats: 12, clients: 4, ..ChatShape::default() };
    let mut all = Vec::new();
    for decider in [
        replicas(1, PolicyName::Cost),
        replicas(3, PolicyName::Cost),
        replicas(3, PolicyName::Random),
        replicas(2, PolicyName::PrefixLongest),
        Decider::LeastConnections,
        Decider::AllKnowing,
    ] {
        all.push(scenario(decider.clone(), Workload::Trace(trace(Part::Whole))));
        all.push(scenario(decider, Workload::Chats(chats)));
    }
    all
}

fn json(figures: &[Figures]) -> String {
    serde_json::to_string(figures).expect("figures are plain numbers")
}

#[test]
fn one_seed_gives_the_same_figures_bit_for_bit_on_one_thread_or_several() {
    let alone = lab::sweep(&scenarios(), 1, &|_| ()).expect("no faults");
    let beside = lab::sweep(&scenarios(), 4, &|_| ()).expect("no faults");
    assert_eq!(json(&alone), json(&beside));
    let other: Vec<Scenario> =
        scenarios().into_iter().map(|scenario| Scenario { seed: 8, ..scenario }).collect();
    assert_ne!(json(&alone), json(&lab::sweep(&other, 2, &|_| ()).expect("no faults")));
}

#[test]
fn every_request_is_played_once_and_figures_are_of_the_part_asked_for() {
    for (part, requests) in [(Part::Whole, 180), (Part::FirstHalf, 90), (Part::SecondHalf, 90)] {
        let workload = Workload::Trace(trace(part));
        let figures = lab::run(&scenario(replicas(3, PolicyName::Cost), workload)).expect("no faults");
        assert_eq!(figures.requests, requests, "{part:?}");
        assert_eq!(figures.served.iter().sum::<usize>(), requests, "{part:?}");
    }
}

/// A first-in-first-out queue at a rate with a cache of everything that came before, by hand.
#[test]
fn the_fluid_model_takes_its_queue_and_its_own_uncached_tokens() {
    let row = |at_ms: u64, tokens: u32, blocks: &[u64]| TraceRow {
        at: Duration::from_millis(at_ms),
        input_tokens: tokens,
        output_tokens: 1,
        blocks: Some(blocks.into()),
    };
    // 1,024 tokens a second. The first takes 1 s; the second waits half a second and computes its second block; the
    // third finds nobody and its two blocks but for the last token's, which is always computed.
    let rows = vec![row(0, 1_024, &[1, 2]), row(500, 1_024, &[1, 3]), row(9_000, 1_025, &[1, 3, 4])];
    let scenario = Scenario {
        decider: Decider::LeastConnections,
        engines: vec![EngineSpec::fluid(1_024.0, 100)],
        workload: Workload::Trace(Trace::new(rows, Part::Whole)),
        gossip: Gossip::default(),
        usage: true,
        seed: 1,
    };
    let figures = lab::run(&scenario).expect("no faults");
    let expected_ms = (1_000.0 + (500.0 + 500.0) + 1_000.0 / 1_024.0) / 3.0;
    assert!((figures.ttft_mean_ms - expected_ms).abs() < 0.01, "{figures:?}");
    assert!((figures.hit_rate - 1_536.0 / 3_073.0).abs() < 1e-9, "{figures:?}");
}

#[test]
fn silence_between_replicas_costs_much_time_and_lost_words_or_a_cut_cost_less_of_it() {
    let ttft_ms = |gossip: Gossip| {
        let scenario = Scenario {
            engines: vec![EngineSpec::fluid(800.0, 10_000); 3],
            gossip,
            ..scenario(replicas(6, PolicyName::Cost), Workload::Trace(trace(Part::Whole)))
        };
        lab::run(&scenario).expect("no faults").ttft_mean_ms
    };
    let told = ttft_ms(Gossip::default());
    let lossy = ttft_ms(Gossip { loss: 0.3, ..Gossip::default() });
    let silent = ttft_ms(Gossip { push_every: None, ..Gossip::default() });
    let cut = Cut { from: Duration::ZERO, until: Duration::from_secs(50) };
    let cut = ttft_ms(Gossip { cuts: vec![cut], ..Gossip::default() });
    assert!(silent > 1.2 * told, "silent {silent} ms, told {told} ms");
    assert!(lossy < silent, "lossy {lossy} ms, silent {silent} ms");
    assert!(told < cut && cut < silent, "told {told} ms, cut {cut} ms, silent {silent} ms");
}

#[test]
fn all_faults_are_named_at_once() {
    let bad = Scenario {
        gossip: Gossip { loss: 2.0, ..Gossip::default() },
        engines: Vec::new(),
        ..scenario(replicas(0, PolicyName::Cost), Workload::Trace(trace(Part::Whole)))
    };
    let faults = lab::run(&bad).expect_err("nothing of it can be played");
    let keys: Vec<&str> = faults.iter().map(|fault| fault.key.as_str()).collect();
    assert_eq!(keys, ["engines", "gossip.loss", "replicas"]);
}
