//! Changes of single fields in the bytes of a JSON object. Everything else stays as it was written: spaces, order,
//! numbers of any size, fields that nobody here has heard of.

use std::borrow::Cow;

use bytes::{BufMut, Bytes, BytesMut};
use routing::request::members;

/// What becomes of a field that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change<'a> {
    /// It stays.
    Keep,
    /// It gets this value.
    Set(Cow<'a, [u8]>),
    /// It goes.
    Drop,
}

impl Change<'static> {
    /// It gets this value.
    pub(crate) const fn set(value: &'static str) -> Self {
        Self::Set(Cow::Borrowed(value.as_bytes()))
    }
}

/// `body` with each of its top fields as `change` says and `added` (name and value) behind them. A field that comes
/// twice is changed twice. A body that is no object comes back as it is: it has been refused before it gets here.
pub(crate) fn edited<'a>(
    body: &Bytes,
    change: impl Fn(&[u8]) -> Change<'a>,
    added: &[(&str, &[u8])],
) -> Bytes {
    edited_by(body, |key, _| change(key), added).unwrap_or_else(|| body.clone())
}

/// The same by each field's key and value; `None` if `body` is no object.
pub(crate) fn edited_by<'a>(
    body: &[u8],
    mut change: impl FnMut(&[u8], &[u8]) -> Change<'a>,
    added: &[(&str, &[u8])],
) -> Option<Bytes> {
    let room: usize = added.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
    let mut out = BytesMut::with_capacity(body.len() + room);
    let open = body.iter().position(|byte| *byte == b'{')?;
    out.put_slice(&body[..=open]);
    // Where the last field ended, and whether any was written.
    let (mut at, mut any) = (open + 1, false);
    let is_object = members(body, |key, member, value| {
        let changed = change(key, &body[value.clone()]);
        let gap = &body[at..member.start];
        at = member.end;
        if changed == Change::Drop {
            return;
        }
        // Before every field but the first stands a comma: that of the first one that stays goes.
        let comma = gap.iter().position(|byte| *byte == b',').filter(|_| !any);
        out.put_slice(&gap[comma.map_or(0, |comma| comma + 1)..]);
        any = true;
        match changed {
            Change::Set(to) => {
                out.put_slice(&body[member.start..value.start]);
                out.put_slice(&to);
            }
            Change::Keep | Change::Drop => out.put_slice(&body[member]),
        }
    });
    let end = body.iter().rposition(|byte| *byte == b'}').filter(|end| is_object && *end >= at)?;
    out.put_slice(&body[at..end]);
    for (name, value) in added {
        if any {
            out.put_u8(b',');
        }
        any = true;
        out.put_u8(b'"');
        out.put_slice(name.as_bytes());
        out.put_slice(b"\":");
        out.put_slice(value);
    }
    out.put_slice(&body[end..]);
    Some(out.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, want: &str) {
        let change = |key: &[u8]| match key {
            b"gone" => Change::Drop,
            b"set" => Change::set("1"),
            _ => Change::Keep,
        };
        let got = edited(&Bytes::copy_from_slice(body.as_bytes()), change, &[("new", b"{\"a\":2}")]);
        assert_eq!(std::str::from_utf8(&got).unwrap(), want, "{body}");
        serde_json::from_slice::<serde_json::Value>(&got).unwrap();
    }

    #[test]
    fn what_is_not_meant_stays_byte_for_byte() {
        check(
            " {\"b\" : 12345678901234567890123, \"set\":  20 ,\n\"c\":[{\"gone\":1}] } \n",
            " {\"b\" : 12345678901234567890123, \"set\":  1 ,\n\"c\":[{\"gone\":1}] ,\"new\":{\"a\":2}} \n",
        );
        check(r#"{"x":{"}":"}"}}"#, r#"{"x":{"}":"}"},"new":{"a":2}}"#);
    }

    #[test]
    fn fields_go_wherever_they_stand_and_however_often() {
        check(r#"{"gone":1,"b":2}"#, r#"{"b":2,"new":{"a":2}}"#);
        check(r#"{"b":2,"gone":1}"#, r#"{"b":2,"new":{"a":2}}"#);
        check(r#"{"gone":1, "gone":2, "b":2, "gone":3, "c":3}"#, r#"{ "b":2, "c":3,"new":{"a":2}}"#);
        check(r#"{ "gone":1 }"#, r#"{ "new":{"a":2}}"#);
        check(r#"{"set":5,"set":6}"#, r#"{"set":1,"set":1,"new":{"a":2}}"#);
        check("{}", r#"{"new":{"a":2}}"#);
        check(" { } ", r#" { "new":{"a":2}} "#);
        check(r#"{"\u0067one":1}"#, r#"{"new":{"a":2}}"#);
    }
}
