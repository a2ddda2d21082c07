//! Looks the seeds up and greets those that are not known yet, for ever.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::time::{Instant, sleep, timeout};

use crate::shared::{Shared, ledger_address};

/// How often unknown seeds are greeted while this replica knows nobody.
const ALONE_EVERY: Duration = Duration::from_millis(200);
/// How often when it knows someone: it heals what was cut apart for so long that it was forgotten.
const EVERY: Duration = Duration::from_secs(1);
/// How often a name is looked up, while nobody is known and afterwards.
const LOOKUP_ALONE_EVERY: Duration = Duration::from_secs(1);
const LOOKUP_EVERY: Duration = Duration::from_secs(30);
const LOOKUP_PATIENCE: Duration = Duration::from_secs(5);
/// Addresses kept for one name; a headless service has one for each replica.
const ADDRESSES_MAX: usize = 256;
/// How often a name that can't be looked up is complained of.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

pub(crate) async fn run(shared: Arc<Shared>) {
    let mut names: HashMap<String, Name> = HashMap::new();
    if shared.config.seeds.is_empty() {
        return;
    }
    loop {
        let alone = shared.directory.targets().is_empty();
        let mut addresses = BTreeSet::new();
        let mut unknown = false;
        for seed in &shared.config.seeds {
            match seed.parse() {
                Ok(address) => drop(addresses.insert(address)),
                Err(_) => {
                    let name = names.entry(seed.clone()).or_default();
                    name.look_up(&shared, seed, alone).await;
                    unknown |= name.addresses.is_empty();
                    addresses.extend(&name.addresses);
                }
            }
        }
        addresses.remove(&shared.advertised);
        let others = addresses.iter().any(|address| !shared.pulse_link.is_echo(address));
        shared.seeded.store(unknown || others, Ordering::Relaxed);
        let live = shared.directory.targets();
        for &address in addresses.iter().filter(|address| !live.contains(address)) {
            shared.pulse_board.greet(address);
            shared.ledger_board.greet(ledger_address(address));
        }
        sleep(if alone { ALONE_EVERY } else { EVERY }).await;
    }
}

#[derive(Default)]
struct Name {
    addresses: Vec<SocketAddr>,
    looked: Option<Instant>,
    complained: Option<Instant>,
}

impl Name {
    async fn look_up(&mut self, shared: &Shared, name: &str, alone: bool) {
        let every = if alone { LOOKUP_ALONE_EVERY } else { LOOKUP_EVERY };
        if self.looked.is_some_and(|at| at.elapsed() < every) {
            return;
        }
        self.looked = Some(Instant::now());
        let error = match timeout(LOOKUP_PATIENCE, lookup_host(name)).await {
            Ok(Ok(addresses)) => {
                self.addresses = addresses.take(ADDRESSES_MAX).collect();
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        // What it last stood for is kept.
        shared.counters.seed_lookups_failed.up();
        if self.complained.is_none_or(|at| at.elapsed() >= COMPLAIN_EVERY) {
            self.complained = Some(Instant::now());
            tracing::warn!(seed = name, error, "a seed's name can't be looked up; trying on");
        }
    }
}
