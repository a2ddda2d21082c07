//! Reads an engine's own figures from its Prometheus page: vLLM's names (new and old), SGLang's, TRT-LLM's.

/// The figures that routing uses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    /// Requests that the engine runs.
    pub(crate) running: Option<f64>,
    /// Requests that wait in it.
    pub(crate) waiting: Option<f64>,
    /// Share of its KV blocks in use, 0 to 1; of several ranks the mean.
    pub(crate) kv_ratio: Option<f64>,
    /// When its process began, in s since 1970.
    pub(crate) process_start_s: Option<f64>,
    /// A count that only grows within one life of the engine.
    pub(crate) tokens_total: Option<f64>,
}

const RUNNING: &[&str] =
    &["vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running"];
const WAITING: &[&str] =
    &["vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting"];
const KV_RATIO: &[&str] = &[
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "trtllm_kv_cache_utilization",
];
const TOKENS: &[&str] = &["vllm:prompt_tokens_total", "sglang:prompt_tokens_total"];

/// Reads `page`. With `rank`, only samples of that data-parallel rank count (label `engine` or `dp_rank`);
/// without, the ranks are added up.
pub(crate) fn read(page: &str, rank: Option<u16>) -> Figures {
    let mut figures = Figures::default();
    let mut kv_samples = 0_u32;
    for line in page.lines() {
        let Some((name, labels, value)) = sample(line) else { continue };
        if rank.is_some_and(|rank| rank_of(labels).is_some_and(|of| of != rank)) {
            continue;
        }
        let sum = |slot: &mut Option<f64>| *slot = Some(slot.unwrap_or(0.0) + value);
        if RUNNING.contains(&name) {
            sum(&mut figures.running);
        } else if WAITING.contains(&name) {
            sum(&mut figures.waiting);
        } else if KV_RATIO.contains(&name) {
            kv_samples += 1;
            sum(&mut figures.kv_ratio);
        } else if TOKENS.contains(&name) {
            sum(&mut figures.tokens_total);
        } else if name == "process_start_time_seconds" {
            figures.process_start_s = Some(value);
        }
    }
    figures.kv_ratio = figures.kv_ratio.map(|sum| (sum / f64::from(kv_samples.max(1))).clamp(0.0, 1.0));
    figures
}

/// `name{labels} value [timestamp]`; none for comments, blanks and values that are not finite and >= 0.
fn sample(line: &str) -> Option<(&str, &str, f64)> {
    if line.starts_with('#') {
        return None;
    }
    let name_end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(name_end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => rest.split_at(rest.rfind('}')?),
        None => ("", rest),
    };
    let value: f64 = rest.trim_start_matches('}').split_ascii_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some((name, labels, value))
}

fn rank_of(labels: &str) -> Option<u16> {
    labels.split(',').find_map(|label| {
        let (key, value) = label.split_once('=')?;
        matches!(key.trim(), "engine" | "dp_rank").then(|| value.trim_matches('"').parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_RANKS: &str = "# HELP vllm:num_requests_running x\n\
        vllm:num_requests_running{engine=\"0\",model_name=\"m,}\"} 3.0\n\
        vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 4.0\n\
        vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 1.0\n\
        vllm:num_requests_waiting{engine=\"1\",model_name=\"m\"} 0.0\n\
        vllm:kv_cache_usage_perc{engine=\"0\"} 0.2\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.6\n\
        process_start_time_seconds 1.7e9\n";

    #[test]
    fn ranks_are_added_up_unless_one_is_asked_for() {
        let all = read(TWO_RANKS, None);
        assert_eq!((all.running, all.waiting), (Some(7.0), Some(1.0)));
        assert!(all.kv_ratio.is_some_and(|ratio| (ratio - 0.4).abs() < 1e-9));
        assert_eq!(all.process_start_s, Some(1.7e9));
        let one = read(TWO_RANKS, Some(1));
        assert_eq!((one.running, one.waiting, one.kv_ratio), (Some(4.0), Some(0.0), Some(0.6)));
    }

    #[test]
    fn other_engines_and_old_names_are_known() {
        let sglang = read(
            "sglang:num_running_reqs{x=\"y\"} 2\nsglang:num_queue_reqs 5\nsglang:token_usage 0.5\n",
            None,
        );
        assert_eq!((sglang.running, sglang.waiting, sglang.kv_ratio), (Some(2.0), Some(5.0), Some(0.5)));
        let old = read("vllm:gpu_cache_usage_perc{engine=\"0\"} 0.25 1700000000\n", None);
        assert_eq!(old.kv_ratio, Some(0.25));
    }

    #[test]
    fn absent_is_not_zero_and_nonsense_is_absent() {
        let nothing =
            read("hello\n{\nvllm:num_requests_running NaN\nvllm:num_requests_waiting -1\n}{} 3\n", None);
        assert_eq!(nothing, Figures::default());
    }

    #[test]
    fn a_page_of_a_real_engine_is_read() {
        let page = include_str!("../tests/fixtures/vllm_metrics.txt");
        let figures = read(page, None);
        assert!(figures.running.is_some() && figures.waiting.is_some() && figures.kv_ratio.is_some());
        assert!(figures.process_start_s.is_some_and(|start| start > 1e9));
        assert!(figures.tokens_total.is_some());
    }
}
