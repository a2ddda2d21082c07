//! SGLang's exchange, after its source (`managers/io_struct.py` at 001067f): both legs go out at once, say the same,
//! and meet in rooms at the prefill engine's bootstrap server. Not seen with a real engine.

use std::fmt::Write as _;

use bytes::Bytes;
use routing::endpoint::EndpointSpec;
use routing::lifecycle::LegOrder;
use routing::retry::LegFault;

use super::{Connector, Meeting};
use crate::edit::{Change, edited};

/// Where an engine's bootstrap server listens unless its endpoint says otherwise: SGLang's own default.
const PORT_DEFAULT: u16 = 8_998;

/// The fields of both legs.
const HOST: &str = "bootstrap_host";
const PORT: &str = "bootstrap_port";
const ROOM: &str = "bootstrap_room";

/// `sglang-bootstrap`.
pub(crate) struct Bootstrap;

impl Connector for Bootstrap {
    fn order(&self) -> LegOrder {
        LegOrder::Together
    }

    fn prepared(&self, body: &Bytes, meeting: &Meeting<'_>) -> Bytes {
        let ours = |key: &[u8]| [HOST, PORT, ROOM].iter().any(|name| name.as_bytes() == key);
        let (host, port) = address(meeting.prefill);
        let host = serde_json::Value::from(host).to_string();
        let (port, rooms) = (port.to_string(), rooms(meeting));
        let added = [(HOST, host.as_bytes()), (PORT, port.as_bytes()), (ROOM, rooms.as_bytes())];
        edited(body, |key| if ours(key) { Change::Drop } else { Change::Keep }, &added)
    }

    fn prefill_leg(&self, body: &Bytes) -> Bytes {
        body.clone()
    }

    fn decode_leg(&self, body: &Bytes, _: &[u8]) -> Result<Bytes, LegFault> {
        Ok(body.clone())
    }

    fn pins(&self) -> bool {
        false
    }
}

/// The bootstrap server of a prefill endpoint.
fn address(prefill: &EndpointSpec) -> (&str, u16) {
    let rest = prefill.url.strip_prefix("http://").unwrap_or(&prefill.url);
    let (own, _) = rest.split_once('/').unwrap_or((rest, ""));
    let own_host = own.rsplit_once(':').map_or(own, |(host, _)| host);
    let said = prefill.bootstrap.as_deref();
    let (host, port) = match said.and_then(|said| said.rsplit_once(':')) {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().unwrap_or(PORT_DEFAULT)),
        _ => (said.unwrap_or(own_host), PORT_DEFAULT),
    };
    (host.trim_start_matches('[').trim_end_matches(']'), port)
}

/// One room, or a list with one for each sample of each prompt.
fn rooms(meeting: &Meeting<'_>) -> String {
    let room = |number: u64| meeting.room.wrapping_add(number);
    match meeting.sequences {
        0 | 1 => room(0).to_string(),
        several => {
            let mut list = String::from("[");
            for number in 0..u64::from(several) {
                let comma = if number == 0 { "" } else { "," };
                let _ = write!(list, "{comma}{}", room(number));
            }
            list.push(']');
            list
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(spec: &str, sequences: u32, want: &str) {
        let spec = EndpointSpec::parse(spec).unwrap().pop().unwrap();
        let meeting = Meeting { prefill: &spec, sequences, room: 7 };
        let body = Bytes::from_static(br#"{"text":"x","bootstrap_room":null}"#);
        let got = Bootstrap.prepared(&body, &meeting);
        assert_eq!(std::str::from_utf8(&got).unwrap(), format!(r#"{{"text":"x",{want}}}"#));
    }

    #[test]
    fn both_legs_say_where_they_meet_in_a_room_for_each_sequence() {
        check(
            "http://h:30000,bootstrap=10.0.0.1:9000",
            1,
            r#""bootstrap_host":"10.0.0.1","bootstrap_port":9000,"bootstrap_room":7"#,
        );
        check(
            "http://h:30000/base",
            3,
            r#""bootstrap_host":"h","bootstrap_port":8998,"bootstrap_room":[7,8,9]"#,
        );
        check("http://[::1]:30000", 1, r#""bootstrap_host":"::1","bootstrap_port":8998,"bootstrap_room":7"#);
    }
}
