//! Bearer tokens: service account tokens, which this server signs (ES256), and bootstrap tokens, which are
//! Secrets in `kube-system` with which a new machine requests a certificate.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jiff::Timestamp;
use rcgen::PublicKeyData;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, UnparsedPublicKey,
};
use serde_json::{Value, json};

use super::User;
use crate::object;
use crate::pki::{self, PkiError};
use crate::state::ServerState;
use crate::store::Store;

/// The issuer of tokens, and their default audience.
pub const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// The key that signs service account tokens.
pub struct Signer {
    key: EcdsaKeyPair,
    public: Vec<u8>,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Signer").finish_non_exhaustive()
    }
}

impl Signer {
    /// Loads the key from this file, or creates it.
    pub fn ensure(path: &std::path::Path) -> Result<Self, PkiError> {
        let unusable = |why: String| PkiError::Unusable { what: "service account key".into(), why };
        let pair = if path.exists() {
            rcgen::KeyPair::from_pem(&pki::read(path)?).map_err(|error| unusable(error.to_string()))?
        } else {
            let pair = rcgen::KeyPair::generate().map_err(|error| unusable(error.to_string()))?;
            pki::write_private(path, pair.serialize_pem().as_bytes())?;
            pair
        };
        let key = EcdsaKeyPair::from_pkcs8(
            &ECDSA_P256_SHA256_FIXED_SIGNING,
            pair.serialized_der(),
            &SystemRandom::new(),
        )
        .map_err(|error| unusable(error.to_string()))?;
        Ok(Self { key, public: pair.der_bytes().to_vec() })
    }

    /// Signs a token with these claims.
    pub fn sign(&self, claims: &Value) -> Option<String> {
        let header = URL_SAFE_NO_PAD.encode(json!({"alg": "ES256", "typ": "JWT"}).to_string());
        let body = format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims.to_string()));
        let signature = self.key.sign(&SystemRandom::new(), body.as_bytes()).ok()?;
        Some(format!("{body}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    /// The claims of a token with a valid signature of this key.
    pub fn verify(&self, token: &str) -> Option<Value> {
        let (body, signature) = token.rsplit_once('.')?;
        let (header, claims) = body.split_once('.')?;
        let header: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(header).ok()?).ok()?;
        if header["alg"] != "ES256" {
            return None;
        }
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &self.public)
            .verify(body.as_bytes(), &URL_SAFE_NO_PAD.decode(signature).ok()?)
            .ok()?;
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()
    }
}

/// Authenticates a token; `None` when it is invalid.
pub fn user(api: &ServerState, token: &str, now: Timestamp) -> Option<User> {
    if token.matches('.').count() == 2 {
        return service_account(api, token, now);
    }
    bootstrap(&*api.store, token, now)
}

fn service_account(api: &ServerState, token: &str, now: Timestamp) -> Option<User> {
    let claims = api.signer.verify(token)?;
    let valid = claims["iss"] == ISSUER
        && claims["exp"].as_i64()? > now.as_second()
        && claims["nbf"].as_i64().unwrap_or(0) <= now.as_second() + 60;
    if !valid {
        return None;
    }
    let bound = &claims["kubernetes.io"];
    let (namespace, name) = (bound["namespace"].as_str()?, bound["serviceaccount"]["name"].as_str()?);
    // A token is valid only while its account exists; a re-created account has another uid.
    let account = api.store.get(&account_key(namespace, name))?;
    let uid = object::uid(account.object()).to_string();
    if bound["serviceaccount"]["uid"] != uid {
        return None;
    }
    let groups = vec!["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")];
    let mut user = User::authenticated(&format!("system:serviceaccount:{namespace}:{name}"), groups);
    user.uid = uid;
    Some(user)
}

/// The storage key of a service account.
pub fn account_key(namespace: &str, name: &str) -> String {
    format!("{}{namespace}/{name}", crate::kinds::builtin::prefix("", "serviceaccounts"))
}

/// The storage prefix of bootstrap tokens.
pub fn bootstrap_prefix() -> String {
    format!("{}kube-system/bootstrap-token-", crate::kinds::builtin::prefix("", "secrets"))
}

/// Whether a Secret is a valid bootstrap token.
pub fn is_live_bootstrap(secret: &Value, now: Timestamp) -> bool {
    let field = |name: &str| -> Option<String> {
        String::from_utf8(STANDARD.decode(secret["data"][name].as_str()?).ok()?).ok()
    };
    let unexpired = match field("expiration") {
        None => true,
        Some(text) => text.trim().parse::<Timestamp>().is_ok_and(|expiration| expiration > now),
    };
    secret["type"] == "bootstrap.kubernetes.io/token"
        && unexpired
        && !object::is_terminating(secret)
        && field("usage-bootstrap-authentication").as_deref() == Some("true")
}

fn bootstrap(store: &dyn Store, token: &str, now: Timestamp) -> Option<User> {
    let (id, secret) = token.split_once('.')?;
    let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if id.len() != 6 || secret.len() != 16 || !plain(id) || !plain(secret) {
        return None;
    }
    let record = store.get(&format!("{}{id}", bootstrap_prefix()))?;
    let stored = record.object();
    let field = |name: &str| -> Option<Vec<u8>> { STANDARD.decode(stored["data"][name].as_str()?).ok() };
    let same = ring_equal(&field("token-secret")?, secret.as_bytes());
    if !same || field("token-id")? != id.as_bytes() || !is_live_bootstrap(stored, now) {
        return None;
    }
    let mut groups = vec!["system:bootstrappers".to_string()];
    if let Some(extra) = field("auth-extra-groups").and_then(|bytes| String::from_utf8(bytes).ok()) {
        // Only groups with the bootstrappers' prefix: a token must never grant administrator rights.
        let named =
            extra.split(',').map(str::trim).filter(|group| group.starts_with("system:bootstrappers:"));
        groups.extend(named.map(str::to_string));
    }
    Some(User::authenticated(&format!("system:bootstrap:{id}"), groups))
}

/// Constant-time comparison.
fn ring_equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_believed_only_when_this_key_signed_exactly_it() {
        let folder = tempfile::tempdir().unwrap();
        let signer = Signer::ensure(&folder.path().join("sa.key")).unwrap();
        let token = signer.sign(&json!({"sub": "x"})).unwrap();
        assert_eq!(signer.verify(&token).unwrap()["sub"], "x");
        let again = Signer::ensure(&folder.path().join("sa.key")).unwrap();
        assert!(again.verify(&token).is_some(), "the key is kept in its file");
        let other = Signer::ensure(&folder.path().join("other.key")).unwrap();
        assert!(other.verify(&token).is_none());
        let (body, signature) = token.rsplit_once('.').unwrap();
        assert!(signer.verify(&format!("{body}x.{signature}")).is_none());
    }
}
