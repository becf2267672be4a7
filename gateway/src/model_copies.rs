//! How far the files of a Model are on their way to the nodes that need them. Asked of the API server while a client pulls
//! a model, and not watched: a cluster has thousands of ModelCopies, and pulls are rare.

use kube::api::ListParams;
use kube::{Api, Client};
use russet_crds::conditions::{self, Type};
use russet_crds::{CopyMode, ModelCopy, names};

use crate::api_timeout::with_timeout;

/// Reads the ModelCopies of a Model.
#[derive(Clone)]
pub(crate) struct ModelCopies {
    client: Client,
}

/// The copies of a Model that are wanted whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopyProgress {
    /// How many there are.
    pub(crate) wanted: usize,
    /// How many of them are there, verified.
    pub(crate) complete: usize,
    /// Bytes that have arrived, of all of them.
    pub(crate) bytes_done: u64,
    /// Bytes of all of them, as far as they are known.
    pub(crate) bytes_total: u64,
}

impl ModelCopies {
    /// Asks as this client.
    pub(crate) fn new(client: Client) -> Self {
        Self { client }
    }

    /// How far the copies of this Model are; `None` where the API server does not say it.
    pub(crate) async fn progress(&self, namespace: &str, model: &str) -> Option<CopyProgress> {
        let labels = [(names::LABEL_MODEL_NAMESPACE, namespace), (names::LABEL_MODEL, model)]
            .map(|(label, value)| format!("{label}={}", names::label_value(value)));
        let params = ListParams::default().labels(&labels.join(","));
        let api: Api<ModelCopy> = Api::all(self.client.clone());
        match with_timeout(api.list(&params)).await {
            Ok(list) => {
                // Of long names the labels have the beginning and a digest.
                let of_model = list.items.into_iter().filter(|copy| {
                    copy.spec.model_ref.namespace == namespace && copy.spec.model_ref.name == model
                });
                Some(CopyProgress::of(of_model))
            }
            Err(error) => {
                tracing::debug!(namespace, model, "cannot list the copies of the Model: {}", error.cause);
                None
            }
        }
    }
}

impl CopyProgress {
    fn of(copies: impl IntoIterator<Item = ModelCopy>) -> Self {
        let wanted = copies
            .into_iter()
            .filter(|copy| copy.spec.want == CopyMode::Files && copy.metadata.deletion_timestamp.is_none());
        wanted.fold(Self::default(), |sum, copy| {
            let status = copy.status.unwrap_or_default();
            let is_complete = conditions::is_true(&status.conditions, Type::Ready);
            Self {
                wanted: sum.wanted + 1,
                complete: sum.complete + usize::from(is_complete),
                bytes_done: sum.bytes_done.saturating_add(status.bytes_done),
                bytes_total: sum.bytes_total.saturating_add(status.bytes_total),
            }
        })
    }

    /// Whether all files are there that are wanted.
    pub(crate) fn is_complete(self) -> bool {
        self.wanted > 0 && self.complete == self.wanted
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn copy(want: &str, done: u64, ready: &str) -> ModelCopy {
        let copy = json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": "ModelCopy", "metadata": {"name": "c"},
            "spec": {
                "modelRef": {"namespace": "default", "name": "m"}, "source": {"uri": "hf://a/b"}, "nodeName": "a",
                "want": want,
            },
            "status": {
                "bytesDone": done, "bytesTotal": 100,
                "conditions": [{
                    "type": "Ready", "status": ready, "reason": "Ready", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }],
            },
        });
        serde_json::from_value(copy).unwrap()
    }

    #[test]
    fn progress_is_the_sum_of_the_copies_that_are_wanted_whole() {
        let progress = |wanted, complete, bytes_done, bytes_total| CopyProgress {
            wanted,
            complete,
            bytes_done,
            bytes_total,
        };
        for (copies, expected, is_complete) in [
            (vec![], progress(0, 0, 0, 0), false),
            (vec![copy("Headers", 7, "True")], progress(0, 0, 0, 0), false),
            (vec![copy("Files", 30, "False"), copy("Headers", 1, "True")], progress(1, 0, 30, 100), false),
            (vec![copy("Files", 30, "False"), copy("Files", 100, "True")], progress(2, 1, 130, 200), false),
            (vec![copy("Files", 100, "True"), copy("Files", 100, "True")], progress(2, 2, 200, 200), true),
        ] {
            let found = CopyProgress::of(copies);
            assert_eq!((found, found.is_complete()), (expected, is_complete));
        }
    }
}
