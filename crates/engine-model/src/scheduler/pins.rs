//! Blocks that stay in use behind the jobs that computed them, for another engine to read.

use std::collections::HashMap;

use super::JobId;
use crate::kv::{BlockHash, BlockId, BlockPool};

/// What finished jobs left behind.
#[derive(Clone, Default)]
pub(super) struct Pins {
    held: HashMap<JobId, Vec<BlockId>>,
    blocks: u32,
}

impl Pins {
    /// Keeps blocks that are in use already.
    pub(super) fn keep(&mut self, job: JobId, held: Vec<BlockId>) {
        self.blocks += held.len() as u32;
        self.held.insert(job, held);
    }

    /// Takes the blocks of a prompt into use (named ones that are cached as they are, others filled with it) and
    /// keeps them. Nothing is kept when too few are free.
    pub(super) fn keep_content(
        &mut self,
        job: JobId,
        pool: &mut BlockPool,
        named: &[BlockHash],
        last: Option<BlockHash>,
        spoiled: bool,
    ) {
        let hits = pool.cached_run(named);
        let new = named.len() - hits + usize::from(last.is_some());
        let mut held = Vec::with_capacity(hits + new);
        if !pool.acquire(&named[..hits], new as u32, &mut held) {
            return;
        }
        let content = |hash: BlockHash| if spoiled { hash.spoiled() } else { hash };
        for (&id, &hash) in held.iter().zip(named).skip(hits) {
            pool.name(id, hash, Some(content(hash)));
        }
        if let (Some(hash), Some(&id)) = (last, held.get(named.len())) {
            pool.fill(id, Some(content(hash)));
        }
        self.keep(job, held);
    }

    /// The numbers of a job's blocks, in order; `None` when it keeps none.
    pub(super) fn told(&self, job: JobId) -> Option<Vec<u32>> {
        self.held.get(&job).map(|held| held.iter().map(|id| id.told()).collect())
    }

    /// Gives a job's blocks back; how many they were, `None` when it kept none.
    pub(super) fn release(&mut self, job: JobId, pool: &mut BlockPool) -> Option<u32> {
        let mut held = self.held.remove(&job)?;
        let blocks = held.len() as u32;
        self.blocks -= blocks;
        pool.release(&mut held);
        Some(blocks)
    }

    /// Jobs that keep blocks.
    pub(super) fn jobs(&self) -> u32 {
        self.held.len() as u32
    }

    /// Blocks kept; one that several jobs share counts for each.
    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }
}
