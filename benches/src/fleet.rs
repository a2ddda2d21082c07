//! Simulated engines on a thread of their own, away from whoever measures them.

use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use anyhow::Context as _;
use engine::{Config, Engine, Route, Stats};
use tokio::sync::oneshot;

/// Running engines; gone when dropped.
pub struct Fleet {
    engines: Arc<[Engine]>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Fleet {
    /// Starts one engine for each of `configs`.
    ///
    /// # Errors
    /// When one can't listen.
    pub fn start(configs: Vec<Config>) -> anyhow::Result<Self> {
        let (started, engines) = mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("engines".to_owned()).spawn(move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return drop(started.send(Err(error.into()))),
            };
            runtime.block_on(async {
                // Receivers that are gone want no engines.
                let _ = started.send(start_all(configs).await);
                let _ = stopped.await;
            });
        })?;
        let engines = engines.recv().context("the engines' thread ended")??;
        Ok(Self { engines: engines.into(), stop: Some(stop), thread: Some(thread) })
    }

    /// Where they listen.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.engines.iter().map(Engine::addr).collect()
    }

    /// Chat requests that each has got.
    pub fn chats(&self) -> Vec<u64> {
        self.engines.iter().map(|engine| engine.requests(Route::Chat)).collect()
    }

    /// What each has done.
    pub fn stats(&self) -> Vec<Stats> {
        self.engines.iter().map(Engine::stats).collect()
    }
}

async fn start_all(configs: Vec<Config>) -> anyhow::Result<Vec<Engine>> {
    let mut engines = Vec::with_capacity(configs.len());
    for config in configs {
        engines.push(Engine::start(config).await?);
    }
    Ok(engines)
}

impl Drop for Fleet {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic there was printed there.
            let _ = thread.join();
        }
    }
}
