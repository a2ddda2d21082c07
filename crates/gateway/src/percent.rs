//! Names in paths, which clients may write percent-encoded (RFC 3986, 2.1).

/// Undoes percent-encoding; what is none stays as it is.
pub(crate) fn decode(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if let Some(byte) = encoded(&bytes[at..]) {
            out.push(byte);
            at += 3;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    out
}

/// The byte that `text` begins with, if it is written as `%` and two hexadecimal digits.
fn encoded(text: &[u8]) -> Option<u8> {
    let &[b'%', high, low, ..] = text else { return None };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    u8::try_from(digit(high)? << 4 | digit(low)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded_and_odd_ones_survive() {
        for (text, want) in [
            ("a%20b", "a b"),
            ("org%2Fname", "org/name"),
            ("50%", "50%"),
            ("%zz", "%zz"),
            ("%+5", "%+5"),
            ("a/b", "a/b"),
            ("%C3%A9", "é"),
        ] {
            assert_eq!(decode(text), want.as_bytes(), "{text}");
        }
    }
}
