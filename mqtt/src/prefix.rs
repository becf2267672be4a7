//! What all topics of a process begin with.

use thiserror::Error;

/// An invalid topic prefix.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} cannot begin a topic of MQTT: it is empty, longer than {MAX_PREFIX_BYTES} bytes, begins or ends with a slash, or has one of + # and control characters; write for example russet"
)]
pub struct BadPrefix(pub String);

/// Topics are at most 65,535 bytes, of which namespace and name take their part.
const MAX_PREFIX_BYTES: usize = 200;

/// The prefix, if topics may begin with it.
pub fn topic_prefix(text: &str) -> Result<String, BadPrefix> {
    let control = text.contains(|c: char| c.is_control() || matches!(c, '+' | '#'));
    let slashes = text.starts_with('/') || text.ends_with('/');
    let bad = text.is_empty() || text.len() > MAX_PREFIX_BYTES || control || slashes;
    if bad { Err(BadPrefix(text.to_owned())) } else { Ok(text.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_part_of_a_topic_and_no_filter() {
        for bad in ["", "/russet", "russet/", "a/#", "+", "a\0b", &"x".repeat(MAX_PREFIX_BYTES + 1)] {
            assert_eq!(topic_prefix(bad), Err(BadPrefix(bad.to_owned())), "{bad:?}");
        }
        assert_eq!(topic_prefix("home/russet").as_deref(), Ok("home/russet"));
    }
}
