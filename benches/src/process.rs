//! A child process, what it has cost so far, and its certain end.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;

/// A running process; killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    ending: Ending,
    command_line: String,
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
        Self::spawn(command.stdout(Stdio::null()))
    }

    /// The same with all that it prints in a file.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn start_logged(command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        let log = fs::File::create(log)?;
        Self::spawn(command.stdout(log.try_clone()?).stderr(log))
    }

    fn spawn(command: &mut Command) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.stdin(Stdio::null()).spawn().with_context(|| format!("starting {name}"))?;
        let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
        let command_line = std::iter::once(name).chain(words).collect::<Vec<_>>().join(" ");
        Ok(Self { child, ending: Ending::Kill, command_line })
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

    /// What was typed to start it.
    pub fn command_line(&self) -> &str {
        &self.command_line
    }

    /// CPU time spent so far by it and its descendants that live, by the kernel's clock of each process.
    ///
    /// # Errors
    /// When the process is gone, or there is no `/proc`.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        let clock_of = |pid: &u32| cpu_of(*pid).unwrap_or_default();
        Ok(self.tree()?.iter().map(clock_of).sum())
    }

    /// Its resident memory, by Linux's count.
    ///
    /// # Errors
    /// When the process is gone, or there is no `/proc`.
    pub fn resident_bytes(&self) -> anyhow::Result<u64> {
        memory_bytes(&self.child.id().to_string(), "VmRSS:")
    }

    /// The most resident memory that it and its descendants have had since [`Self::forget_peak`], summed: pages that
    /// several share count for each.
    ///
    /// # Errors
    /// When the process is gone, or there is no `/proc`.
    pub fn peak_resident_bytes(&self) -> anyhow::Result<u64> {
        let peak_of = |pid: &u32| memory_bytes(&pid.to_string(), "VmHWM:").unwrap_or_default();
        Ok(self.tree()?.iter().map(peak_of).sum())
    }

    /// Begins [`Self::peak_resident_bytes`] anew.
    ///
    /// # Errors
    /// When the process is gone, or may not be touched.
    pub fn forget_peak(&self) -> anyhow::Result<()> {
        /// See `proc_pid_clear_refs(5)`.
        const RESET_PEAK: &str = "5";
        for pid in self.tree()? {
            fs::write(format!("/proc/{pid}/clear_refs"), RESET_PEAK)?;
        }
        Ok(())
    }

    /// It and its descendants that live.
    fn tree(&self) -> anyhow::Result<Vec<u32>> {
        tree(self.child.id())
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

/// The process `root` and its descendants.
fn tree(root: u32) -> anyhow::Result<Vec<u32>> {
    let mut parents: BTreeMap<u32, u32> = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Ok(pid) = String::from_utf8_lossy(name.as_bytes()).parse::<u32>() else { continue };
        // A process may end between the listing and the look.
        if let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat"))
            && let Some(parent) = parent(&stat)
        {
            parents.insert(pid, parent);
        }
    }
    anyhow::ensure!(parents.contains_key(&root), "process {root} is gone");
    let belongs = |mut pid: u32| {
        // A chain of parents is not longer than there are processes.
        for _ in 0..parents.len() {
            if pid == root {
                return true;
            }
            match parents.get(&pid) {
                Some(parent) => pid = *parent,
                None => return false,
            }
        }
        false
    };
    Ok(parents.keys().copied().filter(|pid| belongs(*pid)).collect())
}

/// The parent in a line of `/proc/PID/stat`.
fn parent(stat: &str) -> Option<u32> {
    // The name stands in parentheses and may hold anything: count from the last one.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// The CPU time of one process, all threads, those that ended included.
fn cpu_of(pid: u32) -> anyhow::Result<Duration> {
    Ok(clock_getcpuclockid(Pid::from_raw(i32::try_from(pid)?))?.now()?.into())
}

/// This process's own resident memory.
///
/// # Errors
/// When there is no `/proc`.
pub fn own_resident_bytes() -> anyhow::Result<u64> {
    memory_bytes("self", "VmRSS:")
}

fn memory_bytes(process: &str, field: &str) -> anyhow::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).with_context(|| format!("no {field}"))?;
    Ok(kib.trim().parse::<u64>()? << 10)
}

/// This process's own CPU time, all threads.
///
/// # Errors
/// When the kernel has no such clock.
pub fn own_cpu() -> anyhow::Result<Duration> {
    Ok(ClockId::CLOCK_PROCESS_CPUTIME_ID.now()?.into())
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
        assert_eq!(parent(line), Some(7));
        assert_eq!(parent("nonsense"), None);
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

    #[test]
    fn the_peak_begins_anew_and_is_no_less_than_what_is_resident() {
        let process = Process::start(Command::new("sleep").arg("60")).expect("sleep");
        process.forget_peak().expect("may be touched");
        let now = process.resident_bytes().expect("alive");
        assert!(now > 0 && process.peak_resident_bytes().expect("alive") >= now);
    }
}
