//! Builds a [`Keyring`] from AccessKeys. Pure; the usage counted for each secret is carried over.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{AccessKey, KeyState, ModelManagement, names};

use super::{ApiKey, Digest, KeyUsage, Keyring, SecretRejection, SourceRanges};
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
        let owners = self.owners(&objects);
        let mut by_digest: HashMap<Digest, Arc<ApiKey>> = HashMap::new();
        let mut keys = Vec::new();
        for object in objects {
            let digest = Digest::parse(&object.spec.secret_sha256);
            let first = digest.and_then(|digest| by_digest.get(&digest));
            let previous = digest.and_then(|digest| self.by_digest.get(&digest));
            let usage = previous.map_or_else(|| Arc::new(KeyUsage::default()), |key| key.usage.clone());
            let owner = digest.and_then(|digest| owners.get(&digest));
            let rejection = match (digest, owner, first) {
                (None, ..) => None,
                (Some(_), owner, _) if owner != object.metadata.namespace.as_ref() => {
                    Some(SecretRejection::Foreign(owner.cloned()))
                }
                (_, _, first) => first.map(|key| SecretRejection::Duplicate(key.full_name().to_owned())),
            };
            let is_owner = rejection.is_none();
            let key = Arc::new(ApiKey { rejection, ..read_key(object, usage) });
            if let (Some(digest), true) = (digest, is_owner) {
                by_digest.insert(digest, key.clone());
            }
            keys.push(key);
        }
        Self { synced: true, object_count, keys, by_digest, owners }
    }

    /// The namespace that each secret belongs to: the first one in which it was seen, until an AccessKey there says
    /// that it moves. Whoever knows a hash, which may stand in Git, could otherwise wait until its key is made anew.
    /// A restarted gateway knows by the status which keys are of another namespace.
    fn owners(&self, oldest_first: &[&AccessKey]) -> HashMap<Digest, String> {
        let mut owners = self.owners.clone();
        let mut present = HashSet::new();
        let parsed =
            |object: &AccessKey| Some((Digest::parse(&object.spec.secret_sha256)?, object.namespace()?));
        for object in oldest_first {
            let Some((digest, namespace)) = parsed(object) else { continue };
            present.insert(digest);
            if !is_foreign(object) {
                owners.entry(digest).or_insert(namespace);
            }
        }
        for object in oldest_first {
            let Some((digest, namespace)) = parsed(object) else { continue };
            let target = object.annotations().get(names::SECRET_MOVES_TO);
            if let (Some(target), true) = (target, owners.get(&digest) == Some(&namespace)) {
                owners.insert(digest, target.clone());
            }
        }
        let mut gone = owners.len() - owners.keys().filter(|digest| present.contains(digest)).count();
        owners.retain(|digest, _| {
            let keep = present.contains(digest) || gone <= MAX_GONE_SECRETS;
            gone -= usize::from(!keep);
            keep
        });
        owners
    }
}

/// Secrets without an AccessKey whose namespace is remembered, 60 bytes each: more than anybody deletes while a gateway
/// runs. Of more some are forgotten.
const MAX_GONE_SECRETS: usize = 10_000;

/// Whether a gateway found that the secret belongs to another namespace.
fn is_foreign(object: &AccessKey) -> bool {
    let conditions = object.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    conditions::get(conditions, Type::Ready)
        .is_some_and(|ready| ready.reason == format!("{:?}", Reason::ForeignSecret))
}

fn read_key(object: &AccessKey, usage: Arc<KeyUsage>) -> ApiKey {
    let namespace = object.namespace().unwrap_or_default();
    let spec = &object.spec;
    let name = object.name_any();
    ApiKey {
        full_name: format!("{namespace}/{name}").into(),
        name,
        generation: object.metadata.generation,
        status: object.status.clone().unwrap_or_default(),
        owner: spec.owner.clone(),
        labels: object.labels().clone(),
        scope: ModelScope::new(&namespace, &spec.models),
        namespace,
        limits: RequestLimits {
            priority: spec.priority.clamp(-MAX_PRIORITY, MAX_PRIORITY),
            max_tokens: spec.max_tokens_per_request,
            max_duration: spec.max_request_seconds.map(|seconds| Duration::from_secs(seconds.into())),
        },
        manages_models: spec.model_management == ModelManagement::Allowed,
        per_minute: spec.requests_per_minute,
        expires: spec.expires_at.as_ref().map(|time| time.0),
        sources: SourceRanges::parse(&spec.source_ranges),
        enabled: spec.state == KeyState::Enabled && object.metadata.deletion_timestamp.is_none(),
        rejection: None,
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
        keyring.caller(&headers.into_iter().collect(), [127, 0, 0, 1].into(), true, at(5).0).ok()
    }

    #[test]
    fn only_a_key_that_says_allowed_manages_models() {
        for (value, expected) in [
            (ModelManagement::Denied, false),
            (ModelManagement::Allowed, true),
            (ModelManagement::Unknown, false),
        ] {
            let key = access_key("k", "s", |spec| spec.model_management = value);
            let caller = caller(&Keyring::default().updated([&key], 1), "s").unwrap();
            assert_eq!(caller.model_manager().is_some(), expected, "{value:?}");
        }
        assert!(Caller::Anonymous.model_manager().is_none());
        assert_eq!(russet_crds::AccessKeySpec::default().model_management, ModelManagement::Denied);
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
        let rejections: Vec<Option<&SecretRejection>> =
            keyring.keys.iter().map(|key| key.rejection.as_ref()).collect();
        assert_eq!(rejections, [None, Some(&SecretRejection::Foreign(Some("default".into())))]);
        let mut second = access_key("second", "s", |_| {});
        second.metadata.creation_timestamp = Some(at(3));
        let keyring = Keyring::default().updated([&second, &original], 2);
        assert_eq!(keyring.keys[1].rejection, Some(SecretRejection::Duplicate("default/original".into())));
        assert!(
            caller(&keyring.updated([&second], 1), "s").is_some(),
            "within a namespace the next one counts"
        );
    }

    /// The AccessKey `name` of a namespace, made at this second.
    fn key_in(namespace: &str, name: &str, second: i64) -> AccessKey {
        let mut key = access_key(name, "s", |_| {});
        key.metadata.namespace = Some(namespace.into());
        key.metadata.creation_timestamp = Some(at(second));
        key
    }

    fn opened(keyring: &Keyring) -> Option<String> {
        match caller(keyring, "s")? {
            Caller::Key(key) => Some(key.full_name().to_owned()),
            Caller::Anonymous => None,
        }
    }

    #[test]
    fn a_secret_stays_with_its_first_namespace() {
        let (original, copy) = (key_in("team", "original", 1), key_in("thief", "copy", 2));
        let both = Keyring::default().updated([&original, &copy], 2);
        assert_eq!(opened(&both).as_deref(), Some("team/original"));
        let gone = both.updated([&copy], 1);
        assert_eq!(opened(&gone), None, "the copy waits in vain");
        let again = gone.updated([&copy, &key_in("team", "anew", 9)], 2);
        assert_eq!(opened(&again).as_deref(), Some("team/anew"), "though it is younger");
        // The copy is made while there is no key at all.
        let empty = Keyring::default().updated([&original], 1).updated([], 0);
        assert_eq!(opened(&empty.updated([&copy], 1)), None);
    }

    #[test]
    fn a_restarted_gateway_knows_foreign_secrets_by_their_status() {
        let mut copy = key_in("thief", "copy", 2);
        let mut status = russet_crds::AccessKeyStatus::default();
        conditions::set(
            &mut status.conditions,
            Type::Ready,
            false,
            Reason::ForeignSecret,
            "m",
            None,
            at(3).0,
        );
        copy.status = Some(status);
        let restarted = Keyring::default().updated([&copy], 1);
        assert_eq!(opened(&restarted), None);
        assert_eq!(restarted.keys[0].rejection, Some(SecretRejection::Foreign(None)));
        let again = restarted.updated([&copy, &key_in("team", "anew", 9)], 2);
        assert_eq!(opened(&again).as_deref(), Some("team/anew"));
    }

    #[test]
    fn a_secret_moves_where_its_own_namespace_says() {
        let annotated = |mut key: AccessKey, target: &str| {
            key.annotations_mut().insert(names::SECRET_MOVES_TO.into(), target.into());
            key
        };
        let (original, moved) = (key_in("team", "original", 1), key_in("lab", "moved", 2));
        let both = Keyring::default().updated([&original, &moved], 2);
        let claimed = both.updated([&original, &annotated(moved.clone(), "lab")], 2);
        assert_eq!(opened(&claimed).as_deref(), Some("team/original"), "the copy cannot say it of itself");
        let said = both.updated([&annotated(original, "lab"), &moved], 2);
        assert_eq!(opened(&said).as_deref(), Some("lab/moved"));
        assert_eq!(opened(&said.updated([&moved], 1)).as_deref(), Some("lab/moved"));
    }

    #[test]
    fn secrets_that_are_gone_are_remembered_within_a_bound() {
        let keys: Vec<AccessKey> =
            (0..MAX_GONE_SECRETS + 3).map(|number| access_key("k", &format!("s{number}"), |_| {})).collect();
        let keyring = Keyring::default().updated(&keys, keys.len());
        assert_eq!(keyring.updated([], 0).owners.len(), MAX_GONE_SECRETS);
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
