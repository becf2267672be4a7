//! `builtin://smoke`: the smoke model of this repository, in 4 bits, embedded in every agent. It lets a
//! cluster be tested without any outside network (`russet doctor --prove`).

use futures::FutureExt as _;
use futures::future::BoxFuture;
use sha2::{Digest as _, Sha256};

use super::verify::Digest;
use super::{Context, FileLocation, Scheme, SourceFile, SourceListing, SourceSpec, StoreError};

pub(super) const SCHEME: Scheme =
    Scheme { prefix: "builtin://", pinned: false, keys: &[], account: &[], list };

/// Name and bytes of a file.
type EmbeddedFile = (&'static str, &'static [u8]);

macro_rules! carried {
    ($($name:literal),+) => {
        &[$(($name, include_bytes!(concat!("../../../engine/smoke/model-4bit/", $name)))),+]
    };
}

const SMOKE: &[EmbeddedFile] = carried![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json"
];

fn list<'a>(_: &'a Context, spec: &'a SourceSpec) -> BoxFuture<'a, Result<SourceListing, StoreError>> {
    async move {
        if spec.uri.strip_prefix(SCHEME.prefix) != Some("smoke") {
            return Err(StoreError::BadUri {
                uri: spec.uri.clone(),
                problem: "builtin://smoke is the only model that agents carry".into(),
            });
        }
        let files = SMOKE.iter().map(|(name, bytes)| SourceFile {
            name: (*name).to_owned(),
            size: bytes.len() as u64,
            digest: Some(Digest::Sha256(hex::encode(Sha256::digest(bytes)))),
            location: FileLocation::BuiltIn(bytes),
        });
        Ok(SourceListing { commit: None, files: files.collect(), web: None })
    }
    .boxed()
}

/// `length` bytes of a file from `offset` on.
pub(super) fn read(bytes: &'static [u8], offset: u64, length: u64) -> Result<Vec<u8>, StoreError> {
    let range = usize::try_from(offset).ok().zip(usize::try_from(offset.saturating_add(length)).ok());
    let part = range.and_then(|(from, to)| bytes.get(from..to));
    part.map(<[u8]>::to_vec).ok_or_else(|| StoreError::Truncated {
        file: "a built-in file".into(),
        got: bytes.len() as u64,
        expected: offset.saturating_add(length),
    })
}
