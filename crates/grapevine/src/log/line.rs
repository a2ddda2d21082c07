//! A line of the text log, made cheaply: there is one for every request.
//!
//! It reads as `tracing_subscriber`'s own do, without colours, and costs a quarter: no styles, and no formatting
//! machinery for what is plain. Spans are not shown; nothing here makes any.

use std::fmt::{self, Write as _};
use std::time::SystemTime;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Makes the lines.
pub(super) struct Line;

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        write!(out, "{}", humantime::format_rfc3339_micros(SystemTime::now()))?;
        out.write_str(level(*event.metadata().level()))?;
        let mut fields = Fields { out: &mut out, result: Ok(()) };
        event.record(&mut fields);
        fields.result?;
        out.write_char('\n')
    }
}

const fn level(level: Level) -> &'static str {
    match level {
        Level::ERROR => " ERROR",
        Level::WARN => "  WARN",
        Level::INFO => "  INFO",
        Level::DEBUG => " DEBUG",
        Level::TRACE => " TRACE",
    }
}

/// Writes an event's message and fields.
struct Fields<'a, W> {
    out: &'a mut W,
    result: fmt::Result,
}

impl<W: fmt::Write> Fields<'_, W> {
    /// Writes a field by `write`, unless something before it failed.
    fn put(&mut self, field: &Field, write: impl FnOnce(&mut W) -> fmt::Result) {
        if self.result.is_ok() {
            self.result = self.out.write_char(' ').and_then(|()| {
                if field.name() != "message" {
                    self.out.write_str(field.name())?;
                    self.out.write_char('=')?;
                }
                write(self.out)
            });
        }
    }
}

impl<W: fmt::Write> Visit for Fields<'_, W> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, |out| write!(OneLine(out), "{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, |out| {
            if field.name() == "message" {
                OneLine(out).write_str(value)
            } else if value.bytes().all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\')) {
                out.write_char('"')?;
                out.write_str(value)?;
                out.write_char('"')
            } else {
                write!(out, "{value:?}")
            }
        });
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, |out| out.write_str(itoa::Buffer::new().format(value)));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, |out| write_number(out, value));
    }
}

/// Writes text without what would end the line or command the terminal that shows it: clients have a say in
/// some of it.
struct OneLine<'a, W>(&'a mut W);

impl<W: fmt::Write> fmt::Write for OneLine<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // 0xc2 begins the other half of the control characters, among others.
        if !text.bytes().any(|byte| byte.is_ascii_control() || byte == 0xc2) {
            return self.0.write_str(text);
        }
        text.chars().try_for_each(|each| match each.is_control() {
            true => write!(self.0, "{}", each.escape_debug()),
            false => self.0.write_char(each),
        })
    }
}

/// As `{value:?}`, but quick where three decimals say all: milliseconds that were counted in microseconds.
fn write_number(out: &mut impl fmt::Write, value: f64) -> fmt::Result {
    /// Far below where neighbouring numbers lie a thousandth apart.
    const QUICK_MAX: f64 = 1e9;
    let thousandths = (value * 1e3).round();
    // The nearest number to these decimals is the value, so they are its shortest form.
    let is_quick =
        (0.0..QUICK_MAX).contains(&value) && value.is_sign_positive() && thousandths / 1e3 == value;
    if !is_quick {
        return write!(out, "{value:?}");
    }
    let thousandths = thousandths as u64;
    out.write_str(itoa::Buffer::new().format(thousandths / 1_000))?;
    let rest = (thousandths % 1_000) as u16;
    let digits = [b'.', b'0' + (rest / 100) as u8, b'0' + (rest / 10 % 10) as u8, b'0' + (rest % 10) as u8];
    let shown = match digits {
        [.., b'0', b'0'] => &digits[..2],
        [.., b'0'] => &digits[..3],
        _ => &digits[..],
    };
    out.write_str(std::str::from_utf8(shown).map_err(|_| fmt::Error)?)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no panic").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Kept {
        /// What was written, without the times.
        fn lines(&self) -> Vec<String> {
            let text = String::from_utf8(self.0.lock().expect("no panic").clone()).expect("text");
            text.lines().map(|line| line["2026-11-30T17:40:18.379393Z".len()..].to_owned()).collect()
        }
    }

    fn say_everything(text: &str, number: f64) {
        tracing::info!(
            id = "plain",
            text,
            number,
            none = None::<f64>,
            some = Some(7_u32),
            signed = -3,
            truth = true,
            shown = %"shown",
            told = ?Some("told"),
            "request"
        );
        tracing::warn!(big = u64::MAX, "{text} in words");
        tracing::error!("alone");
        tracing::debug!(number);
        tracing::trace!(text);
    }

    fn check(text: &str, number: f64) {
        let (ours, theirs) = (Kept::default(), Kept::default());
        let (to_ours, to_theirs) = (ours.clone(), theirs.clone());
        let wide = tracing_subscriber::fmt().with_max_level(Level::TRACE).with_ansi(false);
        let subscriber = wide.event_format(Line).with_writer(move || to_ours.clone()).finish();
        tracing::subscriber::with_default(subscriber, || say_everything(text, number));
        let wide = tracing_subscriber::fmt().with_max_level(Level::TRACE).with_ansi(false).with_target(false);
        let subscriber = wide.with_writer(move || to_theirs.clone()).finish();
        tracing::subscriber::with_default(subscriber, || say_everything(text, number));
        assert_eq!(ours.lines(), theirs.lines());
        assert!(ours.lines().len() >= 5, "all levels");
    }

    #[test]
    fn lines_read_as_those_of_tracing_subscriber() {
        for text in ["", "plain", "with \"quotes\" and \\", "Zürich & \u{a0}漢字", "'"] {
            for number in
                [0.0, -0.0, 0.015, 1.403, 12.0, 0.1, 1e9, 123_456.789, 1e-7, f64::NAN, f64::INFINITY]
            {
                check(text, number);
            }
        }
    }

    #[test]
    fn an_event_is_one_line_without_commands_whatever_it_tells() {
        let kept = Kept::default();
        let writer = kept.clone();
        let subscriber =
            tracing_subscriber::fmt().event_format(Line).with_writer(move || writer.clone()).finish();
        let text = "one\r\ntwo \u{1b}[31m \u{9b}31m \u{7f}";
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(text, shown = %text, told = ?text, "{text}");
        });
        let lines = kept.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(!lines[0].chars().any(char::is_control), "{lines:?}");
        assert_eq!(lines[0].matches("\\r\\ntwo").count(), 4, "{lines:?}");
    }

    #[test]
    fn the_time_is_utc_to_the_microsecond() {
        let kept = Kept::default();
        let writer = kept.clone();
        let subscriber =
            tracing_subscriber::fmt().event_format(Line).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!("one");
            tracing::info!("two");
        });
        let text = String::from_utf8(kept.0.lock().expect("no panic").clone()).expect("text");
        let now = SystemTime::now();
        let mut before = None;
        for line in text.lines() {
            let (time, _) = line.split_once(' ').expect("a time");
            let at = humantime::parse_rfc3339(time).unwrap_or_else(|error| panic!("{line}: {error}"));
            assert!(at <= now && now.duration_since(at).is_ok_and(|ago| ago < Duration::from_secs(60)));
            assert!(before.is_none_or(|before| before <= at));
            before = Some(at);
        }
    }

    proptest! {
        #[test]
        fn numbers_read_as_they_always_do(micros in 0_u64..10_000_000_000_000, any in any::<f64>()) {
            for value in [micros as f64 / 1e3, any] {
                let mut quick = String::new();
                write_number(&mut quick, value).expect("never fails");
                prop_assert_eq!(quick, format!("{value:?}"));
            }
        }
    }
}
