//! `s3://bucket/folder`, `gs://bucket/folder` and `az://container/folder`: one prefix of an object store,
//! with the credentials of the Model's Secret or unsigned. Every read is conditional on the ETag of the
//! listing, so that an object replaced meanwhile fails and versions are never mixed. If there is a
//! `SHA256SUMS` it is the listing, as for `https://`.

mod bucket;
mod http_client;

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore};
use russet_model::error::FileError;

use self::bucket::Provider;
use super::https::{CHECKSUM_FILE, MAX_CHECKSUM_BYTES, parse_checksums};
use super::verify::Digest;
use super::{Context, Credentials, FileLocation, Scheme, SourceFile, SourceListing, SourceSpec, StoreError};

pub(super) const S3: Scheme = scheme("s3://", Provider::S3);
pub(super) const GOOGLE: Scheme = scheme("gs://", Provider::Google);
pub(super) const AZURE: Scheme = scheme("az://", Provider::Azure);

const fn scheme(prefix: &'static str, provider: Provider) -> Scheme {
    Scheme { prefix, pinned: false, keys: provider.keys(), account: provider.account(), list }
}

/// Models have some hundred files; a prefix with more objects is not a model's, and its listing would not
/// end.
const MAX_OBJECTS: usize = 20_000;

/// One listed object of a bucket.
#[derive(Clone, Debug)]
pub(super) struct RemoteObject {
    store: Arc<dyn ObjectStore>,
    path: Path,
    /// URI of the object, for messages.
    what: String,
    size: u64,
    tag: Option<String>,
}

/// Required traits of a bucket client.
trait Bucket: ObjectStore + PaginatedListStore {}

impl<T: ObjectStore + PaginatedListStore> Bucket for T {}

/// Bucket and prefix of a URI.
struct BucketPrefix<'a> {
    provider: Provider,
    uri: &'a str,
    bucket: &'a str,
    path: Path,
}

fn list<'a>(context: &'a Context, spec: &'a SourceSpec) -> BoxFuture<'a, Result<SourceListing, StoreError>> {
    async move {
        let folder = BucketPrefix::parse(&spec.uri)?;
        match folder.list(context, &spec.credentials, None).await {
            // The bucket's region is not configured; S3 returns it in its error.
            Err(ListError::WrongRegion(region)) => {
                folder.list(context, &spec.credentials, Some(&region)).await.map_err(ListError::into)
            }
            listed => listed.map_err(ListError::into),
        }
    }
    .boxed()
}

/// Why a listing failed.
enum ListError {
    Store(StoreError),
    /// The bucket is in another region.
    WrongRegion(String),
}

impl From<StoreError> for ListError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<ListError> for StoreError {
    fn from(failure: ListError) -> Self {
        match failure {
            ListError::Store(error) => error,
            ListError::WrongRegion(region) => Self::Unreachable {
                what: "the bucket".into(),
                detail: format!("it says it is in the region {region}, and then that it is not"),
            },
        }
    }
}

impl<'a> BucketPrefix<'a> {
    fn parse(uri: &'a str) -> Result<Self, StoreError> {
        let bad = |problem: String| StoreError::BadUri { uri: uri.to_owned(), problem };
        let (scheme, rest) = uri.split_once("://").unwrap_or_default();
        let provider = Provider::from_scheme(scheme).ok_or_else(|| {
            bad("write s3://bucket/folder, gs://bucket/folder or az://container/folder".into())
        })?;
        let (bucket, path) = rest.split_once('/').unwrap_or((rest, ""));
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if bucket.len() < 3 || bucket.starts_with('.') || !bucket.bytes().all(plain) {
            return Err(bad(format!("{bucket:?} is no name of a bucket; write {scheme}://bucket/folder")));
        }
        let path = Path::parse(path).map_err(|error| bad(error.to_string()))?;
        Ok(Self { provider, uri: uri.trim_end_matches('/'), bucket, path })
    }

    /// The files directly below the prefix, without deeper ones.
    async fn list(
        &self,
        context: &Context,
        credentials: &Credentials,
        region: Option<&str>,
    ) -> Result<SourceListing, ListError> {
        let bucket = self.provider.open(context, self, credentials, region)?;
        let found = self.objects(bucket.as_ref()).await.map_err(|error| {
            let elsewhere =
                http_client::region(&error).filter(|_| self.provider.may_change_region(credentials, region));
            elsewhere.map_or_else(
                || ListError::Store(http_client::store_error(self.uri, &error)),
                ListError::WrongRegion,
            )
        })?;
        if found.is_empty() {
            let detail = "there is nothing under that name".to_owned();
            return Err(StoreError::NotFound { what: self.uri.to_owned(), detail }.into());
        }
        if found.len() > MAX_OBJECTS {
            let problem = format!("the folder has more than {MAX_OBJECTS} files, so it is no model's");
            return Err(StoreError::BadUri { uri: self.uri.to_owned(), problem }.into());
        }
        let store: Arc<dyn ObjectStore> = bucket;
        let files = found.into_iter().filter_map(|meta| self.file(&store, meta));
        Ok(with_checksums(self.uri, files.collect()).await?)
    }

    async fn objects(&self, bucket: &dyn Bucket) -> object_store::Result<Vec<ObjectMeta>> {
        let prefix = match self.path.as_ref() {
            "" => String::new(),
            path => format!("{path}/"),
        };
        let mut found = Vec::new();
        let mut page_token = None;
        loop {
            let options = PaginatedListOptions {
                delimiter: Some("/".into()),
                page_token,
                ..PaginatedListOptions::default()
            };
            let page = bucket.list_paginated(Some(&prefix), options).await?;
            found.extend(page.result.objects);
            page_token = page.page_token.filter(|token| !token.is_empty() && found.len() <= MAX_OBJECTS);
            if page_token.is_none() {
                return Ok(found);
            }
        }
    }

    fn file(&self, store: &Arc<dyn ObjectStore>, meta: ObjectMeta) -> Option<SourceFile> {
        let name = meta.location.filename()?.to_owned();
        let what = format!("{}/{name}", self.uri);
        let object = RemoteObject {
            store: store.clone(),
            path: meta.location,
            what,
            size: meta.size,
            tag: meta.e_tag.map(quoted),
        };
        Some(SourceFile { name, size: meta.size, digest: None, location: FileLocation::Object(object) })
    }
}

/// An ETag in header form: listings of some stores leave its quotes out.
fn quoted(tag: String) -> String {
    if tag.ends_with('"') { tag } else { format!("\"{tag}\"") }
}

/// The files with the digests of the prefix's `SHA256SUMS`, if there is one: then exactly the files it names.
async fn with_checksums(uri: &str, files: Vec<SourceFile>) -> Result<SourceListing, StoreError> {
    let mut source = SourceListing { commit: None, files, web: None };
    let Some(list) = source.files.iter().find(|file| file.name == CHECKSUM_FILE).filter(|file| file.size > 0)
    else {
        return Ok(source);
    };
    if list.size > MAX_CHECKSUM_BYTES {
        let (file, limit) = (CHECKSUM_FILE.to_owned(), MAX_CHECKSUM_BYTES);
        return Err(FileError::TooLarge { file, size: list.size, limit }.into());
    }
    let text = source.read(list, 0, list.size).await?;
    let mut sums = parse_checksums(&String::from_utf8_lossy(&text));
    sums.retain(|name, _| super::is_allowed_file(name));
    source.files.retain_mut(|file| {
        file.digest = sums.remove(&file.name).map(Digest::Sha256);
        file.digest.is_some()
    });
    match sums.into_keys().next() {
        Some(name) => Err(StoreError::NotFound {
            what: format!("{uri}/{name}"),
            detail: format!("the folder's {CHECKSUM_FILE} names it"),
        }),
        None => Ok(source),
    }
}

impl RemoteObject {
    /// ETag from the listing.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// URI of the object, for messages.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// The bytes of `range`, of the listed version only.
    pub async fn stream(
        &self,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, StoreError>>, StoreError> {
        // Weak tags mean equivalent content, not equal bytes, and may not guard anything.
        let if_match = self.tag.clone().filter(|tag| !tag.starts_with("W/"));
        let options = GetOptions::new().with_range(Some(GetRange::Bounded(range))).with_if_match(if_match);
        let refused = |error: &object_store::Error| http_client::store_error(&self.what, error);
        let answer = self.store.get_opts(&self.path, options).await.map_err(|error| refused(&error))?;
        let tag = answer.meta.e_tag.clone().map(quoted);
        if tag.is_some() && tag != self.tag || answer.meta.size != self.size {
            return Err(StoreError::Replaced { what: self.what.clone() });
        }
        let what = self.what.clone();
        Ok(answer.into_stream().map_err(move |error| http_client::store_error(&what, &error)).boxed())
    }

    /// `length` bytes from `offset` on.
    pub async fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>, StoreError> {
        let expected = offset.saturating_add(length);
        let mut stream = self.stream(offset..expected).await?;
        let mut bytes: Vec<u8> = Vec::new();
        while let Some(chunk) = stream.try_next().await? {
            let left = length - bytes.len() as u64;
            bytes.extend_from_slice(&chunk[..chunk.len().min(left as usize)]);
        }
        match bytes.len() as u64 == length {
            true => Ok(bytes),
            false => {
                let got = offset + bytes.len() as u64;
                Err(StoreError::Truncated { file: self.what.clone(), got, expected })
            }
        }
    }
}

#[cfg(test)]
mod tests;
