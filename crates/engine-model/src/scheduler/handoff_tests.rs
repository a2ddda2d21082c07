//! Jobs whose KV is for or from another engine, in virtual time.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use proptest::prelude::*;

use super::tests::{LIMITS, TIMING, all, job, ms, run, token_times, unlike};
use super::*;

/// What a prompt's blocks hold where it was computed, from the last on.
fn kv(prompt: &Prompt, blocks: u32) -> Vec<Option<BlockHash>> {
    let mut all: Vec<_> = prompt.contents().map(Some).collect();
    all.split_off(all.len() - blocks as usize)
}

fn fetches(events: &[Event]) -> Vec<(JobId, u32)> {
    let asked = events.iter().filter_map(|event| match event {
        Event::Fetch { job, blocks, .. } => Some((*job, *blocks)),
        _ => None,
    });
    asked.collect()
}

#[test]
fn a_kept_prompt_can_be_read_block_by_block_until_it_is_released() {
    for (name, mut scheduler) in all(LIMITS) {
        let mut out = Vec::new();
        let prompt = unlike(1, 600);
        scheduler.submit_leg(ms(0.0), job(1, prompt.clone(), 1), Handoff::Keep, &mut out).expect("taken");
        run(&mut scheduler, &mut out);
        let kept = scheduler.kept(JobId(1)).expect("kept");
        assert_eq!(scheduler.contents(&kept), kv(&prompt, 19), "{name}");
        assert_eq!((scheduler.gauges().pinned_jobs, scheduler.gauges().pinned_blocks), (1, 19), "{name}");
        assert!(scheduler.release(ms(1e6), JobId(1), &mut out), "{name}");
        assert!(!scheduler.release(ms(1e6), JobId(1), &mut out), "{name}: twice");
        assert_eq!(scheduler.gauges(), Gauges::default(), "{name}");
    }
}

#[test]
fn a_fetched_prompt_costs_one_decode_and_makes_its_blocks_warm() {
    for (name, mut scheduler) in all(LIMITS).into_iter().take(2) {
        let mut out = Vec::new();
        let prompt = unlike(1, 600);
        scheduler.submit_leg(ms(0.0), job(1, prompt.clone(), 3), Handoff::Fetch, &mut out).expect("taken");
        run(&mut scheduler, &mut out);
        assert_eq!(fetches(&out), [(JobId(1), 19)], "{name}");
        assert_eq!((scheduler.gauges().waiting, scheduler.gauges().fetching), (1, 1), "{name}");
        scheduler.fetched(ms(100.0), JobId(1), &kv(&prompt, 19), &mut out);
        run(&mut scheduler, &mut out);
        assert_eq!(token_times(&out, 1), [112.0, 124.0, 136.0], "{name}");
        let mut out = Vec::new();
        scheduler.submit_leg(ms(1e3), job(2, prompt, 1), Handoff::Fetch, &mut out).expect("taken");
        run(&mut scheduler, &mut out);
        assert_eq!(fetches(&out), [(JobId(2), 1)], "{name}: all but the last block is here");
    }
}

#[test]
fn kept_blocks_can_stop_an_engine_until_they_are_released() {
    let limits = Limits { kv_blocks: 30, ..LIMITS };
    let mut scheduler = Scheduler::new(SchedulerKind::Step, TIMING, limits);
    let mut out = Vec::new();
    scheduler.submit_leg(ms(0.0), job(1, unlike(1, 600), 1), Handoff::Keep, &mut out).expect("taken");
    run(&mut scheduler, &mut out);
    scheduler.submit(ms(1e3), job(2, unlike(2, 600), 1), &mut out).expect("taken");
    run(&mut scheduler, &mut out);
    assert_eq!((scheduler.gauges().waiting, scheduler.next_at()), (1, None));
    scheduler.release(ms(2e3), JobId(1), &mut out);
    run(&mut scheduler, &mut out);
    // 30 ms + 600 x 250 us.
    assert_eq!(token_times(&out, 2), [2_180.0]);
}

#[test]
fn kv_of_another_prompt_is_told_and_spoils_what_is_built_on_it() {
    for (name, mut scheduler) in all(LIMITS) {
        let mut out = Vec::new();
        let (own, other) = (unlike(1, 600), unlike(2, 600));
        scheduler.submit_leg(ms(0.0), job(1, own.clone(), 1), Handoff::Fetch, &mut out).expect("taken");
        scheduler.fetched(ms(1.0), JobId(1), &kv(&other, 19), &mut out);
        run(&mut scheduler, &mut out);
        scheduler.submit(ms(1e3), job(2, own, 1), &mut out).expect("taken");
        scheduler.submit(ms(1e3), job(3, other, 1), &mut out).expect("taken");
        run(&mut scheduler, &mut out);
        let spoiled: HashMap<JobId, bool> = out
            .iter()
            .filter_map(|event| match event {
                Event::Started { job, spoiled, .. } => Some((*job, *spoiled)),
                _ => None,
            })
            .collect();
        let expected = [(JobId(1), true), (JobId(2), true), (JobId(3), false)];
        assert_eq!(spoiled, HashMap::from(expected), "{name}");
    }
}

/// The longest pause between two tokens of a job, in ms.
fn longest_gap(events: &[Event], id: u64) -> f64 {
    token_times(events, id).windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max)
}

#[test]
fn a_long_prompt_makes_those_that_decode_beside_it_wait_and_a_fetched_one_does_not() {
    let beside = |kind, handoff| {
        let timing = Timing { beside_prefill: 4.0, ..TIMING };
        let mut scheduler = Scheduler::new(kind, timing, LIMITS);
        let mut out = Vec::new();
        scheduler.submit(ms(0.0), job(1, unlike(1, 64), 60), &mut out).expect("taken");
        let long = unlike(2, 8_000);
        scheduler.submit_leg(ms(200.0), job(2, long.clone(), 2), handoff, &mut out).expect("taken");
        if handoff == Handoff::Fetch {
            scheduler.fetched(ms(245.0), JobId(2), &kv(&long, 250), &mut out);
        }
        run(&mut scheduler, &mut out);
        longest_gap(&out, 1)
    };
    // A step of 2,048 tokens, one of them a decode, and the prompt's fixed part: 30 + 2,047 x 0.25 + 12 ms.
    assert_eq!(beside(SchedulerKind::Step, Handoff::None), 553.75);
    assert_eq!(beside(SchedulerKind::Fifo, Handoff::None), 4.0 * 12.0);
    // Only the one more that decodes: half of the way to double.
    assert_eq!(beside(SchedulerKind::Step, Handoff::Fetch), 18.0);
    assert_eq!(beside(SchedulerKind::Fifo, Handoff::Fetch), 18.0);
}

proptest! {
    #[test]
    fn nothing_is_held_when_all_have_ended_and_all_are_released(
        steps in prop::collection::vec((0_u8..6, 0_u32..4, 1_u32..300, 1_u32..12, 0_u64..60), 1..60),
        kv_blocks in 12_u32..40,
    ) {
        let limits = Limits { kv_blocks, running_max: 3, ..LIMITS };
        for (name, mut scheduler) in all(limits) {
            let mut now = Moment::default();
            let mut prompts: HashMap<JobId, Prompt> = HashMap::new();
            let (mut out, mut seen) = (Vec::new(), 0);
            let (mut asked, mut ended, mut cancelled) = (Vec::new(), HashSet::new(), HashSet::new());
            for (id, &(what, first, tokens, output, pause_ms)) in (0..).zip(&steps) {
                now = now.plus(Duration::from_millis(pause_ms));
                let handoff = match what {
                    0 => Handoff::None,
                    1 | 2 => Handoff::Keep,
                    _ => Handoff::Fetch,
                };
                let prompt = unlike(first, tokens);
                if scheduler.submit_leg(now, job(id, prompt.clone(), output), handoff, &mut out).is_ok() {
                    prompts.insert(JobId(id), prompt);
                }
                match what {
                    // An older job ends early, one's KV comes (right or wrong), or one is let go.
                    3 => {
                        let victim = JobId(u64::from(first) * 3);
                        cancelled.insert(victim);
                        scheduler.cancel(now, victim, &mut out);
                    }
                    4 if !asked.is_empty() => {
                        let (job, blocks): (JobId, u32) = asked.remove(0);
                        let source = if output % 2 == 0 { prompts[&job].clone() } else { unlike(9, 320) };
                        let mut contents = kv(&source, blocks.min(source.block_count(LIMITS.block_tokens)));
                        contents.resize(blocks as usize, None);
                        scheduler.fetched(now, job, &contents, &mut out);
                    }
                    5 => {
                        scheduler.release(now, JobId(u64::from(first)), &mut out);
                    }
                    _ => {}
                }
                asked.extend(fetches(&out[seen..]));
                seen = out.len();
                let gauges = scheduler.gauges();
                prop_assert!((0.0..=1.0).contains(&gauges.kv_ratio), "{}: {:?}", name, gauges);
            }
            // Whatever is still asked for comes, and whatever is kept is let go, until nothing is left.
            for _ in 0..=3 * steps.len() {
                if scheduler.gauges() == Gauges::default() {
                    break;
                }
                if let Some(at) = scheduler.next_at() {
                    now = now.max(at);
                }
                run(&mut scheduler, &mut out);
                now = now.plus(Duration::from_secs(1_000));
                asked.extend(fetches(&out[seen..]));
                seen = out.len();
                for (job, blocks) in asked.drain(..) {
                    let contents = kv(&prompts[&job], blocks);
                    scheduler.fetched(now, job, &contents, &mut out);
                }
                for &job in prompts.keys() {
                    scheduler.release(now, job, &mut out);
                }
            }
            prop_assert_eq!(scheduler.gauges(), Gauges::default(), "{}", name);
            for event in &out {
                if let Event::Tokens { job, last: true, .. } = event {
                    prop_assert!(ended.insert(*job), "{}: {:?} ended twice", name, job);
                }
            }
            for job in prompts.keys() {
                prop_assert!(ended.contains(job) || cancelled.contains(job), "{}: {:?} never ended", name, job);
            }
        }
    }
}
