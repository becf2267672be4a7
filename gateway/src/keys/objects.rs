//! Builds a [`Keyring`] from AccessKeys. Pure; the usage counted for each secret is carried over.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt as _;
use russet_crds::{AccessKey, KeyState};

use super::{ApiKey, Digest, KeyUsage, Keyring};
use crate::request_limits::{MAX_PRIORITY, RequestLimits};
use crate::routes::ModelScope;

impl Keyring {
    /// The keyring of these AccessKeys; `object_count` also counts those that cannot be decoded.
    pub fn updated<'a>(&self, objects: impl IntoIterator<Item = &'a AccessKey>, object_count: usize) -> Self {
        let mut objects: Vec<&AccessKey> = objects.into_iter().collect();
        // The oldest object first: copying the hash of an older key must not move its requests to another
        // namespace.
        objects.sort_by_cached_key(|object| {
            let created = object.metadata.creation_timestamp.as_ref().map(|time| time.0);
            (created, object.namespace(), object.name_any())
        });
        let mut by_digest: HashMap<Digest, Arc<ApiKey>> = HashMap::new();
        let mut keys = Vec::new();
        for object in objects {
            let digest = Digest::parse(&object.spec.secret_sha256);
            let first = digest.and_then(|digest| by_digest.get(&digest));
            let previous = digest.and_then(|digest| self.by_digest.get(&digest));
            let usage = previous.map_or_else(|| Arc::new(KeyUsage::default()), |key| key.usage.clone());
            let key = Arc::new(ApiKey {
                duplicate_of: first.map(|key| key.full_name()),
                ..read_key(object, usage)
            });
            if let (Some(digest), None) = (digest, first) {
                by_digest.insert(digest, key.clone());
            }
            keys.push(key);
        }
        Self { synced: true, object_count, keys, by_digest }
    }
}

fn read_key(object: &AccessKey, usage: Arc<KeyUsage>) -> ApiKey {
    let namespace = object.namespace().unwrap_or_default();
    let spec = &object.spec;
    ApiKey {
        name: object.name_any(),
        generation: object.metadata.generation,
        status: object.status.clone().unwrap_or_default(),
        scope: ModelScope::new(&namespace, &spec.models),
        namespace,
        limits: RequestLimits {
            priority: spec.priority.clamp(-MAX_PRIORITY, MAX_PRIORITY),
            max_tokens: spec.max_tokens_per_request,
            max_duration: spec.max_request_seconds.map(|seconds| Duration::from_secs(seconds.into())),
        },
        per_minute: spec.requests_per_minute,
        expires: spec.expires_at.as_ref().map(|time| time.0),
        enabled: spec.state == KeyState::Enabled && object.metadata.deletion_timestamp.is_none(),
        duplicate_of: None,
        usage,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::AccessKeySpec;

    use super::super::Caller;
    use super::*;

    pub(in crate::keys) fn at(second: i64) -> Time {
        Time(jiff::Timestamp::from_second(second).unwrap())
    }

    pub(in crate::keys) fn access_key(
        name: &str,
        secret: &str,
        change: impl FnOnce(&mut AccessKeySpec),
    ) -> AccessKey {
        let digest = hex::encode(Digest::sha256(secret.as_bytes()).0);
        let mut spec = AccessKeySpec { secret_sha256: digest, ..Default::default() };
        change(&mut spec);
        let mut object = AccessKey::new(name, spec);
        object.metadata.namespace = Some("default".into());
        object.metadata.generation = Some(1);
        object.metadata.creation_timestamp = Some(at(1));
        object
    }

    fn caller(keyring: &Keyring, secret: &str) -> Option<Caller> {
        let headers = [(axum::http::header::AUTHORIZATION, format!("Bearer {secret}").parse().unwrap())];
        keyring.caller(&headers.into_iter().collect(), true, at(5).0).ok()
    }

    #[test]
    fn a_quota_survives_changes_of_its_key_and_not_of_its_secret() {
        let now = std::time::Duration::from_secs(1);
        let take = |keyring: &Keyring, secret: &str| caller(keyring, secret).unwrap().take_quota(now);
        let key =
            |secret: &str, per_minute| access_key("k", secret, |spec| spec.requests_per_minute = per_minute);
        let first = Keyring::default().updated([&key("one", Some(2))], 1);
        assert_eq!(take(&first, "one").map(|quota| quota.remaining), Some(1));
        let changed = first.updated([&key("one", Some(4))], 1);
        assert_eq!(take(&changed, "one").map(|quota| quota.remaining), Some(1));
        assert_eq!(take(&changed.updated([&key("one", None)], 1), "one"), None);
        let replaced = changed.updated([&key("two", Some(2))], 1);
        assert!(caller(&replaced, "one").is_none());
        assert_eq!(take(&replaced, "two").map(|quota| quota.remaining), Some(1));
    }

    #[test]
    fn oldest_of_keys_with_one_secret_decides_even_if_disabled() {
        let original = access_key("original", "s", |spec| spec.state = KeyState::Disabled);
        let mut copy = access_key("copy", "s", |_| {});
        copy.metadata.namespace = Some("other".into());
        copy.metadata.creation_timestamp = Some(at(2));
        let keyring = Keyring::default().updated([&copy, &original], 2);
        assert!(caller(&keyring, "s").is_none(), "the copy must not revive a disabled key");
        let duplicates: Vec<Option<&str>> =
            keyring.keys.iter().map(|key| key.duplicate_of.as_deref()).collect();
        assert_eq!(duplicates, [None, Some("default/original")]);
        assert!(caller(&keyring.updated([&copy], 1), "s").is_some());
    }

    #[test]
    fn deleted_key_or_key_without_valid_hash_is_rejected() {
        let mut leaving = access_key("leaving", "s", |_| {});
        leaving.metadata.deletion_timestamp = Some(at(3));
        assert!(caller(&Keyring::default().updated([&leaving], 1), "s").is_none());
        let broken = access_key("broken", "s", |spec| spec.secret_sha256 = "s".into());
        assert!(caller(&Keyring::default().updated([&broken], 1), "s").is_none());
    }
}
