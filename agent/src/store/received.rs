//! Completion from the source of what other machines sent in part: when they stop sending, the chunks that arrived stay,
//! and only the missing ones are read from the source. Each is verified against the manifest that came with the others.

use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _};
use tokio::sync::watch;

use super::chunks::Chunk;
use super::source::SourceListing;
use super::{
    IncomingModel, Manifest, Published, SourceSpec, Store, StoreError, TransferProgress, TransferStage,
    verify,
};

/// Chunks that are read at once: each is in memory as a whole.
const CHUNKS_AT_ONCE: usize = 2;

impl Store {
    /// Completes the model whose chunks other machines sent, if `source` lists the same one. `None` where nothing was
    /// received or the source has other bytes.
    pub(super) async fn complete_received(
        &self,
        spec: &SourceSpec,
        source: &SourceListing,
        progress: &watch::Sender<TransferProgress>,
    ) -> Result<Option<Published>, StoreError> {
        let Some(manifest) = spec.received.as_ref().and_then(|id| self.dirs.received_manifest(id)) else {
            return Ok(None);
        };
        if manifest.check_pin(spec).is_err() || !is_listed(source, &manifest) {
            return Ok(None);
        }
        let (store, asked) = (self.clone(), spec.clone());
        let opened = tokio::task::spawn_blocking(move || store.receive(&asked, manifest)).await;
        let opened =
            opened.map_err(|error| StoreError::io(self.dirs.root())(std::io::Error::other(error)))?;
        let incoming = match opened {
            // The other machines' manifest is known to be wrong.
            Err(StoreError::Sha256Mismatch { .. }) => return Ok(None),
            opened => opened?,
        };
        let done = incoming.bytes_done();
        if done == 0 {
            return Ok(None);
        }
        progress.send_modify(|state| {
            state.stage = TransferStage::Downloading;
            (state.done, state.total) = (done, incoming.local_chunks().manifest().bytes());
            state.commit.clone_from(&source.commit);
        });
        let incoming = &Arc::new(incoming);
        let held = incoming.local_chunks();
        let missing = held.complete().into_iter().enumerate().filter(|(_, complete)| !complete);
        let reads: Vec<_> =
            missing.map(|(number, _)| self.read_chunk(source, incoming, number, progress)).collect();
        let right = futures::stream::iter(reads).buffer_unordered(CHUNKS_AT_ONCE);
        match right.try_all(std::future::ready).await {
            Ok(true) => {}
            // Not what the other machines have, or a server that serves no parts of files.
            Ok(false) | Err(StoreError::NoRanges { .. }) => return Ok(None),
            Err(error) => return Err(error),
        }
        progress.send_modify(|state| state.stage = TransferStage::Verifying);
        for (listed, file) in source.files.iter().zip(&held.manifest().files) {
            if let Some(digest) = &listed.digest
                && !verify::has_digest(held.folder(), file, digest).await?
            {
                return Ok(None);
            }
        }
        let pinned = source.commit.clone().or_else(|| spec.revision.clone().filter(|_| spec.pinned));
        let spec = SourceSpec { pinned: pinned.is_some(), revision: pinned, ..spec.clone() };
        self.publish_received(&spec, incoming).await.map(Some)
    }

    /// Reads one chunk from the source; false where its bytes are not those of the manifest.
    async fn read_chunk(
        &self,
        source: &SourceListing,
        incoming: &Arc<IncomingModel>,
        number: usize,
        progress: &watch::Sender<TransferProgress>,
    ) -> Result<bool, StoreError> {
        let Chunk { file, offset, length, .. } = incoming.local_chunks().chunks()[number];
        let Some(listed) = source.files.get(file) else { return Ok(false) };
        let bytes = source.read(listed, offset, length).await?;
        self.context.limiter.acquire(length).await;
        let incoming = incoming.clone();
        let checked = tokio::task::spawn_blocking(move || {
            incoming.write(number, 0, &[bytes])?;
            incoming.check_chunk(number)
        });
        let checked = checked.await;
        let right =
            checked.map_err(|error| StoreError::io(self.dirs.root())(std::io::Error::other(error)))??;
        progress.send_modify(|state| state.done += if right { length } else { 0 });
        Ok(right)
    }
}

/// Whether a listing has the files of a manifest. Digests that only the bytes tell are compared once they are there.
fn is_listed(source: &SourceListing, manifest: &Manifest) -> bool {
    let same = |(listed, file): (&super::SourceFile, &verify::VerifiedFile)| {
        let digest = match &listed.digest {
            Some(verify::Digest::Sha256(sum)) => *sum == file.sha256,
            Some(verify::Digest::GitBlob(_)) | None => true,
        };
        listed.name == file.name && listed.size == file.size && digest
    };
    source.files.len() == manifest.files.len() && source.files.iter().zip(&manifest.files).all(same)
}
