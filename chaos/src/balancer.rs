//! What stands between clients and replicas: HAProxy with the configuration that this project ships, or the
//! clients' own round-robin where HAProxy is not installed.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::ValueEnum;

const SHIPPED: &str = include_str!("../../deploy/haproxy/grapevine.cfg");

/// What to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Balancing {
    /// HAProxy if it is installed, else the clients
    #[default]
    Auto,
    /// HAProxy
    Haproxy,
    /// Each client goes to the replicas in turn, and to the next one if it finds nobody there
    Clients,
}

/// HAProxy's executable, if it is in the search path.
pub(crate) fn installed() -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join("haproxy")).find(|file| file.is_file())
}

/// The shipped configuration with these addresses in place of its own.
pub(crate) fn configuration(bind: SocketAddr, replicas: &[SocketAddr]) -> String {
    let mut text = String::with_capacity(SHIPPED.len());
    for line in SHIPPED.lines() {
        let words = line.trim_start();
        if words.starts_with("bind ") {
            text.push_str(&format!("    bind {bind}\n"));
        } else if !words.starts_with("server ") {
            text.push_str(line);
            text.push('\n');
        }
    }
    // The backend with the servers is the last section.
    for (number, replica) in replicas.iter().enumerate() {
        text.push_str(&format!("    server replica-{number} {replica}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_addresses_of_the_shipped_configuration_are_replaced() {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let text = configuration(at(1), &[at(2), at(3)]);
        let addresses: Vec<&str> = text
            .lines()
            .map(str::trim_start)
            .filter(|line| line.starts_with("bind ") || line.starts_with("server "))
            .collect();
        assert_eq!(
            addresses,
            ["bind 127.0.0.1:1", "server replica-0 127.0.0.1:2", "server replica-1 127.0.0.1:3"]
        );
        assert!(text.contains("backend replicas") && text.contains("option httpchk GET /readyz"));
        assert_eq!(text.lines().count() + 1, SHIPPED.lines().count(), "three servers became two");
    }
}
