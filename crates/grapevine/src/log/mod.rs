//! The log: lines are made where something happens and leave on a thread of their own.
//!
//! A request must not wait for whoever reads the log, nor pay a system call for its line. So lines gather in
//! memory for a moment and are written together; a reader that stalls costs lines, which are counted, and never
//! requests. What has gathered is written before the process ends by itself; a SIGKILL loses the last moment.

mod line;

use std::io::{self, IsTerminal as _, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::config::{Config, LogFormat};

/// How long lines gather. 20 ms: nobody who reads along notices, and at a thousand lines a second one write
/// carries twenty.
const GATHER: Duration = Duration::from_millis(20);

/// The most that waits to be written, in bytes. 4 MiB: some 10,000 lines, a second of the busiest replica.
const WAITING_BYTES_MAX: usize = 4 << 20;

/// Memory that is kept once a burst is over, in bytes.
const KEPT_BYTES: usize = 256 << 10;

/// Lines that found no room, in this process: there is one log per process.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Lines that were lost so far because the log was not taken fast enough.
pub fn lines_dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// The log's thread. When dropped, what has gathered is written first.
pub(crate) struct Log {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Starts the log as `config` wants it, on standard error.
///
/// # Errors
/// When there can be no thread for it.
pub(crate) fn start(config: &Config) -> io::Result<Log> {
    let log = Log::to(io::stderr())?;
    // The configuration admits no other filter than one that can be read.
    let filter = EnvFilter::builder().parse_lossy(&config.log);
    let lines =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(Gathering(Arc::clone(&log.shared)));
    match config.log_format {
        LogFormat::Json => lines.json().flatten_event(true).init(),
        LogFormat::Text if io::stderr().is_terminal() => lines.with_target(false).init(),
        LogFormat::Text => lines.with_ansi(false).event_format(line::Line).init(),
    }
    Ok(log)
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    lines: Vec<u8>,
    is_ending: bool,
}

impl Log {
    fn to(out: impl Write + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread = thread::Builder::new().name("log".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.write_all_to(out)
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.shared.waiting.lock().is_ending = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // Should it have panicked, there is nowhere left to say so.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn add(&self, line: &[u8]) {
        let mut waiting = self.waiting.lock();
        if waiting.lines.len() + line.len() > WAITING_BYTES_MAX {
            DROPPED.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let is_first = waiting.lines.is_empty();
        waiting.lines.extend_from_slice(line);
        drop(waiting);
        if is_first {
            self.changed.notify_one();
        }
    }

    fn write_all_to(&self, mut out: impl Write) {
        let mut lines = Vec::new();
        loop {
            let mut waiting = self.waiting.lock();
            while waiting.lines.is_empty() && !waiting.is_ending {
                self.changed.wait(&mut waiting);
            }
            if waiting.lines.is_empty() {
                return;
            }
            if !waiting.is_ending {
                // Nothing but the end notifies while lines wait.
                self.changed.wait_for(&mut waiting, GATHER);
            }
            std::mem::swap(&mut waiting.lines, &mut lines);
            drop(waiting);
            // Standard error may be closed; the replica serves on.
            let _ = out.write_all(&lines);
            lines.clear();
            lines.shrink_to(KEPT_BYTES);
        }
    }
}

/// Where lines are made: each comes whole, in one write.
struct Gathering(Arc<Shared>);

impl<'a> MakeWriter<'a> for Gathering {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> &'a Self {
        self
    }
}

impl Write for &Gathering {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.add(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Tells of each write, and goes on once it may.
    struct Slow(Sender<Vec<u8>>, Receiver<()>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.send(bytes.to_vec());
            let _ = self.1.recv();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_has_gathered_is_written_in_order_before_the_log_ends() {
        let (told, writes) = channel();
        let (go, may) = channel();
        drop(go);
        let log = Log::to(Slow(told, may)).expect("a thread");
        for line in 0..100 {
            writeln!(&Gathering(Arc::clone(&log.shared)), "{line}").expect("never fails");
        }
        drop(log);
        let written: Vec<u8> = writes.iter().flatten().collect();
        let expected: String = (0..100).map(|line| format!("{line}\n")).collect();
        assert_eq!(String::from_utf8_lossy(&written), expected);
    }

    #[test]
    fn a_reader_that_stalls_costs_counted_lines_and_no_waiting() {
        let (told, writes) = channel();
        let (go, may) = channel();
        let log = Log::to(Slow(told, may)).expect("a thread");
        log.shared.add(b"first\n");
        assert_eq!(writes.recv().expect("a write"), b"first\n");
        // The thread now waits in its write.
        let before = lines_dropped();
        let line = vec![b'x'; WAITING_BYTES_MAX / 4];
        for _ in 0..6 {
            log.shared.add(&line);
        }
        assert_eq!(lines_dropped() - before, 2);
        drop(go);
        drop(log);
        assert_eq!(writes.iter().map(|write| write.len()).sum::<usize>(), WAITING_BYTES_MAX);
    }
}
