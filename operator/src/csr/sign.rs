//! Parsing and signing of certificate requests. A request determines only its key: every other field of the
//! certificate is set here.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use rcgen::{
    CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType, DnValue,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData as _, SanType,
    SerialNumber,
};
use sha2::Digest as _;
use thiserror::Error;

use super::decide::CsrSubject;

/// Thirty days: long enough for a machine that is switched off over a holiday, short enough that a stolen one
/// loses access within a month. Agents renew after twenty.
const MAX_LIFETIME_SECONDS: i64 = 30 * 24 * 3600;
/// The minimum lifetime that may be requested, as in Kubernetes.
const MIN_LIFETIME_SECONDS: i64 = 600;
/// Allowance for clock differences; a certificate from the future would be rejected.
const SKEW_SECONDS: i64 = 300;
/// The subject attribute from which API servers take a user's UID.
const USER_UID: [u64; 8] = [1, 3, 6, 1, 4, 1, 57683, 2];
/// Environment variable with another maximum lifetime, in seconds, for tests of renewal; may be below the
/// minimum.
const LIFETIME_ENV: &str = "RUSSET_CERTIFICATE_SECONDS";

/// Why a request cannot be read or signed.
#[derive(Debug, Error)]
pub enum SignError {
    /// Not PKCS#10, or its signature does not match its key.
    #[error("this is not a certificate request with a valid signature ({0}); make a new key and ask again")]
    Request(rcgen::Error),
    /// The CA Secret lacks something.
    #[error("the Secret of the CA lacks {0}; restore it from the control plane's data directory")]
    Secret(&'static str),
    /// The CA is unusable.
    #[error("the CA cannot be used: {0}; restore its Secret from the control plane's data directory")]
    Authority(rcgen::Error),
    /// The CA's certificate and key do not match.
    #[error(
        "tls.key in the Secret of the CA is not the key of the first certificate in tls.crt; put the certificate that signs first, with its own key"
    )]
    Pair,
    /// Signing itself failed.
    #[error("signing failed: {0}")]
    Sign(rcgen::Error),
}

/// The identity in a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestedIdentity {
    /// Common name.
    pub common_name: String,
    /// Organisations.
    pub organizations: Vec<String>,
    /// DNS names.
    pub dns_names: Vec<String>,
    /// Number of requested names of other kinds.
    pub other_names: usize,
    /// `sha256:` and the hex digest of the public key.
    pub key: String,
}

/// Parses a PEM request and verifies that it is signed with its own key.
pub fn read(pem: &[u8]) -> Result<RequestedIdentity, SignError> {
    let request = parse(pem)?;
    let key =
        format!("sha256:{}", hex::encode(sha2::Sha256::digest(request.public_key.subject_public_key_info())));
    let CertificateParams { subject_alt_names, distinguished_name, .. } = request.params;
    let text = |value: &DnValue| match value {
        DnValue::Utf8String(text) => text.clone(),
        DnValue::PrintableString(text) => text.as_str().to_owned(),
        other => format!("{other:?}"),
    };
    let mut identity = RequestedIdentity { key, ..RequestedIdentity::default() };
    for (kind, value) in distinguished_name.iter() {
        match kind {
            DnType::CommonName => identity.common_name = text(value),
            DnType::OrganizationName => identity.organizations.push(text(value)),
            _ => identity.other_names += 1,
        }
    }
    for name in &subject_alt_names {
        match name {
            SanType::DnsName(name) => identity.dns_names.push(name.as_str().to_owned()),
            _ => identity.other_names += 1,
        }
    }
    Ok(identity)
}

/// Default and maximum lifetime of certificates.
pub fn max_lifetime_seconds() -> i64 {
    let set = std::env::var(LIFETIME_ENV).ok().and_then(|text| text.parse().ok());
    set.unwrap_or(MAX_LIFETIME_SECONDS).max(1)
}

/// Signs the key of a request for the subject and its incarnation, for at most `longest` seconds; returns the
/// certificate in PEM.
pub fn sign(
    secret: &Secret,
    pem: &[u8],
    subject: &CsrSubject,
    life: Option<&str>,
    seconds: Option<i32>,
    longest: i64,
    now: Timestamp,
) -> Result<String, SignError> {
    let field = |name: &'static str| {
        let bytes = secret.data.as_ref().and_then(|data| data.get(name)).ok_or(SignError::Secret(name))?;
        std::str::from_utf8(&bytes.0).map_err(|_| SignError::Secret(name))
    };
    let key = KeyPair::from_pem(field("tls.key")?).map_err(SignError::Authority)?;
    let certificates = field("tls.crt")?;
    let pair = is_key_of_first(certificates, &key);
    let issuer = Issuer::from_ca_cert_pem(certificates, key).map_err(SignError::Authority)?;
    if !pair {
        return Err(SignError::Pair);
    }

    let mut request = parse(pem)?;
    let mut params = CertificateParams::new(vec![subject.domain()]).map_err(SignError::Sign)?;
    params.distinguished_name = DistinguishedName::new();
    if let Some(group) = subject.group() {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params.distinguished_name.push(DnType::CommonName, subject.user());
    if let Some(life) = life {
        params.distinguished_name.push(DnType::CustomDnType(USER_UID.to_vec()), life);
    }
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    let mut serial: [u8; 16] = rand::random();
    // Serial numbers are positive.
    serial[0] &= 0x7f;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    let seconds = seconds.map_or(longest, i64::from).max(MIN_LIFETIME_SECONDS).min(longest);
    // A clock before 1970 gives an expired certificate.
    let since_1970 = |second: i64| Duration::from_secs(u64::try_from(second).unwrap_or(0));
    // Back-dated by no more than its lifetime, or a short-lived one would seem half expired at once.
    let begin = now.as_second() - SKEW_SECONDS.min(seconds);
    params.not_before = rcgen::date_time_ymd(1970, 1, 1) + since_1970(begin);
    params.not_after = rcgen::date_time_ymd(1970, 1, 1) + since_1970(now.as_second() + seconds);
    request.params = params;
    request.signed_by(&issuer).map(|certificate| certificate.pem()).map_err(SignError::Sign)
}

/// Whether the key matches the first of these certificates.
fn is_key_of_first(certificates: &str, key: &KeyPair) -> bool {
    x509_parser::pem::parse_x509_pem(certificates.as_bytes()).is_ok_and(|(_, first)| {
        first.parse_x509().is_ok_and(|it| *it.public_key().subject_public_key.data == *key.der_bytes())
    })
}

fn parse(pem: &[u8]) -> Result<CertificateSigningRequestParams, SignError> {
    let text = std::str::from_utf8(pem)
        .map_err(|_| SignError::Request(rcgen::Error::CouldNotParseCertificationRequest))?;
    CertificateSigningRequestParams::from_pem(text).map_err(SignError::Request)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use rcgen::CertifiedIssuer;

    use super::*;

    fn authority() -> Secret {
        let key = KeyPair::generate().unwrap();
        let pem = key.serialize_pem();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, key).unwrap();
        let data = [("tls.crt", issuer.pem()), ("tls.key", pem)];
        let data = data.into_iter().map(|(name, text)| (name.to_owned(), ByteString(text.into_bytes())));
        Secret { data: Some(data.collect()), ..Secret::default() }
    }

    #[test]
    fn certificate_takes_only_the_key_from_the_request() {
        let mut asked = CertificateParams::new(vec!["bank.example".to_owned()]).unwrap();
        asked.distinguished_name.push(DnType::CommonName, "admin");
        asked.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = asked.serialize_request(&key).unwrap().pem().unwrap();
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let certificate = sign(
            &authority(),
            pem.as_bytes(),
            &CsrSubject::Node("a".into()),
            Some("first"),
            Some(3600),
            MAX_LIFETIME_SECONDS,
            now,
        )
        .unwrap();

        let (_, der) = x509_parser::pem::parse_x509_pem(certificate.as_bytes()).unwrap();
        let parsed = der.parse_x509().unwrap();
        let name = "O=russet:nodes, CN=russet:node:a, OID(1.3.6.1.4.1.57683.2)=first";
        assert_eq!(parsed.subject().to_string(), name);
        let names = parsed.subject_alternative_name().unwrap().unwrap();
        assert_eq!(format!("{:?}", names.value.general_names), "[DNSName(\"a.node.russet.dev\")]");
        assert!(!parsed.is_ca());
        assert_eq!(parsed.validity().not_before.timestamp(), now.as_second() - SKEW_SECONDS);
        assert_eq!(parsed.validity().not_after.timestamp(), now.as_second() + 3600);
        let usage = parsed.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.client_auth && usage.server_auth && !usage.any);
    }

    #[test]
    fn certificate_lifetime_and_backdating_are_bounded() {
        let key = KeyPair::generate().unwrap();
        let pem = CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let day = 24 * 3600;
        for (asked, longest, lives, back) in [
            (None, 30 * day, 30 * day, 300),
            (Some(i32::MAX), 30 * day, 30 * day, 300),
            (Some(1), 30 * day, 600, 300),
            (None, 6, 6, 6),
            (Some(3600), 6, 6, 6),
        ] {
            let certificate =
                sign(&authority(), pem.as_bytes(), &CsrSubject::Gateway, None, asked, longest, now).unwrap();
            let (_, der) = x509_parser::pem::parse_x509_pem(certificate.as_bytes()).unwrap();
            let parsed = der.parse_x509().unwrap();
            let validity = parsed.validity();
            assert_eq!(validity.not_after.timestamp() - now.as_second(), lives, "{asked:?} {longest}");
            assert_eq!(now.as_second() - validity.not_before.timestamp(), back, "{asked:?} {longest}");
            assert_eq!(parsed.subject().to_string(), "CN=russet:gateway");
        }
    }

    #[test]
    fn only_the_key_of_the_first_certificate_signs() {
        let key = KeyPair::generate().unwrap();
        let pem = CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
        let signed = |authority: &Secret| {
            sign(authority, pem.as_bytes(), &CsrSubject::Gateway, None, None, 600, Timestamp::now())
        };
        let [mut first, second] = [authority(), authority()].map(|it| it.data.unwrap());
        first.get_mut("tls.crt").unwrap().0.extend_from_slice(&second["tls.crt"].0);
        let mut both = Secret { data: Some(first.clone()), ..Secret::default() };
        signed(&both).unwrap();
        first.insert("tls.key".to_owned(), second["tls.key"].clone());
        both.data = Some(first);
        assert!(matches!(signed(&both), Err(SignError::Pair)));
    }

    #[test]
    fn an_incomplete_authority_is_named() {
        let error =
            sign(&Secret::default(), b"", &CsrSubject::Gateway, None, None, 600, Timestamp::UNIX_EPOCH)
                .unwrap_err();
        assert!(error.to_string().contains("lacks tls.key"), "{error}");
    }
}
