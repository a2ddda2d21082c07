//! The prefill side: lets other engines read its blocks, and join its rooms.

use std::io;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::frames::{Ask, Told, gone, receive, send};
use super::pinned::Released;
use crate::server::{ACCEPT_PAUSE, Closing, Server, other_than};

/// Serves the side channel until the engine stops; connections end with it.
pub(crate) async fn serve(server: Arc<Server>, listener: TcpListener, mut closing: watch::Receiver<Closing>) {
    let mut lines = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((line, _)) => {
                    let server = Arc::clone(&server);
                    lines.spawn(async move {
                        // The end of the connection; the other side knows why.
                        let _ = converse(&server, line).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection of another engine");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = lines.join_next() => {}
            _ = other_than(&mut closing, Closing::Not) => return,
        }
    }
}

async fn converse(server: &Server, mut line: TcpStream) -> io::Result<()> {
    line.set_nodelay(true)?;
    loop {
        let ask: Ask = receive(&mut line).await?;
        if server.faults.frozen() {
            server.faults.thawed().await;
        }
        if server.core_is_dead() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let told = match ask {
            Ask::Read { engine_id, model, block_tokens, blocks } => {
                read(server, &engine_id, (&model, block_tokens), &blocks)
            }
            Ask::Done { request_id, pulled } => {
                let why = if pulled { Released::Pulled } else { Released::Abandoned };
                let known = server.ranks.iter().any(|rank| rank.release(&request_id, why));
                if !known {
                    tracing::debug!(%request_id, "done with blocks that are not kept");
                }
                Told::Noted
            }
            Ask::Join { room, model, block_tokens } => {
                join(server, &mut line, room, (&model, block_tokens)).await?
            }
            Ask::Received => Told::Refused("no room was joined".to_owned()),
        };
        send(&mut line, &told).await?;
    }
}

/// Why KV of an engine of this kind means nothing here.
fn unlike(server: &Server, (model, block_tokens): (&str, u32)) -> Option<Told> {
    let own = (&*server.config.model, server.config.limits.block_tokens);
    (own != (model, block_tokens))
        .then(|| Told::Refused(format!("this is {} with blocks of {} tokens", own.0, own.1)))
}

fn read(server: &Server, engine_id: &str, kind: (&str, u32), blocks: &[u32]) -> Told {
    let Some(rank) = server.ranks.iter().find(|rank| rank.is_engine(engine_id)) else {
        return Told::Refused(format!("this is not engine {engine_id}"));
    };
    unlike(server, kind).unwrap_or_else(|| {
        Told::Contents(rank.contents(blocks).into_iter().map(|hash| hash.map(|hash| hash.0)).collect())
    })
}

/// Lets a decode leg wait in its room for what the prefill leg computes, and take it.
async fn join(server: &Server, line: &mut TcpStream, room: i64, kind: (&str, u32)) -> io::Result<Told> {
    if let Some(refused) = unlike(server, kind) {
        return Ok(refused);
    }
    let mut guest = match server.rooms.join(room) {
        Ok(guest) => guest,
        Err(error) => return Ok(Told::Refused(error.to_string())),
    };
    let staged = tokio::select! {
        staged = timeout(server.config.transfer.join_max, guest.staged()) => staged,
        () = gone(line) => return Err(io::ErrorKind::UnexpectedEof.into()),
    };
    let kv = match staged {
        Ok(Ok(kv)) => kv,
        Ok(Err(left)) => return Ok(Told::Refused(left.to_string())),
        Err(_) => return Ok(Told::Refused(format!("nobody came to bootstrap room {room}"))),
    };
    send(line, &Told::Contents(kv.iter().map(|hash| hash.map(|hash| hash.0)).collect())).await?;
    match receive(line).await? {
        Ask::Received => {
            guest.receive();
            Ok(Told::Noted)
        }
        other => Ok(Told::Refused(format!("unexpected: {other:?}"))),
    }
}
