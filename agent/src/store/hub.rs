//! `hf://owner/name`: a repository of the Hugging Face hub or of a mirror (`HF_ENDPOINT`), and with `/x.gguf` after it
//! one of its models in GGUF. A revision is resolved to a commit first, and every file comes from that commit.

use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use reqwest::Url;
use russet_model::gguf::files::{SUFFIX, parts};
use serde::Deserialize;

use super::verify::Digest;
use super::web::WebClient;
use super::{Context, FileLocation, Scheme, SourceFile, SourceListing, SourceSpec, StoreError};

pub(super) const SCHEME: Scheme =
    Scheme { prefix: "hf://", pinned: true, keys: super::TOKEN, account: &[], list };

/// Maximum size of a listing: some hundred bytes for each of a repository's files, of which a few have
/// thousands.
const MAX_LISTING_BYTES: usize = 64 << 20;

/// Response of the hub's API for a revision.
#[derive(Deserialize)]
struct Revision {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

fn list<'a>(context: &'a Context, spec: &'a SourceSpec) -> BoxFuture<'a, Result<SourceListing, StoreError>> {
    async move {
        let (repository, named) = repository(&spec.uri)?;
        let is_other = |name: &str| {
            let is_weights = name.ends_with(SUFFIX) || name.ends_with(".safetensors");
            named.as_ref().is_some_and(|names| is_weights && !names.iter().any(|own| own == name))
        };
        let web = WebClient::new(&context.client, spec.credentials.token(), &context.hf_endpoint);
        let revision = spec.revision.as_deref().unwrap_or("main");
        let mut url =
            join_url(&context.hf_endpoint, &["api", "models"], &repository, &["revision", revision]);
        url.set_query(Some("blobs=true"));
        let body = web.document(&url, None, MAX_LISTING_BYTES).await?;
        let found: Revision = serde_json::from_slice(&body).map_err(|error| StoreError::Unreachable {
            what: url.to_string(),
            detail: format!("its answer is not a hub's: {error}"),
        })?;
        let commit = check_commit(&url, &found.sha, spec)?;

        let files = futures::stream::iter(found.siblings)
            .filter_map(|sibling| {
                let name = super::stored_name(&sibling.rfilename).filter(|name| !is_other(name));
                std::future::ready(name.map(|name| (name, sibling)))
            })
            .map(|(name, sibling)| {
                let mut path = vec!["resolve", &commit];
                path.extend(sibling.rfilename.split('/'));
                let url = join_url(&context.hf_endpoint, &[], &repository, &path);
                describe_file(&web, name, sibling, url)
            })
            .buffer_unordered(4)
            .try_collect()
            .await?;
        Ok(SourceListing { commit: Some(commit), files, web: Some(web) })
    }
    .boxed()
}

/// A file with size and digest: from the listing if present, else from the response headers of the file.
async fn describe_file(
    web: &WebClient,
    name: String,
    sibling: Sibling,
    url: Url,
) -> Result<SourceFile, StoreError> {
    let Sibling { rfilename: _, size, blob_id, lfs } = sibling;
    let lfs_size = lfs.as_ref().and_then(|lfs| lfs.size);
    let digest = match lfs {
        Some(Lfs { sha256, .. }) => sha256.and_then(|sha| Digest::from_etag(&sha)),
        None => blob_id.and_then(|id| Digest::from_etag(&id)),
    };
    let (size, digest) = match (lfs_size.or(size), digest) {
        // Some mirrors list every file with a size of 0.
        (Some(size), Some(digest)) if size > 0 => (size, Some(digest)),
        (size, digest) => {
            let probed = web.probe(&url).await?;
            (probed.size.or(size).unwrap_or_default(), digest.or(probed.digest))
        }
    };
    Ok(SourceFile { name, size, digest, location: FileLocation::Web(url) })
}

fn check_commit(url: &Url, sha: &str, spec: &SourceSpec) -> Result<String, StoreError> {
    let hex = sha.len() >= 7 && sha.len() <= 64 && sha.bytes().all(|byte| byte.is_ascii_hexdigit());
    let same = !spec.pinned || spec.revision.as_deref() == Some(sha);
    if hex && same {
        return Ok(sha.to_owned());
    }
    Err(StoreError::Unreachable {
        what: url.to_string(),
        detail: format!("it answered with commit {sha:?}, which is not the one asked for"),
    })
}

/// Owner and name of a repository, and the GGUF files of the model in it, where the URI names one of them.
fn repository(uri: &str) -> Result<([String; 2], Option<Vec<String>>), StoreError> {
    let plain = |part: &&str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    let path = uri.strip_prefix(SCHEME.prefix).unwrap_or_default();
    match path.trim_end_matches('/').split('/').collect::<Vec<_>>()[..] {
        [owner, name] if plain(&owner) && plain(&name) => Ok(([owner.to_owned(), name.to_owned()], None)),
        [owner, name, file] if [owner, name, file].iter().all(plain) && file.ends_with(SUFFIX) => {
            Ok(([owner.to_owned(), name.to_owned()], Some(parts(file))))
        }
        _ => Err(StoreError::BadUri {
            uri: uri.to_owned(),
            problem: "write hf://owner/name, or hf://owner/name/file.gguf, and a branch or commit into source.revision"
                .into(),
        }),
    }
}

/// `base` with further path segments; a slash inside a segment (`refs/pr/1`) is escaped.
fn join_url(base: &Url, before: &[&str], repository: &[String; 2], after: &[&str]) -> Url {
    let mut url = base.clone();
    // Only URLs that cannot be a base (`mailto:`) have no segments, and an endpoint has a host.
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.pop_if_empty().extend(before).extend(repository).extend(after);
    }
    url
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_are_two_plain_names() {
        for (uri, good) in [
            ("hf://mlx-community/Qwen3-30B-A3B-4bit", true),
            ("hf://a/b/", true),
            ("hf://a", false),
            ("hf://a/b/c", false),
            ("hf://a/b/c.gguf", true),
            ("hf://a/b/.c.gguf", false),
            ("hf://a/b/c/d.gguf", false),
            ("hf://../b", false),
            ("hf://a/b?x=1", false),
        ] {
            assert_eq!(repository(uri).is_ok(), good, "{uri}");
        }
    }

    #[test]
    fn hub_url_joins_mirror_path_and_revision_with_slashes() {
        let base = Url::parse("http://mirror.local/hub/").unwrap();
        let url = join_url(&base, &["api", "models"], &["a".into(), "b".into()], &["revision", "refs/pr/1"]);
        assert_eq!(url.as_str(), "http://mirror.local/hub/api/models/a/b/revision/refs%2Fpr%2F1");
    }
}
