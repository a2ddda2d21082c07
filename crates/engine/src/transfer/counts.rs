//! What is counted of KV that moves between engines, and how it is shown: under vLLM's names, and what has none
//! there under `sim:`.

use std::time::Duration;

use super::Connector;
use super::courier::Transferred;
use super::pinned::Released;
use crate::measures::{Histogram, Page, family, line};

/// Bucket bounds of the transfer histograms, those of vLLM 0.32.0.
const TRANSFER_S: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0];
const TRANSFER_BYTES: &[f64] = &[
    2_048.0,
    8_192.0,
    32_768.0,
    131_072.0,
    524_288.0,
    2_097_152.0,
    8_388_608.0,
    33_554_432.0,
    134_217_728.0,
    536_870_912.0,
    2_147_483_648.0,
    8_589_934_592.0,
];

/// What one rank has counted.
#[derive(Clone)]
pub(crate) struct KvCounts {
    /// Finished prefills whose blocks were kept.
    pub(crate) staged: u64,
    released: [u64; Released::ALL.len()],
    /// Prompt tokens that came from other engines, for requests that still wanted them.
    pub(crate) fetched_tokens: u64,
    /// Sequences that were answered from KV that was not their own.
    pub(crate) spoiled: u64,
    pub(crate) transfers_failed: u64,
    pub(crate) notifications_failed: u64,
    time: Histogram,
    bytes: Histogram,
}

impl KvCounts {
    pub(crate) fn new() -> Self {
        Self {
            staged: 0,
            released: [0; Released::ALL.len()],
            fetched_tokens: 0,
            spoiled: 0,
            transfers_failed: 0,
            notifications_failed: 0,
            time: Histogram::new(TRANSFER_S),
            bytes: Histogram::new(TRANSFER_BYTES),
        }
    }

    pub(crate) fn release(&mut self, why: Released) {
        self.released[why as usize] += 1;
    }

    pub(crate) fn released(&self, why: Released) -> u64 {
        self.released[why as usize]
    }

    pub(crate) fn transferred(&mut self, transferred: &Transferred, token_bytes: u32) {
        let Transferred { tokens, took, told } = *transferred;
        self.time.observe(Duration::as_secs_f64(&took));
        self.bytes.observe(f64::from(tokens) * f64::from(token_bytes));
        self.notifications_failed += u64::from(!told);
    }

    pub(crate) fn transfers(&self) -> u64 {
        self.time.count()
    }
}

impl Page<'_> {
    /// Appends what an engine with a connector shows; vLLM's own names only for the connector that has them.
    pub(crate) fn transfers(&self, out: &mut String, connector: Connector) {
        if connector == Connector::Nixl {
            self.nixl(out);
        }
        if connector != Connector::None {
            self.own(out);
        }
    }

    fn nixl(&self, out: &mut String) {
        let help = "Histogram of transfer duration for NIXL KV Cache transfers.";
        self.histograms(out, "nixl_xfer_time_seconds", help, |measures| &measures.kv.time);
        let help = "Histogram of bytes transferred per NIXL KV Cache transfers.";
        self.histograms(out, "nixl_bytes_transferred", help, |measures| &measures.kv.bytes);
        let help = "Number of failed NIXL KV Cache transfers.";
        self.each(out, "nixl_num_failed_transfers_total", "counter", help, |rank| {
            rank.measures.kv.transfers_failed as f64
        });
        let help = "Number of failed NIXL KV Cache notifications.";
        self.each(out, "nixl_num_failed_notifications_total", "counter", help, |rank| {
            rank.measures.kv.notifications_failed as f64
        });
        let help = "Number of requests that had their KV expire.";
        self.each(out, "nixl_num_kv_expired_reqs_total", "counter", help, |rank| {
            rank.measures.kv.released(Released::Expired) as f64
        });
    }

    fn own(&self, out: &mut String) {
        let help = "Blocks kept for other engines; one that several requests share counts for each.";
        self.each_own(out, "kv_pinned_blocks", "gauge", help, |rank| f64::from(rank.gauges.pinned_blocks));
        let help = "Finished prefills whose blocks are kept for other engines.";
        self.each_own(out, "kv_pinned_requests", "gauge", help, |rank| f64::from(rank.gauges.pinned_jobs));
        let help = "Sequences that wait for KV from other engines.";
        self.each_own(out, "kv_fetching_requests", "gauge", help, |rank| f64::from(rank.gauges.fetching));
        let help = "Finished prefills whose blocks were kept.";
        self.each_own(out, "kv_staged_total", "counter", help, |rank| rank.measures.kv.staged as f64);
        let help = "Sequences answered from KV that was not their own.";
        self.each_own(out, "kv_spoiled_total", "counter", help, |rank| rank.measures.kv.spoiled as f64);
        family(out, "sim:kv_released_total", "counter", "Kept prefills that were let go, by reason.");
        for (index, rank) in self.ranks.iter().enumerate() {
            for why in Released::ALL {
                let labels = format!("engine=\"{index}\",{},reason=\"{}\"", self.model_label(), why.label());
                line(out, "sim:kv_released_total", &labels, rank.measures.kv.released(why) as f64);
            }
        }
        family(out, "sim:bootstrap_rooms", "gauge", "Bootstrap rooms in which a leg is.");
        line(out, "sim:bootstrap_rooms", &self.model_label(), self.rooms as f64);
    }
}
