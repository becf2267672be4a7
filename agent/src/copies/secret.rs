//! The Secret of a copy's source. This node may read it only while it accesses the source.

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use russet_crds::conditions::Reason;

use crate::store::Credentials;

/// Contents of the Secret, which must have one of `keys`.
pub(super) async fn read(
    client: Client,
    namespace: &str,
    name: &str,
    keys: &[&str],
) -> Result<Credentials, (Reason, String)> {
    let secrets: Api<Secret> = Api::namespaced(client, namespace);
    let forbidden = |message: String| (Reason::SourceForbidden, message);
    let secret = match secrets.get_opt(name).await {
        Ok(Some(secret)) => secret,
        Ok(None) => {
            return Err(forbidden(format!(
                "Secret {namespace}/{name} does not exist; make it with `russet credentials add {name} KEY… -n {namespace}` of what opens the source ({})",
                keys.join(", ")
            )));
        }
        Err(kube::Error::Api(answer)) => {
            return Err(forbidden(format!(
                "this node may not read Secret {namespace}/{name}; `russet credentials allow {name} -n {namespace}` lets it while it fetches ({})",
                answer.message
            )));
        }
        Err(error) => {
            let message = format!("Secret {namespace}/{name} cannot be read now: {error}");
            return Err((Reason::SourceUnreachable, message));
        }
    };
    let data = secret.data.unwrap_or_default();
    let credentials = Credentials::new(data.into_iter().map(|(key, value)| (key, value.0)));
    match keys.iter().any(|key| credentials.get(key).is_some()) {
        true => Ok(credentials),
        false => Err(forbidden(format!(
            "Secret {namespace}/{name} has no text under any key that opens such a source ({}); add what it needs",
            keys.join(", ")
        ))),
    }
}
