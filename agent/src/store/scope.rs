//! For whom a source was fetched: a namespace with a Secret, and the account that the Secret names. What was published for
//! one scope is found by no other one. Not here: what a source shows to another scope (`reuse`).

use std::collections::BTreeSet;

use super::model_dirs::SourceRecord;
use super::{Published, SourceSpec, Store, file, hub, model_dirs, scheme_of};

/// Who asks for a source. What was fetched for one scope is given to another one only after the source itself has shown
/// these bytes to that one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceScope {
    /// Namespace of the Model.
    pub namespace: String,
    /// Name of its Secret.
    pub secret: Option<String>,
}

impl Store {
    /// The published directory of `spec`, without a request to its source. `None` when it is incomplete, when only the
    /// source could resolve the commit, or when it was not fetched for this scope and account.
    pub fn published(&self, spec: &SourceSpec) -> Option<Published> {
        let record = self.dirs.record_of(&self.key(spec)?)?;
        let complete_before = spec.content.as_ref() == Some(&record.id);
        // Which folders may be read may have changed since.
        let may = || self.is_same_account(spec, &record) && file::is_allowed(&self.context, &spec.uri);
        (complete_before || may()).then(|| self.dirs.published(&record.id))?
    }

    /// What an earlier release published and this copy was complete with, though no record of that release says for whom:
    /// for the time in which its source does not answer.
    pub fn published_unscoped(&self, spec: &SourceSpec) -> Option<Published> {
        let known = self.dirs.id_of(&self.unscoped_key(spec)?)?;
        (spec.content.as_ref() == Some(&known)).then(|| self.dirs.published(&known))?
    }

    /// Whether a record was made for the account that the credentials of `spec` name.
    pub(super) fn is_same_account(&self, spec: &SourceSpec, record: &SourceRecord) -> bool {
        self.account(spec).is_some_and(|account| record.account.as_ref() == Some(&account))
    }

    /// Digest of the endpoint and the account of a source; `None` until its Secret was read.
    pub(super) fn account(&self, spec: &SourceSpec) -> Option<String> {
        let scheme = scheme_of(&spec.uri).ok()?;
        if spec.scope.secret.is_some() && !scheme.keys.is_empty() && spec.credentials.is_empty() {
            return None;
        }
        let hub = scheme.prefix == hub::SCHEME.prefix;
        let mut parts = vec![scheme.prefix, if hub { self.context.hf_endpoint.as_str() } else { "" }];
        parts.extend(scheme.account.iter().map(|key| spec.credentials.get(key).unwrap_or_default()));
        Some(model_dirs::digest(&parts))
    }

    /// The key of `spec` in this store; `None` while the commit is unknown.
    pub fn key(&self, spec: &SourceSpec) -> Option<String> {
        Some(key_at(spec, known_commit(spec)?))
    }

    fn unscoped_key(&self, spec: &SourceSpec) -> Option<String> {
        Some(model_dirs::unscoped_key(&spec.uri, known_commit(spec)?, spec.sha256.as_deref()))
    }

    /// The names in this store that a copy of `spec` needs; `None` while the commit is unknown.
    pub fn keys(&self, spec: &SourceSpec) -> Option<BTreeSet<String>> {
        let key = self.key(spec)?;
        // What an earlier release published stays until the source has shown it for this scope.
        let unscoped = self.unscoped_key(spec).filter(|_| self.dirs.record_of(&key).is_none());
        let unscoped = unscoped.filter(|_| spec.content.is_some());
        Some([key].into_iter().chain(unscoped).chain(spec.content.clone()).collect())
    }
}

/// The commit of `spec`, where its scheme has any; `None` until it is resolved.
fn known_commit(spec: &SourceSpec) -> Option<Option<&str>> {
    match (scheme_of(&spec.uri).ok()?.pinned, spec.pinned) {
        (true, false) => None,
        (true, true) => Some(spec.revision.as_deref()),
        (false, _) => Some(None),
    }
}

/// The key of `spec` at this commit.
pub(super) fn key_at(spec: &SourceSpec, commit: Option<&str>) -> String {
    // Whoever may name a folder of this machine, or what agents carry, gets the same bytes without any credentials.
    let local = scheme_of(&spec.uri).is_ok_and(|scheme| scheme.keys.is_empty());
    let scope = if local { &SourceScope::default() } else { &spec.scope };
    model_dirs::key(scope, &spec.uri, commit, spec.sha256.as_deref())
}
