//! `explain`: shows what a replica would decide for a body, without sending it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::fetch;

/// How long a replica may take to explain.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// What `explain` takes.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// A replica's admin address, such as http://127.0.0.1:9090
    #[arg(long)]
    admin: String,
    /// File with the request body; - for standard input
    #[arg(long)]
    body: PathBuf,
    /// The route that the body is for
    #[arg(long, default_value = "/v1/chat/completions")]
    route: String,
    /// File with the admin token
    #[arg(long)]
    admin_token_file: Option<PathBuf>,
    /// Print the JSON as it came
    #[arg(long)]
    json: bool,
}

/// Asks, and prints the answer as a table.
///
/// # Errors
/// When the body can't be read, the replica can't be reached, or it refuses.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let body = if options.body.as_os_str() == "-" {
        std::io::read_to_string(std::io::stdin()).context("standard input can't be read")?.into_bytes()
    } else {
        std::fs::read(&options.body).with_context(|| format!("{} can't be read", options.body.display()))?
    };
    let token = match &options.admin_token_file {
        Some(file) => {
            Some(std::fs::read_to_string(file).with_context(|| format!("{} can't be read", file.display()))?)
        }
        None => None,
    };
    let url = format!("{}/explain?route={}", options.admin.trim_end_matches('/'), options.route);
    let reply = fetch::post(&url, body, token.as_deref().map(str::trim), WAIT_MAX).await?;
    let answer: Value = serde_json::from_slice(&reply.body).context("the replica's answer is not JSON")?;
    if reply.status != 200 {
        bail!("{} {}", reply.status, answer["error"]["message"].as_str().unwrap_or_default());
    }
    if options.json {
        println!("{answer:#}");
    } else {
        print!("{}", table(&answer));
    }
    Ok(())
}

fn table(answer: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let mut out = format!(
        "policy {}, reason {}: {}\n\n{:<40} {:>10} {:>10} {:>8} {:>9}  dropped by\n",
        text(&answer["policy"]),
        text(&answer["reason"]),
        text(&answer["chosen"]),
        "endpoint",
        "cost ms",
        "wait ms",
        "warm",
        "uncached"
    );
    for candidate in answer["candidates"].as_array().into_iter().flatten() {
        let number = |key: &str| candidate[key].as_f64().unwrap_or(0.0);
        out.push_str(&format!(
            "{:<40} {:>10.2} {:>10.2} {:>8.0} {:>9.0}  {}\n",
            text(&candidate["url"]),
            number("cost_ms"),
            number("wait_ms"),
            number("warm_tokens"),
            number("uncached_tokens"),
            text(&candidate["dropped_by"]),
        ));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_row_for_every_candidate_and_names_the_filter_that_dropped_it() {
        let answer = serde_json::json!({"policy": "cost", "reason": "warm", "chosen": "http://a:1", "candidates": [
            {"url": "http://a:1", "cost_ms": 1.5, "wait_ms": 0.0, "warm_tokens": 128, "uncached_tokens": 4, "dropped_by": null},
            {"url": "http://b:1", "cost_ms": 9.0, "wait_ms": 7.0, "warm_tokens": 0, "uncached_tokens": 132, "dropped_by": "queue-percentile"}]});
        let shown = table(&answer);
        assert_eq!(shown.lines().count(), 5);
        assert!(
            shown
                .lines()
                .last()
                .is_some_and(|line| line.starts_with("http://b:1") && line.ends_with("queue-percentile"))
        );
    }
}
