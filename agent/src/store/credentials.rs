//! Credentials of a source: the keys of the Secret that a Model names, and nothing else. Credentials of the
//! machine (its environment, its owner's files, a cloud's metadata service) are never sent to a source,
//! because the author of a Model is not necessarily the owner of the machine.

use std::collections::BTreeMap;
use std::fmt;

/// The texts of a Secret by key; hidden in Debug output.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials(BTreeMap<String, String>);

impl Credentials {
    /// Keeps values that are text, without trailing line breaks of editors.
    pub fn new(data: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        let text = |(key, value): (String, Vec<u8>)| {
            let value = String::from_utf8(value).ok()?.trim().to_owned();
            (!value.is_empty()).then_some((key, value))
        };
        Self(data.into_iter().filter_map(text).collect())
    }

    /// The text under `key`, if there is one.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Whether there is no text at all, as before the Secret is read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bearer token, for sources that use one.
    pub fn token(&self) -> Option<&str> {
        self.get("token")
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_accept_text_and_are_never_printed() {
        let data = [("token", &b"hf_x\n"[..]), ("AWS_REGION", b""), ("binary", b"\xff\xfe")];
        let credentials = Credentials::new(data.map(|(key, value)| (key.to_owned(), value.to_vec())));
        assert_eq!((credentials.token(), credentials.get("AWS_REGION")), (Some("hf_x"), None));
        assert_eq!(format!("{credentials:?}"), r#"{"token"}"#);
    }
}
