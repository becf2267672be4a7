//! Reuse of published folders: whether a source shows the bytes of one to who asks now. Digests say that they are the
//! same bytes; a few of them, read at random from the source with the credentials of who asks, say that they may be
//! had there. Who knows the digests alone gets nothing.

use super::source::SourceListing;
use super::verify::{self, VerifiedFile};
use super::{FileLocation, Published, SourceSpec, Store, StoreError, file};

/// Samples that are read of a source. With a tenth of the bytes unknown to it, a source that only claims to have them is
/// found out in 57 % of the cases; with half of them in 99.6 %.
const SAMPLES: usize = 8;
/// Bytes of a sample.
const SAMPLE_BYTES: u64 = 1 << 10;
/// Files up to this size are compared whole where their source lists no digest.
const MAX_WHOLE_BYTES: u64 = 64 << 10;

impl Store {
    /// A published folder whose bytes `source` has shown, so that nothing needs to be fetched again.
    pub(super) async fn find_shown(
        &self,
        spec: &SourceSpec,
        source: &SourceListing,
    ) -> Result<Option<Published>, StoreError> {
        for id in self.dirs.ids() {
            let Some(published) = self.dirs.published(&id).filter(|it| it.manifest.check_pin(spec).is_ok())
            else {
                continue;
            };
            // An earlier release kept no record of who had fetched what; this copy was complete with it.
            let complete_before = spec.content.as_ref() == Some(&id);
            if is_listed(source, &published, complete_before).await?
                && (published.manifest.own_sha256
                    || self.verify_sha256(&published.path, &published.manifest).await.is_ok())
                && shows(source, &published).await?
            {
                return Ok(Some(published));
            }
        }
        Ok(None)
    }
}

/// Whether a listing is that of a published folder, by size and digest of every file. Files without a digest count only
/// for a copy that was complete before.
async fn is_listed(
    source: &SourceListing,
    published: &Published,
    complete_before: bool,
) -> Result<bool, StoreError> {
    let files = &published.manifest.files;
    if files.len() != source.files.len() {
        return Ok(false);
    }
    // Both are sorted by name. Sizes first: they cost nothing.
    let same = |(listed, file): (&super::SourceFile, &VerifiedFile)| {
        listed.name == file.name
            && listed.size == file.size
            && (listed.digest.is_some() || complete_before)
            // A folder of this machine is read again anyway.
            && !matches!(listed.location, FileLocation::Disk(_))
    };
    if !source.files.iter().zip(files).all(same) {
        return Ok(false);
    }
    for (listed, file) in source.files.iter().zip(files) {
        let right = match &listed.digest {
            Some(digest) => verify::has_digest(&published.path, file, digest).await?,
            None if file.size <= MAX_WHOLE_BYTES => is_same(source, published, file, 0, file.size).await?,
            None => true,
        };
        if !right {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a source shows the bytes of a published folder. A server that serves no parts of files cannot.
async fn shows(source: &SourceListing, published: &Published) -> Result<bool, StoreError> {
    match is_shown(source, published).await {
        Err(StoreError::NoRanges { what }) => {
            tracing::debug!(what, "the server serves no ranges, so the model is fetched again");
            Ok(false)
        }
        shown => shown,
    }
}

/// Whether random samples from the source are those of the published folder.
async fn is_shown(source: &SourceListing, published: &Published) -> Result<bool, StoreError> {
    let total = published.manifest.bytes();
    if total == 0 {
        return Ok(false);
    }
    for _ in 0..SAMPLES {
        let mut at = rand::random_range(0..total);
        for file in &published.manifest.files {
            if at < file.size {
                let length = SAMPLE_BYTES.min(file.size);
                let offset = at.min(file.size - length);
                if !is_same(source, published, file, offset, length).await? {
                    return Ok(false);
                }
                break;
            }
            at -= file.size;
        }
    }
    Ok(true)
}

async fn is_same(
    source: &SourceListing,
    published: &Published,
    of: &VerifiedFile,
    offset: u64,
    length: u64,
) -> Result<bool, StoreError> {
    let Some(listed) = source.files.iter().find(|listed| listed.name == of.name) else { return Ok(false) };
    let theirs = source.read(listed, offset, length).await?;
    Ok(theirs == file::read(&published.path.join(&of.name), offset, length).await?)
}
