use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::timing::Crowding;
use crate::tokens::TokenId;

pub(super) const TIMING: Timing = Timing {
    prefill_base: Duration::from_millis(30),
    prefill_per_token: Duration::from_micros(250),
    inter_token: Duration::from_millis(12),
    crowding: Crowding::DoubleAt(3),
    beside_prefill: 1.0,
};
const FREE: Timing = Timing {
    prefill_base: Duration::ZERO,
    prefill_per_token: Duration::ZERO,
    inter_token: Duration::ZERO,
    crowding: Crowding::DoubleAt(1),
    beside_prefill: 1.0,
};
pub(super) const LIMITS: Limits =
    Limits { block_tokens: 32, kv_blocks: 1_000, step_tokens_max: 2_048, running_max: 16, waiting_max: None };

/// The three schedulers, for what they must have in common.
pub(super) fn all(limits: Limits) -> [(&'static str, Scheduler); 3] {
    [
        ("step", Scheduler::new(SchedulerKind::Step, TIMING, limits)),
        ("fifo", Scheduler::new(SchedulerKind::Fifo, TIMING, limits)),
        ("instant", Scheduler::new(SchedulerKind::Step, FREE, limits)),
    ]
}

fn ids(tokens: u32) -> Vec<TokenId> {
    (1..=tokens).map(TokenId).collect()
}

fn prompt(tokens: &[TokenId], salt: &str, block_tokens: u32) -> Prompt {
    Prompt::new(BlockHash::root("m", salt), tokens, block_tokens, Answer::to(tokens))
}

/// A prompt that shares nothing with another of a different `first` token.
pub(super) fn unlike(first: u32, tokens: u32) -> Prompt {
    let mut ids = ids(tokens);
    ids[0] = TokenId(1_000_000 + first);
    prompt(&ids, "", LIMITS.block_tokens)
}

pub(super) fn job(id: u64, prompt: Prompt, output_tokens: u32) -> Job {
    Job { id: JobId(id), prompt, output_tokens }
}

/// Runs until nothing is left to do; all events in order.
pub(super) fn run(scheduler: &mut Scheduler, out: &mut Vec<Event>) {
    while let Some(at) = scheduler.next_at() {
        scheduler.advance(at, out);
    }
}

pub(super) fn ms(ms: f64) -> Moment {
    Moment::default().plus(Duration::from_secs_f64(ms / 1e3))
}

/// When each job's tokens came out, in ms.
pub(super) fn token_times(events: &[Event], id: u64) -> Vec<f64> {
    let times = events.iter().filter_map(|event| match event {
        Event::Tokens { job, at, .. } if *job == JobId(id) => Some(at.0 as f64 / 1e6),
        _ => None,
    });
    times.collect()
}

fn cached(events: &[Event]) -> Vec<u32> {
    let counts = events.iter().filter_map(|event| match event {
        Event::Started { cached_tokens, .. } => Some(*cached_tokens),
        Event::Fetch { .. } | Event::Tokens { .. } => None,
    });
    counts.collect()
}

#[test]
fn prompts_are_cached_as_a_real_engine_was_seen_to() {
    let mut changed = ids(600);
    changed[300] = TokenId(7_000);
    let rows: [(&str, &[TokenId], &str, u32); 6] = [
        ("the first time", &ids(600), "", 0),
        ("again", &ids(600), "", 576),
        ("with another salt", &ids(600), "tenant", 0),
        ("with token 300 changed", &changed, "", 288),
        ("exactly full blocks", &ids(576), "", 544),
        ("shorter than a block", &ids(31), "", 0),
    ];
    for (name, mut scheduler) in all(LIMITS) {
        for (id, (what, tokens, salt, expected)) in (0..).zip(rows) {
            let mut out = Vec::new();
            let prompt = prompt(tokens, salt, LIMITS.block_tokens);
            scheduler.submit(ms(id as f64 * 10_000.0), job(id, prompt, 1), &mut out).expect("taken");
            run(&mut scheduler, &mut out);
            assert_eq!(cached(&out), [expected], "{name}: {what}");
        }
        let totals = scheduler.totals();
        assert_eq!(totals.cache_query_tokens, 4 * 600 + 576 + 31, "{name}");
        assert_eq!(totals.cache_hit_tokens, 576 + 288 + 544, "{name}");
    }
}

#[test]
fn an_idle_engine_answers_after_its_prefill_and_then_at_its_pace() {
    for (name, mut scheduler) in all(LIMITS).into_iter().take(2) {
        let mut out = Vec::new();
        scheduler.submit(ms(5.0), job(0, unlike(0, 1_000), 3), &mut out).expect("taken");
        run(&mut scheduler, &mut out);
        // 30 ms + 1,000 x 250 us, then 12 ms a token.
        assert_eq!(token_times(&out, 0), [285.0, 297.0, 309.0], "{name}");
        assert_eq!(scheduler.gauges(), Gauges::default(), "{name}");
    }
}

#[test]
fn fifo_prefills_in_order_of_arrival_whatever_decodes() {
    let mut scheduler = Scheduler::new(SchedulerKind::Fifo, TIMING, LIMITS);
    let mut out = Vec::new();
    for id in 0..3 {
        scheduler.submit(ms(id as f64), job(id, unlike(id as u32, 400), 100), &mut out).expect("taken");
    }
    run(&mut scheduler, &mut out);
    let first: Vec<f64> = (0..3).map(|id| token_times(&out, id)[0]).collect();
    assert_eq!(first, [130.0, 260.0, 390.0]);
}

#[test]
fn fifo_lets_a_warm_prompt_pass_quickly_but_not_out_of_order() {
    let mut scheduler = Scheduler::new(SchedulerKind::Fifo, TIMING, LIMITS);
    let mut out = Vec::new();
    for (id, first) in [(0, 7), (1, 8), (2, 7)] {
        scheduler.submit(ms(0.0), job(id, unlike(first, 400), 1), &mut out).expect("taken");
    }
    run(&mut scheduler, &mut out);
    // The third finds 384 of 400 tokens: 30 ms + 16 x 250 us behind the second.
    assert_eq!(token_times(&out, 2), [130.0 + 130.0 + 34.0]);
    assert_eq!(cached(&out), [0, 0, 384]);
}

#[test]
fn a_long_prompt_is_prefilled_in_chunks_and_pays_the_fixed_part_once() {
    let limits = Limits { step_tokens_max: 500, ..LIMITS };
    let mut scheduler = Scheduler::new(SchedulerKind::Step, TIMING, limits);
    let mut out = Vec::new();
    scheduler.submit(ms(0.0), job(0, unlike(0, 1_200), 1), &mut out).expect("taken");
    let mut steps = 0;
    while let Some(at) = scheduler.next_at() {
        scheduler.advance(at, &mut out);
        steps += 1;
    }
    assert_eq!(steps, 3);
    assert_eq!(token_times(&out, 0), [330.0]);
}

#[test]
fn decodes_go_on_between_the_chunks_of_a_prefill() {
    let limits = Limits { step_tokens_max: 101, ..LIMITS };
    let mut scheduler = Scheduler::new(SchedulerKind::Step, TIMING, limits);
    let mut out = Vec::new();
    scheduler.submit(ms(0.0), job(0, unlike(0, 40), 50), &mut out).expect("taken");
    scheduler.submit(ms(41.0), job(1, unlike(1, 300), 1), &mut out).expect("taken");
    run(&mut scheduler, &mut out);
    let times = token_times(&out, 0);
    // First token at 40; one step alone; then three steps that share the budget with 100 prompt tokens each.
    assert_eq!(times[..6], [40.0, 52.0, 52.0 + 67.0, 52.0 + 67.0 + 37.0, 52.0 + 67.0 + 37.0 * 2.0, 205.0]);
    assert_eq!(token_times(&out, 1), [52.0 + 67.0 + 37.0 * 2.0]);
}

#[test]
fn time_between_tokens_grows_with_the_batch() {
    let mut scheduler = Scheduler::new(SchedulerKind::Step, TIMING, LIMITS);
    let mut out = Vec::new();
    for id in 0..4 {
        scheduler.submit(ms(0.0), job(id, unlike(id as u32, 40), 40), &mut out).expect("taken");
    }
    run(&mut scheduler, &mut out);
    let times = token_times(&out, 3);
    let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps[..30].iter().all(|&gap| (gap - 24.0).abs() < 1e-6), "{gaps:?}");
}

#[test]
fn no_more_run_than_seats_and_the_rest_wait() {
    let limits = Limits { running_max: 2, ..LIMITS };
    let mut scheduler = Scheduler::new(SchedulerKind::Step, TIMING, limits);
    let mut out = Vec::new();
    for id in 0..5 {
        scheduler.submit(ms(0.0), job(id, unlike(id as u32, 40), 10), &mut out).expect("taken");
    }
    scheduler.advance(ms(41.0), &mut out);
    let gauges = scheduler.gauges();
    assert_eq!((gauges.running, gauges.waiting), (2, 3));
}

#[test]
fn a_full_queue_refuses_and_takes_again_when_it_has_room() {
    let limits = Limits { running_max: 1, waiting_max: Some(2), ..LIMITS };
    for (name, mut scheduler) in all(limits).into_iter().take(2) {
        let mut out = Vec::new();
        let mut submit = |id| scheduler.submit(ms(0.0), job(id, unlike(id as u32, 40), 1), &mut out);
        assert!((0..3).all(|id| submit(id).is_ok()), "{name}");
        assert_eq!(submit(3), Err(Refused::QueueFull), "{name}");
        run(&mut scheduler, &mut out);
        let late = ms(1_000.0);
        assert!(scheduler.submit(late, job(4, unlike(4, 40), 1), &mut out).is_ok(), "{name}");
    }
}

#[test]
fn a_job_that_could_never_run_is_refused() {
    let limits = Limits { kv_blocks: 4, ..LIMITS };
    let mut scheduler = Scheduler::new(SchedulerKind::Step, TIMING, limits);
    let mut out = Vec::new();
    let mut submit =
        |id, tokens, output| scheduler.submit(ms(0.0), job(id, unlike(0, tokens), output), &mut out);
    assert_eq!(submit(0, 120, 10), Err(Refused::TooLong));
    assert_eq!(submit(1, 120, 9), Ok(()));
    assert_eq!(submit(2, 120, 0), Err(Refused::Empty));
}

#[test]
fn the_latest_job_is_preempted_when_blocks_run_out_and_loses_no_token() {
    let limits = Limits { kv_blocks: 6, ..LIMITS };
    let mut scheduler = Scheduler::new(SchedulerKind::Step, TIMING, limits);
    let mut out = Vec::new();
    for id in 0..2 {
        scheduler.submit(ms(0.0), job(id, unlike(id as u32, 80), 90), &mut out).expect("taken");
    }
    run(&mut scheduler, &mut out);
    assert!(scheduler.totals().preemptions > 0);
    for id in 0..2 {
        assert_eq!(token_times(&out, id).len(), 90, "job {id}");
    }
    assert_eq!(cached(&out).len(), 2, "no job starts twice");
    assert!(token_times(&out, 0).last() < token_times(&out, 1).last());
    assert_eq!(scheduler.gauges(), Gauges::default());
}

#[test]
fn a_preempted_job_finds_what_is_left_of_its_prompt() {
    let limits = Limits { kv_blocks: 8, ..LIMITS };
    let mut scheduler = Scheduler::new(SchedulerKind::Step, TIMING, limits);
    let mut out = Vec::new();
    scheduler.submit(ms(0.0), job(0, unlike(0, 100), 60), &mut out).expect("taken");
    scheduler.submit(ms(0.0), job(1, unlike(1, 100), 60), &mut out).expect("taken");
    run(&mut scheduler, &mut out);
    assert_eq!(scheduler.totals().preemptions, 1);
    assert_eq!([0, 1].map(|id| token_times(&out, id).len()), [60, 60]);
}

#[test]
fn generated_blocks_are_cached_for_the_next_turn() {
    let asked = ids(100);
    let answer = Answer::to(&asked);
    let mut next = asked.clone();
    next.extend((0..60).map(|i| answer.token(i)));
    next.extend(ids(40));
    for (name, mut scheduler) in all(LIMITS) {
        let mut out = Vec::new();
        scheduler.submit(ms(0.0), job(0, prompt(&asked, "", 32), 60), &mut out).expect("taken");
        run(&mut scheduler, &mut out);
        scheduler.submit(ms(10_000.0), job(1, prompt(&next, "", 32), 1), &mut out).expect("taken");
        run(&mut scheduler, &mut out);
        // 100 + 59 computed tokens fill four blocks.
        assert_eq!(cached(&out), [0, 128], "{name}");
    }
}

#[test]
fn cancelling_frees_everything_in_every_phase() {
    for (name, scheduler) in all(LIMITS).into_iter().take(2) {
        let mut scheduler = scheduler;
        let mut out = Vec::new();
        // 0 decodes, 1 is in its prefill, 2 waits.
        scheduler.submit(ms(0.0), job(0, unlike(0, 40), 500), &mut out).expect("taken");
        scheduler.submit(ms(41.0), job(1, unlike(1, 1_000), 5), &mut out).expect("taken");
        scheduler.advance(ms(60.0), &mut out);
        scheduler.submit(ms(61.0), job(2, unlike(2, 1_000), 5), &mut out).expect("taken");
        let gauges = scheduler.gauges();
        assert_eq!((gauges.running, gauges.waiting), (2, 1), "{name}");
        for id in [2, 1, 0] {
            scheduler.cancel(ms(62.0), JobId(id), &mut out);
        }
        assert_eq!(scheduler.gauges(), Gauges::default(), "{name}");
        out.clear();
        run(&mut scheduler, &mut out);
        assert_eq!(out, [], "{name}: nothing is said of cancelled jobs");
    }
}

#[test]
fn a_cancelled_prefill_lets_the_next_begin_at_once_in_fifo() {
    let mut scheduler = Scheduler::new(SchedulerKind::Fifo, TIMING, LIMITS);
    let mut out = Vec::new();
    scheduler.submit(ms(0.0), job(0, unlike(0, 4_000), 1), &mut out).expect("taken");
    scheduler.submit(ms(1.0), job(1, unlike(1, 40), 1), &mut out).expect("taken");
    scheduler.cancel(ms(10.0), JobId(0), &mut out);
    run(&mut scheduler, &mut out);
    assert_eq!(token_times(&out, 1), [50.0]);
}

#[test]
fn the_first_token_comes_when_it_was_foreseen() {
    for (name, mut scheduler) in all(LIMITS) {
        let mut out = Vec::new();
        for (id, (at, first)) in
            [(0.0, 7), (10.0, 8), (20.0, 7), (700.0, 9), (710.0, 8)].into_iter().enumerate()
        {
            scheduler.advance(ms(at), &mut out);
            let job = job(id as u64, unlike(first, 400), 3);
            let foreseen = scheduler.first_token_at(ms(at), &job).expect("it would be taken");
            let mut ahead = scheduler.clone();
            let mut events = Vec::new();
            ahead.submit(ms(at), job.clone(), &mut events).expect("taken");
            run(&mut ahead, &mut events);
            assert_eq!(token_times(&events, id as u64)[0], foreseen.0 as f64 / 1e6, "{name}, job {id}");
            scheduler.submit(ms(at), job, &mut out).expect("taken");
        }
    }
}

#[derive(Clone, Debug)]
enum Deed {
    Submit { first: u32, tokens: u32, output: u32 },
    Cancel(u64),
    Pass { ms: u32 },
    Clear,
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        4 => (0_u32..4, 1_u32..300, 1_u32..60)
            .prop_map(|(first, tokens, output)| Deed::Submit { first, tokens, output }),
        1 => (0_u64..40).prop_map(Deed::Cancel),
        3 => (0_u32..400).prop_map(|ms| Deed::Pass { ms }),
        1 => Just(Deed::Clear),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_every_job_gets_all_its_tokens_once_and_nothing_is_left(
        deeds in prop::collection::vec(deed(), 0..80),
        kv_blocks in 12_u32..40,
        step_tokens_max in 16_u32..300,
        running_max in 1_u32..6,
        waiting_max in prop::option::of(0_u32..5),
    ) {
        let limits = Limits { block_tokens: 32, kv_blocks, step_tokens_max, running_max, waiting_max };
        for (name, mut scheduler) in all(limits) {
            let mut now = Moment::default();
            let mut out = Vec::new();
            let mut expected: HashMap<JobId, u32> = HashMap::new();
            let mut cancelled = Vec::new();
            for (id, deed) in (0..).zip(deeds.clone()) {
                match deed {
                    Deed::Submit { first, tokens, output } => {
                        if scheduler.submit(now, job(id, unlike(first, tokens), output), &mut out).is_ok() {
                            expected.insert(JobId(id), output);
                        }
                    }
                    Deed::Cancel(id) => {
                        scheduler.cancel(now, JobId(id), &mut out);
                        cancelled.push(JobId(id));
                    }
                    Deed::Pass { ms } => {
                        now = now.plus(Duration::from_millis(u64::from(ms)));
                        scheduler.advance(now, &mut out);
                    }
                    Deed::Clear => scheduler.clear_cache(),
                }
                let gauges = scheduler.gauges();
                prop_assert!((0.0..=1.0).contains(&gauges.kv_ratio), "{}: {:?}", name, gauges);
                prop_assert!(name == "fifo" || gauges.running <= running_max);
                let idle = gauges.running + gauges.waiting == 0;
                prop_assert!(idle || scheduler.next_at().is_some(), "{} is stuck: {:?}", name, gauges);
            }
            run(&mut scheduler, &mut out);
            prop_assert_eq!(scheduler.gauges(), Gauges::default(), "{}", name);
            let mut got: HashMap<JobId, u32> = HashMap::new();
            let mut last_at = Moment::default();
            for event in &out {
                let (Event::Started { at, .. } | Event::Fetch { at, .. } | Event::Tokens { at, .. }) = event;
                prop_assert!(*at >= last_at, "{}: time runs backwards", name);
                last_at = *at;
                if let Event::Tokens { job, count, last, .. } = event {
                    let said = got.entry(*job).or_default();
                    *said += count;
                    prop_assert_eq!(*last, *said == expected[job], "{}", name);
                }
            }
            for (job, output) in expected {
                if !cancelled.contains(&job) {
                    prop_assert_eq!(got.get(&job), Some(&output), "{}: {:?}", name, job);
                }
            }
        }
    }
}
