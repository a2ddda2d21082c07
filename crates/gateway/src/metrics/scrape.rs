//! The metrics page, and the gauges that are read when it is asked for.

use std::sync::Arc;

use prometheus::TextEncoder;
use routing::endpoint::Usable;
use routing::{Moment, Router};

use super::Metrics;
use crate::state::GatewayState;

/// Figures of the gossip, the actors and the log, which the gateway does not know.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GossipGauges {
    /// Since each live replica's last heartbeat, in s, by replica.
    pub age_seconds: Vec<(String, f64)>,
    /// Bytes sent so far.
    pub bytes_sent: u64,
    /// Datagrams and pulls thrown away so far, by cause; causes that never came up are left out.
    pub rejected: Vec<(&'static str, u64)>,
    /// Times that what a peer said had to wait because too much waited before it.
    pub peer_events_delayed: u64,
    /// Share of requests on which replicas disagree, 0 to 1; `None` while nothing was compared.
    pub disagreement_ratio: Option<f64>,
    /// Messages that found a mailbox full, by kind of actor (lifecycles left out).
    pub overloads: Vec<(&'static str, u64)>,
    /// Actors recreated after a panic, by kind (lifecycles left out).
    pub recreated: Vec<(&'static str, u64)>,
    /// Log lines lost so far because the log was not taken fast enough.
    pub log_lines_dropped: u64,
}

/// Where those figures come from; asked once per scrape.
pub type Gauges = Arc<dyn Fn() -> GossipGauges + Send + Sync>;

impl Metrics {
    /// The page, with its gauges as they are now.
    pub(crate) fn page(
        &self,
        state: &GatewayState,
        gossip: &GossipGauges,
    ) -> Result<String, prometheus::Error> {
        self.read_router(&state.router, state.clock.now());
        self.read_gossip(gossip);
        let counts = state.lifecycles.counts();
        self.requests_in_flight.set(signed(state.lifecycles.table().in_flight()));
        self.body_bytes.set(state.body_room.taken().try_into().unwrap_or(i64::MAX));
        self.session_actors.set(signed(state.sessions.actors()));
        raise(&self.mailbox_overload.with_label_values(&["lifecycle"]), counts.overloads());
        raise(&self.actors_recreated.with_label_values(&["lifecycle"]), counts.recreated());
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }

    fn read_router(&self, router: &Router, now: Moment) {
        let stats = router.stats();
        self.index_bytes.set(signed(stats.index_bytes));
        raise(&self.index_evicted, stats.index_evicted);
        self.sessions.set(signed(stats.sessions));
        raise(&self.sessions_evicted, stats.sessions_evicted);
        self.admin_facts.set(signed(stats.admin_facts));
        raise(&self.admin_facts_refused, stats.admin_facts_refused);
        let queue = router.queue_stats();
        self.queue_requests.set(signed(queue.requests));
        self.queue_bytes.set(i64::try_from(queue.bytes).unwrap_or(i64::MAX));
        self.queue_requests_elsewhere.set(i64::from(router.queued_elsewhere()));
        raise(&self.ledger_dropped, stats.ledger_overflow);
        self.kv_staged_heard.set(signed(stats.staged_heard));
        raise(&self.kv_staged_untold, stats.staged_untold);
        // Endpoints that are gone must not linger on the page.
        self.endpoint_running.reset();
        self.endpoint_up.reset();
        for endpoint in &router.view().endpoints {
            let label = endpoint.spec.label();
            let role = endpoint.spec.role.as_str();
            self.endpoint_running.with_label_values(&[&label, role]).set(i64::from(endpoint.running(now)));
            let up = endpoint.usable() != Usable::No;
            self.endpoint_up.with_label_values(&[&label]).set(i64::from(up));
        }
    }

    fn read_gossip(&self, gossip: &GossipGauges) {
        self.gossip_age_seconds.reset();
        for (replica, age) in &gossip.age_seconds {
            self.gossip_age_seconds.with_label_values(&[replica]).set(*age);
        }
        raise(&self.gossip_bytes, gossip.bytes_sent);
        raise(&self.log_lines_dropped, gossip.log_lines_dropped);
        for (cause, count) in &gossip.rejected {
            raise(&self.gossip_rejected.with_label_values(&[cause]), *count);
        }
        raise(&self.peer_events_delayed, gossip.peer_events_delayed);
        if let Some(ratio) = gossip.disagreement_ratio {
            self.disagreement_ratio.set(ratio);
        }
        for (actor, count) in &gossip.overloads {
            raise(&self.mailbox_overload.with_label_values(&[actor]), *count);
        }
        for (actor, count) in &gossip.recreated {
            raise(&self.actors_recreated.with_label_values(&[actor]), *count);
        }
    }
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Brings a counter up to a total that is counted elsewhere.
fn raise(counter: &prometheus::IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}
