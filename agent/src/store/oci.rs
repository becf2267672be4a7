//! `oci://registry/name:tag`, or `@sha256:…`: an artifact of a registry, as `oras push` writes it. Its
//! manifest lists the files: one layer each, named by its title, with the SHA-256 of its bytes. The
//! manifest's own digest is the commit.

mod login;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use reqwest::Url;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

pub(super) use self::login::Registry;
use super::verify::Digest;
use super::web::{WebClient, loopback};
use super::{Context, FileLocation, Scheme, SourceFile, SourceListing, SourceSpec, StoreError};

pub(super) const SCHEME: Scheme =
    Scheme { prefix: "oci://", pinned: true, keys: login::KEYS, account: &[], list };

/// Accepted manifests: OCI 1.0 and 1.1, the artifact manifests of 1.1's drafts that some registries have, and
/// Docker's.
const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.artifact.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json";
/// Maximum size of a manifest, by the specification.
const MAX_MANIFEST_BYTES: usize = 4 << 20;
/// Annotation with the file name of a layer.
const TITLE: &str = "org.opencontainers.image.title";
/// Annotation of a layer that is a packed directory, which no model has as a file.
const UNPACK: &str = "io.deis.oras.content.unpack";

/// Components of a URI.
#[derive(Debug, PartialEq)]
struct Artifact {
    /// The registry's host, with its port.
    host: String,
    name: String,
    /// A tag or a digest.
    reference: String,
}

#[derive(Deserialize)]
struct OciManifest {
    #[serde(default)]
    layers: Vec<Layer>,
    /// Layers in the artifact manifests of the drafts.
    #[serde(default)]
    blobs: Vec<Layer>,
    /// Manifests of an image index.
    #[serde(default)]
    manifests: Vec<IndexEntry>,
}

#[derive(Deserialize)]
struct Layer {
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct IndexEntry {
    digest: String,
}

fn list<'a>(context: &'a Context, spec: &'a SourceSpec) -> BoxFuture<'a, Result<SourceListing, StoreError>> {
    async move {
        let artifact = Artifact::parse(spec)?;
        let manifest = artifact.url(&spec.uri, "manifests", &artifact.reference)?;
        let registry = Registry::new(&spec.uri, &spec.credentials, &artifact.host, &artifact.name)?;
        let web = WebClient::registry(&context.client, registry, &manifest);
        let body = web.document(&manifest, Some(ACCEPT), MAX_MANIFEST_BYTES).await?;
        let commit = format!("sha256:{}", hex::encode(Sha256::digest(&body)));
        if artifact.reference.contains(':') && artifact.reference != commit {
            let (file, expected) = (manifest.to_string(), artifact.reference);
            return Err(StoreError::Digest { file, expected, actual: commit });
        }
        let found: OciManifest = serde_json::from_slice(&body).map_err(|error| StoreError::Unreachable {
            what: manifest.to_string(),
            detail: format!("its answer is no manifest: {error}"),
        })?;
        let files = found.files(&spec.uri, |digest| artifact.url(&spec.uri, "blobs", digest))?;
        Ok(SourceListing { commit: Some(commit), files, web: Some(web) })
    }
    .boxed()
}

impl Artifact {
    fn parse(spec: &SourceSpec) -> Result<Self, StoreError> {
        let uri = &spec.uri;
        let bad = |problem: &dyn Display| StoreError::BadUri {
            uri: uri.clone(),
            problem: format!("{problem}; write oci://registry/name:tag or oci://registry/name@sha256:…"),
        };
        let rest = uri.strip_prefix(SCHEME.prefix).unwrap_or_default();
        let (host, rest) = rest.split_once('/').ok_or_else(|| bad(&"it names no artifact"))?;
        let (rest, digest) = match rest.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (rest, None),
        };
        let (name, tag) = match rest.split_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (rest, None),
        };
        let plain = |text: &str, more: &[u8]| {
            !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || more.contains(&byte))
        };
        let part = |part: &str| plain(part, b"._-") && !part.starts_with('.') && part.to_lowercase() == part;
        if !plain(host, b".-:[]") || !name.split('/').all(part) {
            return Err(bad(&"its registry or its name has characters that neither may have"));
        }
        let revision = spec.revision.as_deref();
        let reference = match (digest, tag, revision) {
            (Some(digest), ..) => digest,
            (None, _, Some(commit)) if spec.pinned => commit,
            (None, Some(_), Some(_)) => {
                return Err(bad(&"it names a tag and source.revision another; remove one"));
            }
            (None, tag, revision) => tag.or(revision).unwrap_or("latest"),
        };
        if sha256(reference).is_none() && !(plain(reference, b"._-") && reference.len() <= 128) {
            return Err(bad(&format!("{reference:?} is neither a tag nor a SHA-256 digest")));
        }
        Ok(Self { host: host.to_owned(), name: name.to_owned(), reference: reference.to_owned() })
    }

    /// URL of a part of this artifact; plain HTTP only on this machine.
    fn url(&self, uri: &str, kind: &str, reference: &str) -> Result<Url, StoreError> {
        let Self { host, name, .. } = self;
        let url = |scheme: &str| Url::parse(&format!("{scheme}://{host}/v2/{name}/{kind}/{reference}"));
        let url = match url("http") {
            Ok(clear) if loopback(&clear) => Ok(clear),
            _ => url("https"),
        };
        url.map_err(|error| StoreError::BadUri { uri: uri.to_owned(), problem: error.to_string() })
    }
}

impl OciManifest {
    /// The layers that are files of a model, each at the location that `place` returns.
    fn files(
        self,
        uri: &str,
        place: impl Fn(&str) -> Result<Url, StoreError>,
    ) -> Result<Vec<SourceFile>, StoreError> {
        let bad = |problem: String| StoreError::BadUri { uri: uri.to_owned(), problem };
        if let Some(first) = self.manifests.first() {
            return Err(bad(format!(
                "it is an index of {} manifests; name the one that is the model by its digest, such as {}",
                self.manifests.len(),
                first.digest
            )));
        }
        let mut files = Vec::new();
        let mut names = BTreeSet::new();
        for Layer { digest, size, annotations } in self.layers.into_iter().chain(self.blobs) {
            let packed = annotations.get(UNPACK).is_some_and(|unpack| unpack == "true");
            let title = annotations.get(TITLE).filter(|_| !packed);
            let Some(name) = title.and_then(|title| super::stored_name(title)) else { continue };
            let sum = sha256(&digest)
                .ok_or_else(|| bad(format!("{name} has the digest {digest:?}, no SHA-256")))?;
            if !names.insert(name.clone()) {
                return Err(bad(format!("two of its layers are named {name}; push it anew")));
            }
            let (place, digest) = (FileLocation::Web(place(&digest)?), Some(Digest::Sha256(sum.to_owned())));
            files.push(SourceFile { name: name.clone(), size, digest, location: place });
        }
        match files.is_empty() {
            false => Ok(files),
            true => Err(bad(format!(
                "none of its layers is a file of a model; push the files one by one, so that each has its name in {TITLE} (oras push does)"
            ))),
        }
    }
}

/// The hexadecimal digits of `sha256:…`.
fn sha256(digest: &str) -> Option<&str> {
    let sum = digest.strip_prefix("sha256:")?;
    let plain = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (sum.len() == 64 && sum.bytes().all(plain)).then_some(sum)
}

#[cfg(test)]
mod tests;
