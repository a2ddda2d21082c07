//! What replicas learn without being asked: each other's words, and looks at the engines.

use std::sync::Arc;
use std::time::Duration;

use routing::facts::{LedgerRecord, ObservedRow};

use super::{Event, Simulation};
use crate::gossip::Fate;
use crate::replicas::{Word, core_time};

/// Between two looks of an engine's scraper at its gauges, as `grapevine serve` has it.
pub(super) const SCRAPE_EVERY: Duration = Duration::from_millis(250);

impl Simulation<'_> {
    /// Something may have changed at a replica: it pushes at once, or as soon as it may again.
    pub(super) fn news_of(&mut self, replica: usize) {
        let Some(every) = self.scenario.gossip.push_every else { return };
        if self.replicas.count() < 2 || self.pushing[replica].due {
            return;
        }
        self.pushing[replica].due = true;
        let earliest = self.pushing[replica].last.map_or(self.now, |last| last.plus(every).max(self.now));
        self.queue.push(earliest, Event::PushDue(replica));
    }

    pub(super) fn push(&mut self, from: usize) {
        let Some(word) = self.replicas.news(from, self.now) else { return };
        self.pushing[from].last = Some(self.now);
        let Word::Push { ledger, load } = &word else { return };
        let blocks: usize = ledger.iter().map(blocks_told).sum();
        let count = self.replicas.count();
        for to in (0..count).filter(|to| *to != from) {
            self.tally.told.pushes += 1;
            self.tally.told.rows += load.rows.len() as u64;
            self.tally.told.blocks += blocks as u64;
            match self.scenario.gossip.push(from, to, count, self.now, &mut self.lots) {
                Fate::Heard { at } => self.queue.push(at, Event::Heard { from, to, word: word.clone() }),
                Fate::Lost { repaired_at } if !ledger.is_empty() => {
                    let word = Word::Repair { ledger: Arc::clone(ledger) };
                    self.queue.push(repaired_at, Event::Heard { from, to, word });
                }
                Fate::Lost { .. } => {}
            }
        }
    }

    pub(super) fn pulse(&mut self, from: usize) {
        let gossip = &self.scenario.gossip;
        // Also without anybody to tell: with its pulse a replica puts into force what it has learned.
        let word = self.replicas.pulse(from, self.now);
        let count = self.replicas.count();
        if gossip.push_every.is_some() {
            for to in (0..count).filter(|to| *to != from) {
                self.tally.told.pulses += 1;
                if let Some(at) = gossip.pulse(from, to, count, self.now, &mut self.lots) {
                    self.queue.push(at, Event::Heard { from, to, word: word.clone() });
                }
            }
        }
        self.queue.push(self.now.plus(gossip.pulse_every), Event::PulseDue(from));
    }

    /// Each engine is looked at by the replica that all agree on; without gossip by every one.
    pub(super) fn scrape(&mut self) {
        let alone = self.scenario.gossip.push_every.is_none();
        for (engine, id) in self.engines.iter().zip(&self.endpoints) {
            let gauges = engine.gauges();
            let row = ObservedRow {
                endpoint: *id,
                age_ms: 0,
                running: gauges.running,
                waiting: gauges.waiting,
                kv_ratio: Some(gauges.kv_ratio as f32),
                engine_epoch: 1,
            };
            for router in &self.replicas.routers {
                if alone || router.scrape_owner(*id).as_ref() == Some(router.own()) {
                    router.observe(&row, core_time(self.now));
                }
            }
        }
        self.queue.push(self.now.plus(SCRAPE_EVERY), Event::Scrape);
    }
}

fn blocks_told(record: &LedgerRecord) -> usize {
    match record {
        LedgerRecord::Place { blocks, .. } | LedgerRecord::Withdraw { blocks, .. } => blocks.len(),
        _ => 0,
    }
}
