//! Keys of providers and endpoints, from the Secrets that ModelProviders and HTTPEndpoints name. A gateway may read only those that the Role
//! `russet-providers` of their namespace names.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use parking_lot::Mutex;
use russet_crds::names::PROVIDERS_ROLE;
use tokio::time::{Instant, timeout};

/// The field of a Secret that has the key.
const KEY: &str = "token";
/// How long a key that was read is used before it is read again.
const MAX_AGE: Duration = Duration::from_secs(60);
/// How long the API server may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Reads keys, and remembers them for a while.
pub(crate) struct SecretReader {
    client: Option<Client>,
    read: Mutex<HashMap<(String, String), (Instant, String)>>,
}

impl SecretReader {
    /// A reader of the cluster's Secrets; without a client there are none.
    pub(crate) fn new(client: Option<Client>) -> Self {
        Self { client, read: Mutex::default() }
    }

    /// The key in a Secret; an error says what is wrong and what to do.
    pub(crate) async fn token(&self, namespace: &str, name: &str) -> Result<String, String> {
        let id = (namespace.to_owned(), name.to_owned());
        let known = self.read.lock().get(&id).cloned();
        if let Some((at, token)) = &known
            && at.elapsed() < MAX_AGE
        {
            return Ok(token.clone());
        }
        match self.fetch(namespace, name).await {
            Ok(token) => {
                self.read.lock().insert(id, (Instant::now(), token.clone()));
                Ok(token)
            }
            // While the API server is away the last key serves on.
            Err(FetchError::Unreachable(message)) => known.map(|(_, token)| token).ok_or(message),
            Err(FetchError::Refused(message)) => {
                self.read.lock().remove(&id);
                Err(message)
            }
        }
    }

    /// Forgets a key that its provider does not accept: it may have been replaced.
    pub(crate) fn forget(&self, namespace: &str, name: &str) {
        self.read.lock().remove(&(namespace.to_owned(), name.to_owned()));
    }

    async fn fetch(&self, namespace: &str, name: &str) -> Result<String, FetchError> {
        let what = format!("Secret {namespace}/{name}");
        let Some(client) = &self.client else {
            return Err(FetchError::Refused(format!("{what} is not read: this gateway has no API server")));
        };
        let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
        let secret = match timeout(TIMEOUT, secrets.get(name)).await {
            Ok(Ok(secret)) => secret,
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 403 | 404) => {
                return Err(FetchError::Refused(format!(
                    "{what} does not exist, or the Role {PROVIDERS_ROLE} does not name it; `russet credentials add {name} \
                     --for providers -n {namespace}` sees to both"
                )));
            }
            Ok(Err(error)) => {
                return Err(FetchError::Unreachable(format!("{what} could not be read: {error}")));
            }
            Err(_) => {
                let seconds = TIMEOUT.as_secs();
                return Err(FetchError::Unreachable(format!("{what} could not be read within {seconds} s")));
            }
        };
        let bytes = secret.data.and_then(|mut data| data.remove(KEY)).map(|bytes| bytes.0);
        let token = bytes.and_then(|bytes| String::from_utf8(bytes).ok()).map(|text| text.trim().to_owned());
        token
            .filter(|token| !token.is_empty())
            .ok_or_else(|| FetchError::Refused(format!("{what} has no text in its key `{KEY}`")))
    }
}

enum FetchError {
    /// The API server did not answer.
    Unreachable(String),
    /// There is no such key for this gateway.
    Refused(String),
}
