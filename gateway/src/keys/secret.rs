//! Generates a new key: the secret for its holder, and the hash that is stored.

use rand::Rng as _;

/// Marks the secret as a Russet key for people and for scanners of leaked secrets.
const PREFIX: &str = "sk-russet-";
const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
/// Characters of [`ALPHABET`] that hold 256 bits.
const LENGTH: usize = 43;

/// A new key. It is not `Debug`, so that no log shows it by accident.
pub struct Secret(String);

impl Secret {
    /// A key of 256 random bits.
    pub fn generate() -> Self {
        // The thread's generator is cryptographic and seeded by the operating system.
        let mut random = rand::rng();
        let rest = (0..LENGTH).map(|_| char::from(ALPHABET[random.random_range(0..ALPHABET.len())]));
        Self(PREFIX.chars().chain(rest).collect())
    }

    /// The secret itself, for its holder.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// What `spec.secretSha256` holds.
    pub fn sha256(&self) -> String {
        hex::encode(super::Digest::sha256(self.0.as_bytes()).0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_another_one_and_fits_into_a_header() {
        let keys: Vec<Secret> = (0..100).map(|_| Secret::generate()).collect();
        let distinct: std::collections::BTreeSet<String> = keys.iter().map(Secret::sha256).collect();
        assert_eq!(distinct.len(), keys.len());
        for key in &keys {
            let rest = key.expose().strip_prefix(PREFIX).unwrap();
            assert!(rest.len() == LENGTH && rest.bytes().all(|byte| byte.is_ascii_alphanumeric()));
            assert!(key.sha256().len() == 64 && !key.sha256().contains(rest));
        }
    }
}
