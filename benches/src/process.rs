//! A child process, what it has cost so far, and its certain end.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;

/// Ticks per second in `/proc/PID/stat`: 100 on every Linux that has not been built by hand.
const TICKS_PER_SECOND: u64 = 100;

/// A running process; killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    ending: Ending,
}

/// How a process is ended.
#[derive(Debug, Clone, Copy)]
enum Ending {
    /// At once.
    Kill,
    /// By SIGTERM, so that it ends its children.
    Terminate,
}

impl Process {
    /// Starts `command` without input or output.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().with_context(|| format!("starting {name}"))?;
        Ok(Self { child, ending: Ending::Kill })
    }

    /// The same for one that has children: when dropped it is asked to end them and itself.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn start_parent(command: &mut Command) -> anyhow::Result<Self> {
        let mut process = Self::start(command)?;
        process.ending = Ending::Terminate;
        Ok(process)
    }

    /// CPU time spent so far by it and its descendants that live, and by those that ended and were waited
    /// for. Resolution 10 ms.
    ///
    /// # Errors
    /// When the process is gone, or there is no `/proc`.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        tree_cpu(self.child.id())
    }

    /// Its resident memory, by Linux's count.
    ///
    /// # Errors
    /// When the process is gone, or there is no `/proc`.
    pub fn resident_bytes(&self) -> anyhow::Result<u64> {
        resident_bytes(&self.child.id().to_string())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        match self.ending {
            Ending::Kill => drop(self.child.kill()),
            Ending::Terminate => drop(Command::new("kill").arg(self.child.id().to_string()).status()),
        }
        let _ = self.child.wait();
    }
}

/// CPU time of the process `root` and of its descendants.
fn tree_cpu(root: u32) -> anyhow::Result<Duration> {
    let mut ticks_of: BTreeMap<u32, (u32, u64)> = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Ok(pid) = String::from_utf8_lossy(name.as_bytes()).parse::<u32>() else { continue };
        // A process may end between the listing and the look.
        if let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat"))
            && let Some(parent_and_ticks) = parse_stat(&stat)
        {
            ticks_of.insert(pid, parent_and_ticks);
        }
    }
    anyhow::ensure!(ticks_of.contains_key(&root), "process {root} is gone");
    let belongs = |mut pid: u32| {
        // A chain of parents is not longer than there are processes.
        for _ in 0..ticks_of.len() {
            if pid == root {
                return true;
            }
            match ticks_of.get(&pid) {
                Some((parent, _)) => pid = *parent,
                None => return false,
            }
        }
        false
    };
    let ticks: u64 = ticks_of.iter().filter(|(pid, _)| belongs(**pid)).map(|(_, (_, ticks))| ticks).sum();
    Ok(Duration::from_millis(ticks * 1_000 / TICKS_PER_SECOND))
}

/// The parent and the user, system and waited-for children's ticks in a line of `/proc/PID/stat`.
fn parse_stat(stat: &str) -> Option<(u32, u64)> {
    // The name stands in parentheses and may hold anything: count from the last one.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    let ticks = number(11)? + number(12)? + number(13)? + number(14)?;
    Some((u32::try_from(number(1)?).ok()?, ticks))
}

/// This process's own resident memory.
///
/// # Errors
/// When there is no `/proc`.
pub fn own_resident_bytes() -> anyhow::Result<u64> {
    resident_bytes("self")
}

fn resident_bytes(process: &str) -> anyhow::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no VmRSS")?;
    Ok(kib.trim().parse::<u64>()? << 10)
}

/// This process's own CPU time, all threads.
///
/// # Errors
/// When there is no `/proc`.
pub fn own_cpu() -> anyhow::Result<Duration> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let ticks = parse_stat(&stat).context("/proc/self/stat")?.1;
    Ok(Duration::from_millis(ticks * 1_000 / TICKS_PER_SECOND))
}

/// Where `program` is on the path.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Servers live where only the superuser looks by default.
    let more = [Path::new("/usr/sbin"), Path::new("/usr/local/sbin")].map(Path::to_path_buf);
    std::env::split_paths(&path).chain(more).map(|folder| folder.join(program)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_whatever_the_name_of_the_process() {
        let line = "42 (a) b (c) S 7 42 42 0 -1 4194560 100 0 0 0 5 6 1 2 20 0 1 0 100";
        assert_eq!(parse_stat(line), Some((7, 14)));
        assert_eq!(parse_stat("nonsense"), None);
    }

    #[test]
    fn the_cost_of_a_process_includes_its_children() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "(i=0; while [ $i -lt 1000000 ]; do i=$((i+1)); done) & wait"]);
        let process = Process::start(&mut shell).expect("sh");
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        while process.cpu().expect("alive") < Duration::from_millis(50) {
            assert!(std::time::Instant::now() < deadline, "the child's work is never seen");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
