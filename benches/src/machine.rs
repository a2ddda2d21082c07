//! What a run ran on.

use serde::Serialize;

/// The machine, and what else it did.
#[derive(Serialize)]
pub struct Machine {
    /// By the kernel's name for it.
    pub processor: String,
    /// That this process may use.
    pub cores: usize,
    /// Linux's release.
    pub kernel: String,
    /// The load averages before and after: what else ran.
    pub load: [String; 2],
}

impl Machine {
    /// This one, with the load of before.
    pub fn read(load_before: String) -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            processor: model.and_then(|line| line.split_once(": ")).unwrap_or_default().1.to_owned(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: kernel.trim().to_owned(),
            load: [load_before, load()],
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [before, after] = &self.load;
        let Self { processor, cores, kernel, .. } = self;
        writeln!(f, "{cores} cores of {processor}, Linux {kernel}; load {before} before, {after} after")
    }
}

/// The load averages as the kernel tells them.
pub fn load() -> String {
    std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim().to_owned()
}
