//! What opens a source: the keys of the Secret that a Model names, and nothing else. What this machine itself may
//! open (its environment, its owner's files, the metadata service of a cloud) is never shown to a source, because
//! whoever writes a Model is not whoever owns the machine.

use std::collections::BTreeMap;
use std::fmt;

/// The texts of a Secret by their keys; printed without them.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials(BTreeMap<String, String>);

impl Credentials {
    /// Takes what is text, without the line ends that editors leave.
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

    /// The bearer token, of sources that want one.
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
