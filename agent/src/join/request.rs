//! Certificate requests: creates a CertificateSigningRequest for the signer `russet.dev/node` and waits for
//! its result. Used by joining machines, renewing nodes and the gateway.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec, CertificateSigningRequestStatus,
};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use russet_crds::names::{CA_SECRET, NODE_SIGNER, SYSTEM_NAMESPACE};
use russet_rpc::tls;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use thiserror::Error;

/// Timeout of a request. The operator answers within a second, but may just be starting in a new cluster.
const SIGNING_TIMEOUT: Duration = Duration::from_secs(120);
/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Subject and usage of a certificate.
#[derive(Clone, Debug)]
pub struct CertificateRequest {
    user: String,
    group: Option<&'static str>,
    domain: String,
    prefix: String,
}

impl CertificateRequest {
    /// A node's certificate.
    pub fn node(node: &str) -> Self {
        Self {
            user: tls::node_user(node),
            group: Some(tls::NODES_GROUP),
            domain: tls::node_dns_name(node),
            prefix: format!("node-{node}"),
        }
    }

    /// The gateway's certificate.
    pub fn gateway() -> Self {
        Self {
            user: tls::GATEWAY_USER.to_owned(),
            group: None,
            domain: tls::GATEWAY_DNS_NAME.to_owned(),
            prefix: "gateway".to_owned(),
        }
    }

    /// The request for `key`, PEM.
    fn pem(&self, key: &KeyPair) -> Result<String, rcgen::Error> {
        let mut params = CertificateParams::new(vec![self.domain.clone()])?;
        let mut subject = DistinguishedName::new();
        if let Some(group) = self.group {
            subject.push(DnType::OrganizationName, group);
        }
        subject.push(DnType::CommonName, self.user.clone());
        params.distinguished_name = subject;
        params.serialize_request(key)?.pem()
    }
}

/// Why a certificate could not be obtained.
#[derive(Debug, Error)]
pub enum RequestError {
    /// The request could not be created.
    #[error("no certificate request for {user} can be made")]
    Key {
        /// User of the certificate.
        user: String,
        /// Cause.
        #[source]
        source: rcgen::Error,
    },
    /// The API server refused the request, or failed.
    #[error("the certificate request of {user} failed at the API server")]
    Api {
        /// User of the certificate.
        user: String,
        /// The server's answer.
        #[source]
        source: Box<kube::Error>,
    },
    /// The operator denied the request.
    #[error("the cluster refuses a certificate for {user}: {message}")]
    Denied {
        /// User of the certificate.
        user: String,
        /// The denial's message.
        message: String,
    },
    /// The request timed out.
    #[error(
        "no certificate came for {user} within {} s; the operator signs requests, check that it runs (request {request})",
        SIGNING_TIMEOUT.as_secs()
    )]
    Unsigned {
        /// User of the certificate.
        user: String,
        /// Name of the request.
        request: String,
    },
    /// The CA's certificate is not published.
    #[error("the CA of {user}'s certificate is not in ConfigMap {SYSTEM_NAMESPACE}/{CA_SECRET} after {} s; check that the operator runs", SIGNING_TIMEOUT.as_secs())]
    Authority {
        /// User of the certificate.
        user: String,
    },
}

/// Requests a certificate for `key` and waits for it; PEM.
pub async fn certificate(
    client: &Client,
    request: &CertificateRequest,
    key: &KeyPair,
) -> Result<String, RequestError> {
    let user = || request.user.clone();
    let failed = |source| RequestError::Api { user: user(), source: Box::new(source) };
    let pem = request.pem(key).map_err(|source| RequestError::Key { user: user(), source })?;
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let name = format!("{}-{}", request.prefix, hex::encode(rand::random::<[u8; 4]>()));
    let object = CertificateSigningRequest {
        metadata: ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() },
        spec: CertificateSigningRequestSpec {
            request: ByteString(pem.into_bytes()),
            signer_name: NODE_SIGNER.to_owned(),
            usages: Some(["digital signature", "client auth", "server auth"].map(String::from).to_vec()),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    requests.create(&PostParams::default(), &object).await.map_err(failed)?;

    let deadline = tokio::time::Instant::now() + SIGNING_TIMEOUT;
    while tokio::time::Instant::now() < deadline {
        let status = match requests.get(&name).await {
            Ok(found) => found.status.unwrap_or_default(),
            Err(error @ kube::Error::Api(_)) => return Err(failed(error)),
            // A restarting control plane keeps the request.
            Err(error) => {
                tracing::debug!(request = name, %error, "the request could not be read; retrying");
                CertificateSigningRequestStatus::default()
            }
        };
        if let Some(ByteString(certificate)) = status.certificate {
            return Ok(String::from_utf8_lossy(&certificate).into_owned());
        }
        let refusal = status
            .conditions
            .unwrap_or_default()
            .into_iter()
            .find(|condition| matches!(condition.type_.as_str(), "Denied" | "Failed"));
        if let Some(refusal) = refusal {
            let message = refusal.message.or(refusal.reason).unwrap_or(refusal.type_);
            return Err(RequestError::Denied { user: user(), message });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Err(RequestError::Unsigned { user: user(), request: name })
}

/// The published CAs, if they differ from `known`. A failed read is not an error, because the result is not
/// urgent.
pub async fn changed_authority(client: &Client, known: &str) -> Option<String> {
    match published(client).await {
        Ok(published) => published.filter(|published| published != known),
        Err(error) => {
            tracing::debug!(%error, "the CA could not be read; retrying");
            None
        }
    }
}

/// The certificates of the data-plane CA that the cluster publishes, PEM. The first one signs; during a CA
/// rotation the previous one is trusted too.
async fn published(client: &Client) -> Result<Option<String>, kube::Error> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let published = maps.get_opt(CA_SECRET).await?.and_then(|map| map.data?.remove("ca.crt"));
    Ok(published.filter(|pem| !certificates(pem).is_empty()))
}

/// The CA that signed `certificate`: the published one, which a new cluster may take a moment to publish;
/// else `known`, for a control plane of an older release that publishes none.
pub async fn authority(
    client: &Client,
    request: &CertificateRequest,
    certificate: &str,
    known: Option<&str>,
) -> Result<String, RequestError> {
    if let Some(known) = known.filter(|known| is_signed_by_any(known, certificate)) {
        return Ok(known.to_owned());
    }
    let deadline = tokio::time::Instant::now() + SIGNING_TIMEOUT;
    loop {
        match published(client).await {
            Ok(Some(published)) if is_signed_by_any(&published, certificate) => return Ok(published),
            Ok(_) => {}
            // The roles of a new cluster may not be in force yet.
            Err(error) => tracing::debug!(%error, "the CA could not be read; retrying"),
        }
        if tokio::time::Instant::now() > deadline {
            return Err(RequestError::Authority { user: request.user.clone() });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Whether one of these CAs signed that certificate.
fn is_signed_by_any(authorities: &str, certificate: &str) -> bool {
    certificates(authorities).iter().any(|ca| signed(ca, certificate))
}

/// Whether the currently signing CA signed that certificate; if not, a new certificate is needed.
pub fn is_signed_by_first(authorities: &str, certificate: &str) -> bool {
    certificates(authorities).first().is_some_and(|ca| signed(ca, certificate))
}

fn certificates(pem: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>().unwrap_or_default()
}

/// Whether the key identifiers match: this CA signed that certificate. Not a proof: both came over a trusted
/// connection, and a wrong pair only fails later.
fn signed(ca: &CertificateDer<'_>, certificate: &str) -> bool {
    use x509_parser::extensions::ParsedExtension;
    use x509_parser::parse_x509_certificate as parse;
    let Some(certificate) = certificates(certificate).into_iter().next() else { return false };
    let (Ok((_, ca)), Ok((_, certificate))) = (parse(ca), parse(&certificate)) else { return false };
    let own = ca.iter_extensions().find_map(|it| match it.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
        _ => None,
    });
    let issuer = certificate.iter_extensions().find_map(|it| match it.parsed_extension() {
        ParsedExtension::AuthorityKeyIdentifier(id) => id.key_identifier.as_ref().map(|id| id.0.to_vec()),
        _ => None,
    });
    certificate.issuer() == ca.subject() && own.is_some() && own == issuer
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertifiedIssuer, IsCa};

    use super::*;

    #[test]
    fn a_request_names_its_owner_and_nothing_else() {
        let key = KeyPair::generate().unwrap();
        for (expected, user, group) in [
            (CertificateRequest::node("mac-1"), "russet:node:mac-1", Some("russet:nodes")),
            (CertificateRequest::gateway(), "russet:gateway", None),
        ] {
            let parsed =
                rcgen::CertificateSigningRequestParams::from_pem(&expected.pem(&key).unwrap()).unwrap();
            let subject = &parsed.params.distinguished_name;
            assert_eq!(subject.get(&DnType::CommonName), Some(&user.into()));
            assert_eq!(subject.get(&DnType::OrganizationName), group.map(Into::into).as_ref());
            assert_eq!(parsed.params.subject_alt_names.len(), 1);
        }
    }

    #[test]
    fn ca_verifies_own_signatures_and_no_namesakes() {
        let authority = || {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name.push(DnType::CommonName, "russet-ca");
            CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
        };
        let (ca, namesake) = (authority(), authority());
        let mut params = CertificateParams::default();
        params.use_authority_key_identifier_extension = true;
        let leaf = params.signed_by(&KeyPair::generate().unwrap(), &ca).unwrap();
        assert!(is_signed_by_any(&ca.pem(), &leaf.pem()));
        assert!(!is_signed_by_any(&namesake.pem(), &leaf.pem()));
        assert!(!is_signed_by_any("", &leaf.pem()));
        // During a rotation both CAs are published, and the first signs.
        let both = |first: &str, second: &str| format!("{first}{second}");
        for (authorities, current) in
            [(both(&ca.pem(), &namesake.pem()), true), (both(&namesake.pem(), &ca.pem()), false)]
        {
            assert!(is_signed_by_any(&authorities, &leaf.pem()));
            assert_eq!(is_signed_by_first(&authorities, &leaf.pem()), current);
        }
    }
}
