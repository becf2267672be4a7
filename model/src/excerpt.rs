//! What a message has of a stranger's text.

/// The beginning of a text, for a message: never the whole of a file.
pub(crate) fn excerpt(text: &str) -> String {
    text.chars().take(60).collect()
}
