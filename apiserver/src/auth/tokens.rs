//! Bearer tokens: service account tokens, which this server signs (ES256), and bootstrap tokens, which are
//! Secrets in `kube-system` with which a new machine requests a certificate.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde_json::Value;

use super::user::User;
use crate::object;
use crate::state::ServerState;
use crate::store::Store;

/// The issuer of tokens, and their default audience.
pub const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// Authenticates a token for this API server; `None` when it is invalid or made for others.
pub fn user(api: &ServerState, token: &str, now: Timestamp) -> Option<User> {
    review(api, token, &[ISSUER], now).map(|(user, _)| user)
}

/// Authenticates a token for any of these audiences; also returns those that it was made for. `None` when it is invalid
/// or was made for none of them.
pub fn review(
    api: &ServerState,
    token: &str,
    audiences: &[&str],
    now: Timestamp,
) -> Option<(User, Vec<String>)> {
    let (user, made_for) = if token.matches('.').count() == 2 {
        service_account(api, token, now)?
    } else {
        (bootstrap(&*api.store, token, now)?, vec![ISSUER.to_owned()])
    };
    let shared: Vec<String> =
        made_for.into_iter().filter(|audience| audiences.contains(&audience.as_str())).collect();
    (!shared.is_empty()).then_some((user, shared))
}

/// The account of a valid token, and the audiences that the token was made for.
fn service_account(api: &ServerState, token: &str, now: Timestamp) -> Option<(User, Vec<String>)> {
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
    // So is one that is bound to a Secret.
    if let Some(secret) = bound.get("secret") {
        let stored = api.store.get(&secret_key(namespace, secret["name"].as_str()?))?;
        if secret["uid"] != object::uid(stored.object()) {
            return None;
        }
    }
    let audiences = match &claims["aud"] {
        Value::String(audience) => vec![audience.clone()],
        audiences => audiences.as_array()?.iter().filter_map(|one| one.as_str().map(str::to_owned)).collect(),
    };
    let groups = vec!["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")];
    let mut user = User::authenticated(&format!("system:serviceaccount:{namespace}:{name}"), groups);
    user.uid = uid;
    Some((user, audiences))
}

/// The storage key of a service account.
pub fn account_key(namespace: &str, name: &str) -> String {
    format!("{}{namespace}/{name}", crate::kinds::builtin::prefix("", "serviceaccounts"))
}

/// The storage key of a Secret.
pub fn secret_key(namespace: &str, name: &str) -> String {
    format!("{}{namespace}/{name}", crate::kinds::builtin::prefix("", "secrets"))
}

/// The storage prefix of bootstrap tokens.
pub fn bootstrap_prefix() -> String {
    secret_key("kube-system", "bootstrap-token-")
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
