//! Where in a body's bytes its fields stand, for who changes a few of them and leaves the rest as it is.

use std::ops::Range;

use super::json::{Cursor, Fault};
use super::text::KeyBuffer;

/// Calls `each` for every member of the object at the top of `text`, in order: with its key, its escapes undone,
/// and where the whole member and its value stand. Says whether `text` is one JSON object; `each` may have been
/// called before that is known.
pub fn members(text: &[u8], mut each: impl FnMut(&[u8], Range<usize>, Range<usize>)) -> bool {
    let mut cursor = Cursor::new(text);
    let read = cursor.object(|key, cursor| {
        let start = key.start_in(text);
        let value = cursor.skip()?;
        let from = value.as_ptr().addr() - text.as_ptr().addr();
        let value = from..from + value.len();
        let mut buffer = KeyBuffer::default();
        each(key.key(&mut buffer), start..value.end, value);
        Ok::<(), Fault>(())
    });
    read.is_ok() && cursor.at_end()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(text: &str) -> Option<Vec<(String, String, String)>> {
        let mut all = Vec::new();
        let is_object = members(text.as_bytes(), |key, member, value| {
            let key = String::from_utf8_lossy(key).into_owned();
            all.push((key, text[member].to_owned(), text[value].to_owned()));
        });
        is_object.then_some(all)
    }

    fn check(text: &str, want: &[(&str, &str, &str)]) {
        let got = listed(text).unwrap_or_else(|| panic!("{text} is an object"));
        let got: Vec<_> = got.iter().map(|(key, member, value)| (&**key, &**member, &**value)).collect();
        assert_eq!(got, want, "{text}");
    }

    #[test]
    fn members_are_found_where_they_stand_whatever_their_form() {
        check("{}", &[]);
        check(
            " {\"a\" : [1, {\"b\":2}] ,\n\"a\":null}\n",
            &[("a", "\"a\" : [1, {\"b\":2}]", "[1, {\"b\":2}]"), ("a", "\"a\":null", "null")],
        );
        check(r#"{"max\u005ftokens":3}"#, &[("max_tokens", r#""max\u005ftokens":3"#, "3")]);
        check(r#"{"é\"":"}"}"#, &[("é\"", r#""é\"":"}""#, r#""}""#)]);
    }

    #[test]
    fn what_is_no_object_is_said_to_be_none() {
        for text in ["", "[]", "{", "{\"a\":}", "{} {}", "{\"a\":1,}"] {
            assert_eq!(listed(text), None, "{text}");
        }
    }
}
