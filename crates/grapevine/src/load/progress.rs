//! The progress bar of a run in a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::plan::Plan;
use super::statistics::Live;

/// How often the bar is drawn: often enough to look alive, rare enough to cost nothing.
const REFRESH: Duration = Duration::from_millis(250);

/// Draws the run's progress until dropped. Nothing is drawn when standard error is not a terminal.
pub(super) async fn show(plan_end: End, live: &Live) {
    let bar = match plan_end {
        End::Requests(total) => ProgressBar::new(total),
        End::Time(time) => ProgressBar::new(time.as_secs()),
        End::Unknown => ProgressBar::no_length(),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{elapsed:>5} [{bar:40}] {pos}/{len}{msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    let guard = ClearOnDrop(bar);
    loop {
        let report = live.report();
        let position = match plan_end {
            End::Time(_) => guard.0.elapsed().as_secs(),
            End::Requests(_) | End::Unknown => live.ended(),
        };
        guard.0.set_position(position);
        let unit = if matches!(plan_end, End::Time(_)) { " s" } else { "" };
        let ttft = report.ttft_ms.p50.map_or(String::new(), |p50| format!(", first token p50 {p50:.0} ms"));
        let hits = report.hit_rate.map_or(String::new(), |rate| format!(", hit rate {rate:.2}"));
        guard.0.set_message(format!(
            "{unit}  {} ok, {} failed, {} in flight{ttft}{hits}",
            report.requests - report.failed(),
            report.failed(),
            live.in_flight(),
        ));
        tokio::time::sleep(REFRESH).await;
    }
}

/// What the bar counts towards.
#[derive(Debug, Clone, Copy)]
pub(super) enum End {
    Requests(u64),
    Time(Duration),
    Unknown,
}

impl End {
    pub(super) fn of(plan: &Plan) -> Self {
        match (plan.requests_total(), plan.limits.run_max) {
            (_, Some(time)) => Self::Time(time),
            (Some(total), None) => Self::Requests(total),
            (None, None) => Self::Unknown,
        }
    }
}

/// Leaves no half-drawn line in front of the result.
struct ClearOnDrop(ProgressBar);

impl Drop for ClearOnDrop {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
