//! Authentication: which AccessKey a request presents, and what it allows. A [`Keyring`] is immutable; every
//! change publishes a new one. No sockets and no Kubernetes client here; `objects` reads the kind, `follow`
//! watches it and `report` writes its status.

mod follow;
mod objects;
mod rate_limit;
mod report;
mod secret;
mod source_ranges;

use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, header};
use jiff::Timestamp;
use parking_lot::Mutex;
use russet_crds::AccessKeyStatus;
use sha2::Digest as _;
use subtle::ConstantTimeEq as _;

use crate::request_limits::RequestLimits;
use crate::routes::{FactsCaller, ModelScope};
pub use follow::follow;
pub use rate_limit::Quota;
pub use report::report;
pub use secret::Secret;
use source_ranges::SourceRanges;

/// The other header for keys, which Anthropic's clients use.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The owner of what callers without a key keep; no key's full name is without a slash.
pub(crate) const LOOPBACK: &str = "loopback";

/// Every key the gateway knows.
#[derive(Debug, Default)]
pub struct Keyring {
    /// Whether the keys were listed once; before that every request is rejected.
    pub synced: bool,
    /// How many AccessKeys exist, including those that cannot be decoded.
    pub object_count: usize,
    /// Every AccessKey that can be decoded.
    pub keys: Vec<Arc<ApiKey>>,
    /// The key of each secret; the oldest of several in the namespace that the secret belongs to.
    by_digest: HashMap<Digest, Arc<ApiKey>>,
    /// The namespace that each secret belongs to, also of secrets whose AccessKeys are gone.
    owners: HashMap<Digest, String>,
}

/// One AccessKey.
#[derive(Debug)]
pub struct ApiKey {
    /// Its namespace.
    pub namespace: String,
    /// Its name, which logs and metrics may show.
    pub name: String,
    /// `namespace/name`.
    full_name: Arc<str>,
    /// Generation of the object.
    pub generation: Option<i64>,
    /// The object's status.
    pub status: AccessKeyStatus,
    /// Its holder, as the object says.
    pub owner: Option<String>,
    /// Its labels, which are those of its requests.
    pub labels: BTreeMap<String, String>,
    /// The model names it allows.
    pub scope: ModelScope,
    /// Limits on its requests.
    pub limits: RequestLimits,
    /// Whether its holder may pull, copy and delete models.
    pub manages_models: bool,
    per_minute: Option<u32>,
    expires: Option<Timestamp>,
    sources: SourceRanges,
    enabled: bool,
    /// Why its secret does not open it.
    rejection: Option<SecretRejection>,
    usage: Arc<KeyUsage>,
}

/// Why the secret of a key belongs to another one.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SecretRejection {
    /// This older object of the same namespace has the same secret.
    Duplicate(String),
    /// The secret belongs to this namespace; `None`: to another one, whose AccessKey was gone when the gateway started.
    Foreign(Option<String>),
}

/// Usage of a secret, carried from one keyring to the next.
#[derive(Debug, Default)]
struct KeyUsage {
    /// When the quota is full again, as time since the gateway started.
    replenished_at: Mutex<Duration>,
    /// When the key was last accepted, in seconds since 1970; 0 means never.
    last_used: AtomicI64,
}

/// SHA-256 of a secret, compared in constant time.
#[derive(Clone, Copy)]
struct Digest([u8; 32]);

impl Digest {
    fn sha256(secret: &[u8]) -> Self {
        Self(sha2::Sha256::digest(secret).into())
    }

    fn parse(hex: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(hex, &mut bytes).ok().map(|()| Self(bytes))
    }
}

impl PartialEq for Digest {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Digest {}

impl Hash for Digest {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Digest(…)")
    }
}

/// The authenticated caller of a request.
#[derive(Clone, Debug)]
pub enum Caller {
    /// Any program on this machine: no AccessKey exists.
    Anonymous,
    /// The holder of a key.
    Key(Arc<ApiKey>),
}

/// Why a request is not authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthError {
    /// The request presents no key.
    MissingKey,
    /// The key is unknown, expired, disabled or not for this address; the error does not say which.
    RejectedKey,
}

impl Keyring {
    /// Authenticates a request by its headers and the address that it comes from. With `open`, the listener accepts requests
    /// without a key while no AccessKey exists.
    pub fn caller(
        &self,
        headers: &HeaderMap,
        source: IpAddr,
        open: bool,
        now: Timestamp,
    ) -> Result<Caller, AuthError> {
        if open && self.synced && self.object_count == 0 {
            return Ok(Caller::Anonymous);
        }
        let secret = presented_secret(headers).ok_or(AuthError::MissingKey)?;
        let key = self.by_digest.get(&Digest::sha256(secret)).ok_or(AuthError::RejectedKey)?;
        if !key.enabled || key.is_expired(now) {
            return Err(AuthError::RejectedKey);
        }
        if !key.sources.contain(source) {
            // Its holder is told no more than that; whoever runs the gateway may wonder.
            tracing::info!(key = key.full_name(), %source, "a key was rejected that is not accepted from this address");
            return Err(AuthError::RejectedKey);
        }
        key.usage.last_used.store(now.as_second(), Ordering::Relaxed);
        Ok(Caller::Key(key.clone()))
    }
}

impl Keyring {
    /// The caller that keeps things under this name, as a request of it would be accepted now.
    pub(crate) fn caller_of(&self, owner: &str, now: Timestamp) -> Option<Caller> {
        if owner == LOOPBACK {
            return Some(Caller::Anonymous);
        }
        let key = self.by_digest.values().find(|key| key.full_name() == owner)?;
        (key.enabled && !key.is_expired(now)).then(|| Caller::Key(key.clone()))
    }
}

impl ApiKey {
    /// `namespace/name`.
    pub fn full_name(&self) -> &str {
        &self.full_name
    }

    fn is_expired(&self, now: Timestamp) -> bool {
        self.expires.is_some_and(|expires| expires <= now)
    }

    fn last_used(&self) -> Option<Timestamp> {
        match self.usage.last_used.load(Ordering::Relaxed) {
            0 => None,
            second => Timestamp::from_second(second).ok(),
        }
    }
}

impl Caller {
    /// Under which name the caller keeps things.
    pub(crate) fn owner(&self) -> String {
        self.key_name().unwrap_or(LOOPBACK).to_owned()
    }

    /// `namespace/name` of the caller's key; `None` without one.
    pub fn key_name(&self) -> Option<&str> {
        match self {
            Self::Anonymous => None,
            Self::Key(key) => Some(key.full_name()),
        }
    }

    /// The same, to keep.
    pub(crate) fn shared_key_name(&self) -> Option<Arc<str>> {
        match self {
            Self::Anonymous => None,
            Self::Key(key) => Some(key.full_name.clone()),
        }
    }

    /// Namespace and name of the caller's key; `None` without one.
    pub(crate) fn key_names(&self) -> Option<(&str, &str)> {
        match self {
            Self::Anonymous => None,
            Self::Key(key) => Some((&key.namespace, &key.name)),
        }
    }

    /// The caller's key where it may pull, copy and delete models; callers without a key never may.
    pub(crate) fn model_manager(&self) -> Option<&Arc<ApiKey>> {
        match self {
            Self::Anonymous => None,
            Self::Key(key) => key.manages_models.then_some(key),
        }
    }

    /// The model names the caller may use.
    pub fn scope(&self) -> &ModelScope {
        static EVERYTHING: ModelScope = ModelScope::ALL;
        match self {
            Self::Anonymous => &EVERYTHING,
            Self::Key(key) => &key.scope,
        }
    }

    /// The salt of the prefix cache for the caller's requests, with the one that a request has itself. Callers of
    /// different namespaces share no prefixes: whether one is cached tells what others asked. Keys of one namespace
    /// do, as its holders may read the same models and conversations.
    pub fn cache_salt(&self, own: &str) -> String {
        match self {
            Self::Anonymous if own.is_empty() => String::new(),
            // No namespace has a slash.
            Self::Anonymous => format!("/{own}"),
            Self::Key(key) => format!("{}/{own}", key.namespace),
        }
    }

    /// What rules of ModelRoutes know of the caller.
    pub(crate) fn facts(&self) -> FactsCaller<'_> {
        match self {
            Self::Anonymous => FactsCaller::default(),
            Self::Key(key) => FactsCaller {
                key: Some(&key.name),
                namespace: Some(&key.namespace),
                labels: Some(&key.labels),
            },
        }
    }

    /// Name and owner of the caller's key, by which Budgets count its requests.
    pub(crate) fn budget_key(&self) -> Option<(&str, Option<&str>)> {
        match self {
            Self::Anonymous => None,
            Self::Key(key) => Some((&key.name, key.owner.as_deref())),
        }
    }

    /// Limits on the caller's requests.
    pub fn limits(&self) -> RequestLimits {
        match self {
            Self::Anonymous => RequestLimits::default(),
            Self::Key(key) => key.limits,
        }
    }

    /// Takes one request from the caller's quota at `now`, time since the gateway started; `None` without a
    /// quota.
    pub fn take_quota(&self, now: Duration) -> Option<Quota> {
        let Self::Key(key) = self else { return None };
        let per_minute = key.per_minute?;
        let mut replenished_at = key.usage.replenished_at.lock();
        let quota = rate_limit::take_request(*replenished_at, now, per_minute);
        *replenished_at = quota.replenished_at;
        Some(quota)
    }
}

/// Whether the request's headers hold a key, good or not.
pub fn presents_key(headers: &HeaderMap) -> bool {
    presented_secret(headers).is_some()
}

/// The key in the request's headers: a bearer token, else `x-api-key`.
fn presented_secret(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        // A tab separates as well: keys are pasted from tables.
        let (scheme, secret) = value.as_bytes().split_at_checked("bearer".len())?;
        let separated = secret.first().is_some_and(|byte| matches!(byte, b' ' | b'\t'));
        (separated && scheme.eq_ignore_ascii_case(b"bearer")).then_some(secret)
    });
    let secret = bearer.or_else(|| headers.get(API_KEY).map(|value| value.as_bytes()))?.trim_ascii();
    (!secret.is_empty()).then_some(secret)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::objects::tests::{access_key, at};
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect()
    }

    #[test]
    fn keyring_leaves_loopback_open_until_the_first_key() {
        let expired = access_key("old", "s-old", |spec| spec.expires_at = Some(at(10)));
        let disabled = access_key("off", "s-off", |spec| spec.state = russet_crds::KeyState::Disabled);
        let good = access_key("good", "s-good", |_| {});
        let unlisted = Keyring::default();
        let none = Keyring::default().updated([], 0);
        let broken = Keyring::default().updated([], 1);
        let some = Keyring::default().updated([&good, &expired, &disabled], 3);
        let caller = |keyring: &Keyring, pairs: &[(&'static str, &str)], open: bool| match keyring.caller(
            &headers(pairs),
            IpAddr::from([127, 0, 0, 1]),
            open,
            at(20).0,
        ) {
            Ok(Caller::Anonymous) => "anonymous".to_owned(),
            Ok(Caller::Key(key)) => key.full_name().to_owned(),
            Err(error) => format!("{error:?}"),
        };
        let good = [("authorization", "Bearer s-good")];
        for (keyring, pairs, loopback, network) in [
            (&unlisted, &[][..], "MissingKey", "MissingKey"),
            (&unlisted, &good, "RejectedKey", "RejectedKey"),
            (&none, &[], "anonymous", "MissingKey"),
            (&none, &good, "anonymous", "RejectedKey"),
            (&broken, &[], "MissingKey", "MissingKey"),
            (&some, &[], "MissingKey", "MissingKey"),
            (&some, &good, "default/good", "default/good"),
            (&some, &[("authorization", "bEARER  s-good ")], "default/good", "default/good"),
            (&some, &[("authorization", "Bearer\ts-good\t")], "default/good", "default/good"),
            (&some, &[("authorization", "Bearers-good")], "MissingKey", "MissingKey"),
            (&some, &[("x-api-key", "s-good")], "default/good", "default/good"),
            (
                &some,
                &[("authorization", "Basic abc"), ("x-api-key", "s-good")],
                "default/good",
                "default/good",
            ),
            (&some, &[("authorization", "s-good")], "MissingKey", "MissingKey"),
            (&some, &[("authorization", "Bearer ")], "MissingKey", "MissingKey"),
            (&some, &[("authorization", "Bearer s-old")], "RejectedKey", "RejectedKey"),
            (&some, &[("authorization", "Bearer s-off")], "RejectedKey", "RejectedKey"),
            (&some, &[("authorization", "Bearer nix")], "RejectedKey", "RejectedKey"),
        ] {
            assert_eq!(caller(keyring, pairs, true), loopback, "loopback {keyring:?} {pairs:?}");
            assert_eq!(caller(keyring, pairs, false), network, "network {keyring:?} {pairs:?}");
        }
    }

    #[test]
    fn digest_debug_output_hides_the_hash() {
        let digest = Digest::sha256(b"secret");
        assert_eq!(Digest::parse(&hex::encode(digest.0)), Some(digest));
        assert_eq!(format!("{digest:?}"), "Digest(…)");
        for wrong in ["", "00", "zz", &"0".repeat(63), &"g".repeat(64)] {
            assert_eq!(Digest::parse(wrong), None, "{wrong}");
        }
    }
}
