//! The ledger: placements, pins and operators' changes, to and from other replicas.

use std::collections::BTreeMap;

use super::{Merged, Router};
use crate::facts::LedgerRecord;
use crate::prefix::Cursor;
use crate::{BlockHash, EndpointId, Moment};

impl Router {
    /// This replica's new records since the last call, oldest first, at most `max` of them.
    pub fn take_ledger(&self, max: usize) -> Vec<LedgerRecord> {
        let mut outgoing = self.outgoing.lock();
        let count = max.min(outgoing.records.len());
        outgoing.records.drain(..count).collect()
    }

    /// Takes in records that another replica told as they came up.
    pub fn merge_ledger(&self, records: &[LedgerRecord], now: Moment) -> Merged {
        let mut merged = Merged::default();
        let tokens_per_block = self.tokens_per_block();
        // In order: a sample is told before its placement and compared without it.
        for record in records {
            match record {
                LedgerRecord::Sample(sample) => {
                    self.compare(sample, now);
                    continue;
                }
                LedgerRecord::Admin(fact) => {
                    merged.changes.extend(self.spread_admin(fact, now));
                    continue;
                }
                LedgerRecord::Place { endpoint, blocks } => {
                    self.shares.note_branches(blocks);
                    if let (Some(endpoint), Some(end)) = (self.view.load().get(*endpoint), blocks.last()) {
                        // With what did not fill a block.
                        let tokens = blocks.len() as f64 * tokens_per_block;
                        self.heard.note(*end, endpoint.slot, tokens as u32, now);
                    }
                }
                _ => {}
            }
            merged.extend(self.merge_snapshot(std::slice::from_ref(record), now));
        }
        merged
    }

    /// Takes in a page of another replica's snapshot. Unlike news, its placements are sets of blocks, not
    /// paths of prompts.
    pub fn merge_snapshot(&self, records: &[LedgerRecord], now: Moment) -> Merged {
        let mut merged = Merged::default();
        let mut view = self.view();
        let tokens_per_block = self.tokens_per_block();
        for record in records {
            let place = match record {
                LedgerRecord::Admin(fact) => {
                    merged.changes.extend(self.apply_admin(fact.clone(), now));
                    view = self.view();
                    continue;
                }
                LedgerRecord::Sample(_) => continue,
                LedgerRecord::Place { endpoint, .. }
                | LedgerRecord::Withdraw { endpoint, .. }
                | LedgerRecord::Clear { endpoint, .. }
                | LedgerRecord::Pin { endpoint, .. } => endpoint,
            };
            let Some(endpoint) = view.get(*place) else {
                self.count_unknown_endpoint();
                merged.ignored += 1;
                continue;
            };
            match record {
                LedgerRecord::Place { blocks, .. } => {
                    self.index.place(blocks, endpoint.slot, now);
                    let tokens = blocks.len().saturating_sub(1) as f64 * tokens_per_block;
                    endpoint.retention().insert(tokens as u64, now);
                }
                LedgerRecord::Withdraw { blocks, .. } => self.index.withdraw(blocks, endpoint.slot),
                LedgerRecord::Clear { .. } => {
                    self.index.clear(endpoint.slot);
                    endpoint.retention().forget();
                    merged.restarted.push(endpoint.id);
                }
                LedgerRecord::Pin { key, .. } => self.sessions.pin(*key, endpoint.id, now),
                LedgerRecord::Admin(_) | LedgerRecord::Sample(_) => {}
            }
        }
        merged
    }

    fn tokens_per_block(&self) -> f64 {
        let rules = self.rules();
        rules.block_bytes as f64 / rules.bytes_per_token
    }

    /// A page of everything this replica believes of caches, pins and the endpoint list, from `cursor`
    /// (the start if `None`) on, about `limit` facts, and where to go on; `None` at the end.
    pub fn snapshot_page(&self, cursor: Option<u64>, limit: usize) -> (Vec<LedgerRecord>, Option<u64>) {
        let mut records = Vec::new();
        if cursor.is_none() {
            records.extend(self.admin_facts().into_iter().map(LedgerRecord::Admin));
            let homes = self.sessions.homes(usize::MAX).into_iter();
            records.extend(homes.map(|(key, endpoint)| LedgerRecord::Pin { key, endpoint }));
        }
        let view = self.view();
        let (pairs, next) = self.index.walk(cursor.map(Cursor::from_raw), limit);
        let mut by_endpoint: BTreeMap<EndpointId, Vec<BlockHash>> = BTreeMap::new();
        for (block, slot) in pairs {
            if let Some(endpoint) = view.endpoints.iter().find(|endpoint| endpoint.slot == slot) {
                by_endpoint.entry(endpoint.id).or_default().push(block);
            }
        }
        records.extend(
            by_endpoint.into_iter().map(|(endpoint, blocks)| LedgerRecord::Place { endpoint, blocks }),
        );
        (records, next.map(Cursor::raw))
    }
}
