//! The join token, printed by `russet token create` and read by `russet join`. It contains a bootstrap token
//! of the API server and pins the cluster's CA; it is not a credential of its own.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Prefix of the format, to recognise later ones.
const PREFIX: &str = "rst1.";

/// A bootstrap token, and the CA of its cluster.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct JoinToken {
    /// Public part of the bootstrap token: six of `[a-z0-9]`.
    pub id: String,
    /// Secret part: sixteen of `[a-z0-9]`.
    pub secret: String,
    /// `sha256:<hex>` of the CA's subject public key info.
    pub ca_pin: String,
    /// The CA's certificate, DER in Base64, for an API server that does not send it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
}

/// A malformed join token.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "this is not a join token ({problem}); copy the whole line that `russet token create` printed, it begins with `{PREFIX}`"
)]
pub struct TokenError {
    problem: &'static str,
}

impl JoinToken {
    /// Encodes the token as one line.
    pub fn encode(&self) -> String {
        // A struct of three strings always serialises; an empty object would fail to decode.
        let json = serde_json::to_vec(self).unwrap_or_default();
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(json))
    }

    /// Decodes the one-line form.
    pub fn decode(text: &str) -> Result<Self, TokenError> {
        let wrong = |problem| TokenError { problem };
        let body = text.trim().strip_prefix(PREFIX).ok_or(wrong("the beginning is missing"))?;
        let json = URL_SAFE_NO_PAD.decode(body).map_err(|_| wrong("a part is missing or was changed"))?;
        let token: Self = serde_json::from_slice(&json).map_err(|_| wrong("its content cannot be read"))?;
        let plain = |text: &str, length| {
            text.len() == length
                && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
        };
        let pin = token.ca_pin.strip_prefix("sha256:").unwrap_or_default();
        if !plain(&token.id, 6) || !plain(&token.secret, 16) {
            return Err(wrong("its id or secret has the wrong length"));
        }
        if !plain(pin, 64) || hex::decode(pin).is_err() {
            return Err(wrong("its CA pin is not a SHA-256"));
        }
        if token.ca.is_some() && token.ca_der().is_none() {
            return Err(wrong("its CA is not Base64"));
        }
        Ok(token)
    }

    /// The CA's certificate, if the token contains it.
    pub fn ca_der(&self) -> Option<Vec<u8>> {
        STANDARD.decode(self.ca.as_ref()?).ok()
    }

    /// The bearer token for the API server.
    pub fn bearer(&self) -> String {
        format!("{}.{}", self.id, self.secret)
    }
}

impl std::fmt::Debug for JoinToken {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "JoinToken({}.…, {})", self.id, self.ca_pin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> JoinToken {
        JoinToken {
            id: "abcdef".into(),
            secret: "0123456789abcdef".into(),
            ca_pin: format!("sha256:{}", "ab".repeat(32)),
            ca: None,
        }
    }

    #[test]
    fn a_token_survives_the_round_trip_and_hides_its_secret_in_logs() {
        let text = token().encode();
        assert!(text.starts_with("rst1."));
        assert_eq!(JoinToken::decode(&format!(" {text}\n")), Ok(token()));
        let with_ca = JoinToken { ca: Some("AQID".into()), ..token() };
        assert_eq!(JoinToken::decode(&with_ca.encode()).unwrap().ca_der(), Some(vec![1, 2, 3]));
        assert!(!format!("{:?}", token()).contains("0123456789abcdef"));
    }

    #[test]
    fn anything_else_is_refused_with_the_remedy() {
        let good = token().encode();
        let short = JoinToken { secret: "short".into(), ..token() }.encode();
        let pin = JoinToken { ca_pin: "sha256:zz".into(), ..token() }.encode();
        let ca = JoinToken { ca: Some("%".into()), ..token() }.encode();
        for text in
            ["", "abcdef.0123456789abcdef", "rst1.", "rst1.!!", &good[..good.len() - 3], &short, &pin, &ca]
        {
            let error = JoinToken::decode(text).unwrap_err();
            assert!(error.to_string().contains("russet token create"), "{text}: {error}");
        }
    }
}
