//! How split requests spend their time, from the metrics of all replicas together.

use std::fmt;
use std::time::Duration;

use super::cluster::Replicas;
use crate::fetch;

/// How long a replica may take to say.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// Counts of decisions and mean times of phases.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Phases {
    split: f64,
    whole: f64,
    prefill: Mean,
    handoff: Mean,
    decode: Mean,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Mean {
    seconds: f64,
    count: f64,
}

impl Phases {
    /// Asks all replicas; one that does not answer is left out.
    pub(super) async fn read(replicas: &Replicas) -> Self {
        let mut phases = Self::default();
        for ports in replicas.ports() {
            let url = format!("http://{}/metrics", ports.admin);
            if let Ok(reply) = fetch::get(&url, None, ANSWER_WITHIN).await {
                phases.add(&String::from_utf8_lossy(&reply.body));
            }
        }
        phases
    }

    fn add(&mut self, page: &str) {
        for line in page.lines() {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let (Some(series), Ok(value)) = (series.strip_prefix("grapevine_"), value.parse::<f64>()) else {
                continue;
            };
            if series.starts_with("pd_split_total") {
                let split = series.contains("split=\"yes\"");
                *(if split { &mut self.split } else { &mut self.whole }) += value;
            }
            let Some(rest) = series.strip_prefix("request_phase_seconds_") else { continue };
            // Of those that were served whole nothing is shown.
            let mean = match rest {
                rest if rest.contains("phase=\"prefilling\",role=\"prefill\"") => &mut self.prefill,
                rest if rest.contains("phase=\"handed-off\"") => &mut self.handoff,
                rest if rest.contains("phase=\"decoding\",role=\"decode\"") => &mut self.decode,
                _ => continue,
            };
            if rest.starts_with("sum") {
                mean.seconds += value;
            } else if rest.starts_with("count") {
                mean.count += value;
            }
        }
    }
}

impl fmt::Display for Phases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "split {:.0} of {:.0}  prefill {} ms  handoff {} ms  decode {} ms",
            self.split,
            self.split + self.whole,
            self.prefill,
            self.handoff,
            self.decode
        )
    }
}

impl fmt::Display for Mean {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.count > 0.0 {
            write!(f, "{:.0}", self.seconds * 1_000.0 / self.count)
        } else {
            f.write_str("-")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_several_replicas_are_added_up() {
        let page = "# TYPE grapevine_pd_split_total counter\n\
                    grapevine_pd_split_total{reason=\"paid\",split=\"yes\"} 3\n\
                    grapevine_pd_split_total{reason=\"warm\",split=\"no\"} 1\n\
                    grapevine_request_phase_seconds_bucket{phase=\"handed-off\",role=\"decode\",le=\"1\"} 3\n\
                    grapevine_request_phase_seconds_sum{phase=\"handed-off\",role=\"decode\"} 0.06\n\
                    grapevine_request_phase_seconds_count{phase=\"handed-off\",role=\"decode\"} 3\n\
                    grapevine_request_phase_seconds_sum{phase=\"prefilling\",role=\"decode\"} 9\n";
        let mut phases = Phases::default();
        phases.add(page);
        phases.add(page);
        assert_eq!(phases.to_string(), "split 6 of 8  prefill - ms  handoff 20 ms  decode - ms");
    }
}
