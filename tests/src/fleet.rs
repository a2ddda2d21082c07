//! Engines within the test.

use engine::{Config, Engine, Profile, Route};

/// The model that the engines serve.
pub const MODEL: &str = "sim";

/// Simulated engines, all alike.
pub struct Fleet(Vec<Engine>);

impl Fleet {
    /// `count` engines that answer at once.
    pub async fn instant(count: usize) -> Self {
        Self::of(count, Config::profile(Profile::Instant)).await
    }

    /// `count` engines of this configuration.
    ///
    /// # Panics
    /// If one can't listen.
    pub async fn of(count: usize, config: Config) -> Self {
        let mut engines = Vec::with_capacity(count);
        for _ in 0..count {
            let config = Config { model: MODEL.to_owned(), ..config.clone() };
            engines.push(Engine::start(config).await.expect("an engine starts"));
        }
        Self(engines)
    }

    /// The engines.
    pub fn engines(&self) -> &[Engine] {
        &self.0
    }

    /// Takes one out, to end it in its own way.
    pub fn take(&mut self, at: usize) -> Engine {
        self.0.remove(at)
    }

    /// Their URLs.
    pub fn urls(&self) -> Vec<String> {
        self.0.iter().map(Engine::url).collect()
    }

    /// The engine at `url`.
    ///
    /// # Panics
    /// If it is none of them.
    pub fn at(&self, url: &str) -> &Engine {
        self.0.iter().find(|engine| engine.url() == url).expect("one of the fleet")
    }

    /// Generating requests that each has been sent.
    pub fn requests(&self) -> Vec<u64> {
        let generating = [Route::Chat, Route::Completions, Route::Embeddings, Route::Responses];
        self.0.iter().map(|engine| generating.iter().map(|route| engine.requests(*route)).sum()).collect()
    }

    /// Cached prompt tokens over all prompt tokens.
    pub fn hit_rate(&self) -> f64 {
        let stats: Vec<_> = self.0.iter().map(Engine::stats).collect();
        let cached: u64 = stats.iter().map(|each| each.cached_tokens).sum();
        let prompt: u64 = stats.iter().map(|each| each.prompt_tokens).sum();
        cached as f64 / (prompt as f64).max(1.0)
    }
}
