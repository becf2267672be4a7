//! The key that signs service account tokens (ES256). Not here: what a token's claims mean; see [`super::tokens`].

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rcgen::PublicKeyData;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, UnparsedPublicKey,
};
use serde_json::{Value, json};

use crate::pki::{self, PkiError};

/// The key that signs service account tokens.
pub struct Signer {
    key: EcdsaKeyPair,
    public: Vec<u8>,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Signer").finish_non_exhaustive()
    }
}

impl Signer {
    /// Loads the key from this file, or creates it.
    pub fn ensure(path: &std::path::Path) -> Result<Self, PkiError> {
        let unusable = |why: String| PkiError::Unusable { what: "service account key".into(), why };
        let pair = if path.exists() {
            rcgen::KeyPair::from_pem(&pki::read(path)?).map_err(|error| unusable(error.to_string()))?
        } else {
            let pair = rcgen::KeyPair::generate().map_err(|error| unusable(error.to_string()))?;
            pki::write_private(path, pair.serialize_pem().as_bytes())?;
            pair
        };
        let key = EcdsaKeyPair::from_pkcs8(
            &ECDSA_P256_SHA256_FIXED_SIGNING,
            pair.serialized_der(),
            &SystemRandom::new(),
        )
        .map_err(|error| unusable(error.to_string()))?;
        Ok(Self { key, public: pair.der_bytes().to_vec() })
    }

    /// Signs a token with these claims.
    pub fn sign(&self, claims: &Value) -> Option<String> {
        let header = URL_SAFE_NO_PAD.encode(json!({"alg": "ES256", "typ": "JWT"}).to_string());
        let body = format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims.to_string()));
        let signature = self.key.sign(&SystemRandom::new(), body.as_bytes()).ok()?;
        Some(format!("{body}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    /// The public key as a JWK set, for those who verify tokens without asking this server.
    pub fn public_keys(&self) -> Value {
        // An uncompressed point of P-256: one byte, then both coordinates.
        let point = self.public.get(1..65).unwrap_or_default();
        let (x, y) = point.split_at(point.len() / 2);
        let part = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        json!({"keys": [{"use": "sig", "kty": "EC", "crv": "P-256", "alg": "ES256", "x": part(x), "y": part(y)}]})
    }

    /// The claims of a token with a valid signature of this key.
    pub fn verify(&self, token: &str) -> Option<Value> {
        let (body, signature) = token.rsplit_once('.')?;
        let (header, claims) = body.split_once('.')?;
        let header: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(header).ok()?).ok()?;
        if header["alg"] != "ES256" {
            return None;
        }
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &self.public)
            .verify(body.as_bytes(), &URL_SAFE_NO_PAD.decode(signature).ok()?)
            .ok()?;
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_believed_only_when_this_key_signed_exactly_it() {
        let folder = tempfile::tempdir().unwrap();
        let signer = Signer::ensure(&folder.path().join("sa.key")).unwrap();
        let token = signer.sign(&json!({"sub": "x"})).unwrap();
        assert_eq!(signer.verify(&token).unwrap()["sub"], "x");
        let again = Signer::ensure(&folder.path().join("sa.key")).unwrap();
        assert!(again.verify(&token).is_some(), "the key is kept in its file");
        let keys = signer.public_keys();
        let point =
            ["x", "y"].map(|part| URL_SAFE_NO_PAD.decode(keys["keys"][0][part].as_str().unwrap()).unwrap());
        let (body, signature) = token.rsplit_once('.').unwrap();
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, [vec![4], point.concat()].concat())
            .verify(body.as_bytes(), &URL_SAFE_NO_PAD.decode(signature).unwrap())
            .expect("the published key verifies the token");
        let other = Signer::ensure(&folder.path().join("other.key")).unwrap();
        assert!(other.verify(&token).is_none());
        let (body, signature) = token.rsplit_once('.').unwrap();
        assert!(signer.verify(&format!("{body}x.{signature}")).is_none());
    }
}
