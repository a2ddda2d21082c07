//! HAProxy and nginx as they are put in front of engines or replicas, started from the system's packages.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::process::{Process, on_path};
use crate::wait;

/// A proxy that runs, with its configuration.
#[derive(Debug)]
pub struct Front {
    /// Where clients connect.
    pub address: SocketAddr,
    /// The process and its workers.
    pub process: Process,
    _folder: TempDir,
}

/// How HAProxy treats what passes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HaproxyMode {
    /// Each request is balanced by itself, to the server with the fewest in flight.
    HttpLeastconn,
    /// Each request is balanced by itself, in turn.
    HttpRoundRobin,
    /// Each connection is balanced, to the server with the fewest.
    TcpLeastconn,
}

/// Where HAProxy is; `None` if it is not installed.
pub fn haproxy_program() -> Option<PathBuf> {
    on_path("haproxy")
}

/// Where nginx is; `None` if it is not installed.
pub fn nginx_program() -> Option<PathBuf> {
    on_path("nginx")
}

/// Starts HAProxy with a thread for each core, as it does by itself.
///
/// # Errors
/// When it does not start.
pub fn haproxy(program: &PathBuf, mode: HaproxyMode, servers: &[SocketAddr]) -> anyhow::Result<Front> {
    let address = wait::free_address()?;
    let (mode, balance, more) = match mode {
        HaproxyMode::HttpLeastconn => {
            ("http", "leastconn", "    http-reuse always\n    option http-no-delay\n")
        }
        HaproxyMode::HttpRoundRobin => {
            ("http", "roundrobin", "    http-reuse always\n    option http-no-delay\n")
        }
        HaproxyMode::TcpLeastconn => ("tcp", "leastconn", ""),
    };
    let mut text = format!(
        "global\n    maxconn 4000\n\
         defaults\n    mode {mode}\n    timeout connect 5s\n    timeout client 5m\n    timeout server 5m\n\
         listen bench\n    bind {address}\n    balance {balance}\n{more}"
    );
    for (at, server) in servers.iter().enumerate() {
        writeln!(text, "    server s{at} {server}")?;
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("haproxy.cfg");
    std::fs::write(&file, text)?;
    let mut command = Command::new(program);
    // -db: stay in the foreground.
    command.arg("-db").arg("-f").arg(&file).stderr(Stdio::null());
    let process = Process::start(&mut command)?;
    wait::until_open(address)?;
    Ok(Front { address, process, _folder: folder })
}

/// Starts nginx as it is put in front of engines: connections to them are kept, streams are not held back,
/// nothing is logged.
///
/// # Errors
/// When it does not start.
pub fn nginx(program: &PathBuf, servers: &[SocketAddr]) -> anyhow::Result<Front> {
    let address = wait::free_address()?;
    let folder = tempfile::tempdir()?;
    let here = folder.path().display();
    let mut upstream = String::new();
    for server in servers {
        write!(upstream, "server {server}; ")?;
    }
    let text = format!(
        "daemon off;\nworker_processes auto;\npid {here}/pid;\nerror_log {here}/error.log crit;\n\
         events {{ worker_connections 2048; }}\n\
         http {{\n  access_log off;\n  client_body_temp_path {here}/body;\n  proxy_temp_path {here}/proxy;\n  \
         fastcgi_temp_path {here}/fastcgi;\n  uwsgi_temp_path {here}/uwsgi;\n  scgi_temp_path {here}/scgi;\n  \
         keepalive_requests 1000000;\n  client_body_buffer_size 128k;\n  \
         upstream engines {{ {upstream}keepalive 256; keepalive_requests 1000000; }}\n  \
         server {{\n    listen {address};\n    location / {{\n      proxy_pass http://engines;\n      \
         proxy_http_version 1.1;\n      proxy_set_header Connection \"\";\n      proxy_buffering off;\n    }}\n  }}\n}}\n"
    );
    let file = folder.path().join("nginx.conf");
    std::fs::write(&file, text)?;
    let mut command = Command::new(program);
    command.arg("-c").arg(&file).arg("-p").arg(folder.path()).stderr(Stdio::null());
    let process = Process::start_parent(&mut command)?;
    wait::until_open(address)?;
    Ok(Front { address, process, _folder: folder })
}
