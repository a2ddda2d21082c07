//! Requests that are split over two engines: which leg a request is, by the fields of the engine's connector, and
//! what its sequences have to do for it.

use std::borrow::Cow;
use std::sync::Arc;

use futures_util::future::select_all;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::timeout;

use crate::flight::{Finish, Leg, Phase, Work};
use crate::rank::{Rank, Seat};
use crate::transfer::courier::Source;
use crate::transfer::params::{Asked, Staged};
use crate::transfer::pinned::Released;
use crate::transfer::rooms::{RoomError, Stay};
use crate::transfer::{BadParams, Connector, Role, params};

use super::Server;
use super::body::Body;
use super::error::ApiError;
use super::generate::{ended, unfinished};
use super::reply::Failure;
use super::script::{Api, Script};

/// What a request is, once its sequences know their legs.
pub(crate) enum Request {
    /// One that is served whole, or the decode of one: nothing more to do.
    Ordinary,
    /// The prefill of one: the reply says where its blocks are.
    Prefill,
    /// The prefill of one whose decode leg meets it in rooms.
    Hosted(Hosted),
}

/// Gives every sequence its leg.
pub(crate) fn assign(
    server: &Server,
    rank: &Arc<Rank>,
    body: &Body<'_>,
    script: &mut Script,
    work: &mut [Work],
) -> Result<Request, ApiError> {
    match server.config.transfer.connector {
        Connector::None => Ok(Request::Ordinary),
        Connector::Nixl => nixl(server, body, script, work),
        Connector::Bootstrap => bootstrap(server, rank, body, script, work),
    }
}

fn nixl(server: &Server, body: &Body<'_>, script: &Script, work: &mut [Work]) -> Result<Request, ApiError> {
    let refused = |leg: &str| {
        let message = format!("This engine's role is not to {leg}.");
        Err(ApiError::bad_request(Some("kv_transfer_params"), &message))
    };
    match (body.kv_transfer_params.map_or(Asked::Nothing, params::read), server.config.transfer.role) {
        (Asked::Nothing, _) => Ok(Request::Ordinary),
        (Asked::Prefill, Role::Decode) => refused("prefill for others"),
        (Asked::Decode(_) | Asked::Incomplete, Role::Prefill) => refused("decode what others prefill"),
        (Asked::Prefill, _) => {
            for (work, kept_as) in work.iter_mut().zip(names(server, script)) {
                work.leg = Leg::Prefill { kept_as };
            }
            Ok(Request::Prefill)
        }
        (Asked::Decode(remote), _) => {
            let attempts = 1 + u32::from(body.stream.unwrap_or(false));
            let source = Arc::new(Source::Blocks { remote, attempts });
            for work in work {
                work.leg = Leg::Decode { source: Arc::clone(&source) };
            }
            Ok(Request::Ordinary)
        }
        (Asked::Incomplete, _) if server.config.transfer.bad_params == BadParams::Refused => {
            let message = "kv_transfer_params do not say where the prompt was computed.";
            Err(ApiError::bad_request(Some("kv_transfer_params"), message))
        }
        (Asked::Incomplete, _) => {
            server.die();
            Err(ApiError::core_died())
        }
    }
}

/// The names that the sequences' blocks are kept under, as vLLM makes them.
fn names<'a>(server: &'a Server, script: &'a Script) -> impl Iterator<Item = Arc<str>> + 'a {
    (0..script.choices.len()).map(|choice| {
        let end = server.ids.next() as u32;
        match script.api {
            Api::Text => format!("{}-{choice}-{end:08x}", script.id).into(),
            Api::Chat => format!("{}-{end:08x}", script.id).into(),
        }
    })
}

/// What a complete prefill says of its blocks: of its first sequence alone, as in vLLM; the blocks of others stay
/// until their time is up.
pub(crate) fn staged(server: &Server, rank: &Rank, seat: &Seat, script: &Script) -> Option<String> {
    let blocks = seat.flight.kept(0)?;
    let address = server.side?;
    let host = if address.ip().is_unspecified() { "127.0.0.1".to_owned() } else { address.ip().to_string() };
    let first = script.choices.first()?;
    let staged = Staged {
        do_remote_prefill: true,
        do_remote_decode: false,
        remote_block_ids: [blocks],
        remote_engine_id: &rank.engine_id(),
        remote_request_id: seat.kept_as(0)?,
        remote_host: &host,
        remote_port: address.port(),
        tp_size: 1,
        dcp_size: 1,
        pp_size: 1,
        // The KV of the last token is never computed.
        remote_num_tokens: script.prompts.first()?.tokens + first.tokens - 1,
        remote_blocks_expiry_time: None,
        transfer_mode: "pull",
        remote_prefill_cached_tokens: seat.flight.cached_tokens(0),
    };
    serde_json::to_string(&staged).ok()
}

/// One value for all sequences, or one for each.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T: Clone> OneOrMany<T> {
    fn read<'a>(raw: Option<&'a RawValue>, field: &str) -> Result<Self, ApiError>
    where
        Self: Deserialize<'a>,
    {
        let wrong = || {
            let message = format!("{field} must be one value or a list with one for each prompt.");
            ApiError::bad_request(Some(field), &message)
        };
        serde_json::from_str(raw.ok_or_else(wrong)?.get()).map_err(|_| wrong())
    }

    /// The value of a sequence: lists have one for each, or one for each prompt.
    fn of(&self, choice: usize, script: &Script) -> Option<T> {
        match self {
            Self::One(value) => Some(value.clone()),
            Self::Many(values) if values.len() == script.choices.len() => values.get(choice).cloned(),
            Self::Many(values) if values.len() == script.prompts.len() => {
                values.get(choice / script.samples).cloned()
            }
            Self::Many(_) => None,
        }
    }
}

fn bootstrap(
    server: &Server,
    rank: &Arc<Rank>,
    body: &Body<'_>,
    script: &mut Script,
    work: &mut [Work],
) -> Result<Request, ApiError> {
    if body.bootstrap_room.is_none() {
        let message = "Disaggregated request received without bootstrap room id";
        return Err(ApiError::bad_request(Some("bootstrap_room"), message));
    }
    let given = OneOrMany::<i64>::read(body.bootstrap_room, "bootstrap_room")?;
    let mismatch = |field: &str| {
        let message = format!("The length of {field} must equal the number of prompts.");
        ApiError::bad_request(Some(field), &message)
    };
    let room = |choice: usize| match &given {
        // A single room is that of the first sequence, those of the others follow.
        OneOrMany::One(first) => Ok(first.wrapping_add(choice as i64)),
        many @ OneOrMany::Many(_) => many.of(choice, script).ok_or_else(|| mismatch("bootstrap_room")),
    };
    let rooms = (0..work.len()).map(room).collect::<Result<Vec<i64>, _>>()?;
    if server.config.transfer.role == Role::Prefill {
        let stay = |&room: &i64| {
            let in_use = |error| ApiError::bad_request(Some("bootstrap_room"), &format!("{error}."));
            server.rooms.host(room).map_err(in_use)
        };
        let stays = rooms.iter().map(stay).collect::<Result<Vec<Stay>, _>>()?;
        let names: Vec<Arc<str>> = names(server, script).collect();
        for ((work, kept_as), choice) in work.iter_mut().zip(&names).zip(&mut script.choices) {
            work.leg = Leg::Prefill { kept_as: Arc::clone(kept_as) };
            // Whatever the request says: a prefill engine generates one token.
            (work.output_tokens, work.finish) = (1, Finish::Length);
            (choice.tokens, choice.words, choice.finish) = (1, choice.words.min(1), Finish::Length);
        }
        let kept = Kept { rank: Arc::clone(rank), names, why: Released::Abandoned };
        return Ok(Request::Hosted(Hosted { stays, kept }));
    }
    let hosts = OneOrMany::<Cow<'_, str>>::read(body.bootstrap_host, "bootstrap_host")?;
    let ports = OneOrMany::<u16>::read(body.bootstrap_port, "bootstrap_port")?;
    for (choice, (work, room)) in work.iter_mut().zip(rooms).enumerate() {
        let host = hosts.of(choice, script).ok_or_else(|| mismatch("bootstrap_host"))?.into_owned();
        let port = ports.of(choice, script).ok_or_else(|| mismatch("bootstrap_port"))?;
        work.leg = Leg::Decode { source: Arc::new(Source::Room { host, port, room }) };
    }
    Ok(Request::Ordinary)
}

/// A prefill leg in its rooms. Dropping it leaves them, and frees what was kept.
pub(crate) struct Hosted {
    stays: Vec<Stay>,
    kept: Kept,
}

/// Blocks that are kept for as long as this is.
struct Kept {
    rank: Arc<Rank>,
    names: Vec<Arc<str>>,
    why: Released,
}

impl Drop for Kept {
    fn drop(&mut self) {
        for name in &self.names {
            self.rank.release(name, self.why);
        }
    }
}

impl Hosted {
    /// Waits for the decode leg to join every room; nothing is computed before.
    pub(crate) async fn joined(&mut self, server: &Server) -> Result<(), Failure> {
        let all = async {
            for stay in &mut self.stays {
                stay.joined().await?;
            }
            Ok::<(), RoomError>(())
        };
        match timeout(server.config.transfer.join_max, all).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(left)) => Err(given_up(left)),
            Err(elapsed) => Err(given_up(elapsed)),
        }
    }

    /// Waits for the prefill and then for its KV to arrive.
    pub(crate) async fn hand_over(&mut self, server: &Server, seat: &Seat) -> Result<(), Failure> {
        let left = select_all(self.stays.iter_mut().map(|stay| Box::pin(stay.left())));
        let phase = tokio::select! {
            phase = ended(seat, self.kept.names.len()) => phase,
            (left, ..) = left => return Err(given_up(left)),
        };
        if phase != Phase::Complete {
            return Err(unfinished(phase));
        }
        for (sequence, stay) in self.stays.iter().enumerate() {
            let blocks = seat.flight.kept(sequence).ok_or_else(|| given_up("no blocks could be kept"))?;
            stay.stage(self.kept.rank.contents(blocks).into());
        }
        let all = async {
            for stay in &mut self.stays {
                stay.taken().await?;
            }
            Ok::<(), RoomError>(())
        };
        match timeout(server.config.transfer.join_max, all).await {
            Ok(Ok(())) => self.kept.why = Released::Pulled,
            Ok(Err(left)) => return Err(given_up(left)),
            Err(elapsed) => return Err(given_up(elapsed)),
        }
        Ok(())
    }
}

/// What a client sees of a handover that fails.
fn given_up(why: impl std::fmt::Display) -> Failure {
    tracing::warn!(%why, "a prefill is not handed over");
    ApiError::internal().into()
}
