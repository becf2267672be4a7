//! The credential a node uses at the API server: its certificate where the server trusts the CA that signed
//! it (the embedded one does), elsewhere tokens of its ServiceAccount.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use k8s_openapi::api::authentication::v1::{SelfSubjectReview, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::{Api, Client, Config};
use russet_rpc::tls::node_user;

/// Namespace of the nodes' ServiceAccounts.
const NAMESPACE: &str = "russet-nodes";
/// Requested lifetime of a token: that of a certificate, unless the server grants less.
const LIFETIME_SECONDS: i64 = 30 * 24 * 3600;
/// Retry timeout: a new role takes a moment to be in force on every API server.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum number of attempts while the server does not answer.
const MAX_ATTEMPTS: usize = 5;

/// Credential for the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Its certificate.
    Certificate,
    /// A token of its ServiceAccount.
    Token,
}

/// Asks the server which user the certificate authenticates.
pub async fn discover(
    mut config: Config,
    node: &str,
    certificate: &str,
    key: &str,
) -> Result<Access, kube::Error> {
    config.auth_info.client_certificate_data = Some(STANDARD.encode(certificate));
    config.auth_info.client_key_data = Some(STANDARD.encode(key).into());
    let reviews: Api<SelfSubjectReview> = Api::all(Client::try_from(config)?);
    let mut tries = 0;
    loop {
        tries += 1;
        match reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await {
            Ok(review) => {
                let seen = review.status.and_then(|status| status.user_info?.username);
                let own = seen.as_deref() == Some(node_user(node).as_str());
                return Ok(if own { Access::Certificate } else { Access::Token });
            }
            // The certificate is not trusted, or the server is too old for the request.
            Err(kube::Error::Api(answer)) if matches!(answer.code, 401 | 403 | 404) => {
                return Ok(Access::Token);
            }
            Err(error) if tries >= MAX_ATTEMPTS => return Err(error),
            Err(error) => {
                tracing::debug!(%error, "the server could not be asked for this node's identity; retrying");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Requests a token of the node's ServiceAccount.
pub async fn token(client: &Client, node: &str) -> Result<String, kube::Error> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
    let request = TokenRequest {
        spec: Some(TokenRequestSpec {
            expiration_seconds: Some(LIFETIME_SECONDS),
            ..TokenRequestSpec::default()
        }),
        ..TokenRequest::default()
    };
    let deadline = tokio::time::Instant::now() + TOKEN_TIMEOUT;
    loop {
        let answer: Result<TokenRequest, _> =
            accounts.create_subresource("token", node, &PostParams::default(), &request).await;
        match answer.map(|answer| answer.status.and_then(|status| status.token)) {
            Ok(Some(token)) => return Ok(token),
            Ok(None) if tokio::time::Instant::now() < deadline => {}
            Ok(None) => return Err(kube::Error::Service("the answer holds no token".into())),
            Err(kube::Error::Api(answer))
                if matches!(answer.code, 403 | 404) && tokio::time::Instant::now() < deadline => {}
            Err(error) => return Err(error),
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Validity of a token, in seconds since 1970; `None` when the token does not contain it.
pub fn validity(token: &str) -> Option<(i64, i64)> {
    let claims = URL_SAFE_NO_PAD.decode(token.trim().split('.').nth(1)?).ok()?;
    let claims: serde_json::Value = serde_json::from_slice(&claims).ok()?;
    Some((claims["iat"].as_i64()?, claims["exp"].as_i64()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_account_token_states_its_validity() {
        let claims = URL_SAFE_NO_PAD.encode(r#"{"iat": 100, "exp": 400, "sub": "x"}"#);
        assert_eq!(validity(&format!("e30.{claims}.sig\n")), Some((100, 400)));
        for wrong in ["", "abcdef.0123456789abcdef", "a.b.c", "e30.e30.e30"] {
            assert_eq!(validity(wrong), None, "{wrong}");
        }
    }
}
