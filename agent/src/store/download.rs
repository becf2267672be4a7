//! Download of one file: appended to `<name>.part`, resumed where it stopped for as long as it is wanted,
//! renamed when every expected byte is there. Not here: hashing (`verify`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use futures::TryStreamExt as _;
use reqwest::StatusCode;
use reqwest::header::ETAG;
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _, AsyncWriteExt as _};
use tokio::sync::watch;

use super::builtin;
use super::object::RemoteObject;
use super::{Context, FileLocation, SourceFile, SourceListing, StoreError, TransferProgress, web};
use crate::transfer_limits::TransferLimiter;

/// Maximum backoff between two attempts: a source that returns is noticed within half a minute.
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Bytes per write; small writes halve the rate of fast disks.
const WRITE_BUFFER_BYTES: usize = 1 << 20;

/// Backoff while nothing arrives; it doubles.
fn backoff(initial: Duration) -> ExponentialBuilder {
    ExponentialBuilder::new().with_min_delay(initial).with_max_delay(MAX_BACKOFF).without_max_times()
}

/// The delay before the next attempt: the initial one after an attempt that brought bytes.
fn next_delay(backoff: ExponentialBuilder, delays: &mut ExponentialBackoff, progressed: bool) -> Duration {
    if progressed {
        *delays = backoff.build();
    }
    delays.next().unwrap_or(MAX_BACKOFF)
}

fn part_path(folder: &Path, file: &SourceFile) -> PathBuf {
    folder.join(format!("{}.part", file.name))
}

/// Bytes of `file` in `folder` from an earlier attempt.
pub(super) fn present_bytes(folder: &Path, file: &SourceFile) -> u64 {
    let size = |path: PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    size(folder.join(&file.name)).max(size(part_path(folder, file))).min(file.size)
}

/// Downloads `file` into `folder`, complete.
pub(super) async fn file(
    context: &Context,
    source: &SourceListing,
    file: &SourceFile,
    folder: &Path,
    progress: &watch::Sender<TransferProgress>,
) -> Result<(), StoreError> {
    let done = folder.join(&file.name);
    if std::fs::metadata(&done).is_ok_and(|found| found.len() == file.size) {
        return Ok(());
    }
    let backoff = backoff(context.retry);
    let mut delays = backoff.build();
    // A part that is thrown away and fetched again is no progress.
    let mut longest = present_bytes(folder, file);
    loop {
        let error = match attempt(context, source, file, folder, progress).await {
            Ok(()) => break,
            Err(error) if error.transient() => error,
            Err(error) => return Err(error),
        };
        let length = present_bytes(folder, file);
        let progressed = length > longest;
        longest = longest.max(length);
        // A host that asks for a pause says how long.
        let pause = match error.retry_after() {
            Duration::ZERO => next_delay(backoff, &mut delays, progressed),
            asked => asked,
        };
        tracing::warn!(file = file.name, error = error.chain(), ?pause, "transfer interrupted");
        progress.send_modify(|state| state.last_error = Some((error.reason(), error.chain())));
        tokio::time::sleep(pause).await;
    }
    let part = part_path(folder, file);
    tokio::fs::rename(&part, &done).await.map_err(StoreError::io(&part))?;
    // The tag file identifies the bytes when resuming; it is no longer needed.
    tokio::fs::remove_file(tag_path(&part)).await.ok();
    Ok(())
}

fn tag_path(part: &Path) -> PathBuf {
    part.with_extension("part.etag")
}

/// One attempt: from the end of the part to the end of the file.
async fn attempt(
    context: &Context,
    source: &SourceListing,
    file: &SourceFile,
    folder: &Path,
    progress: &watch::Sender<TransferProgress>,
) -> Result<(), StoreError> {
    let path = part_path(folder, file);
    let mut sink = PartFile::open(&path, &context.limiter, progress).await?;
    if sink.length > file.size {
        sink.restart().await?;
    }
    if sink.length < file.size {
        match (&file.location, &source.web) {
            (FileLocation::Disk(original), _) => from_disk(original, file, &mut sink).await,
            (FileLocation::BuiltIn(bytes), _) => {
                let rest = builtin::read(bytes, sink.length, file.size - sink.length)?;
                sink.write(&rest).await
            }
            (FileLocation::Web(url), Some(web)) => from_web(web, url, file, &mut sink).await,
            (FileLocation::Object(object), _) => from_object(object, file, &mut sink).await,
            (FileLocation::Web(url), None) => Err(StoreError::Unreachable {
                what: url.to_string(),
                detail: "the listing carries no web client; report this as a bug".into(),
            }),
        }?;
    }
    // `write` flushed an interrupted transfer's bytes; these are the last ones.
    sink.flush().await?;
    if sink.length != file.size {
        return Err(StoreError::Truncated { file: file.name.clone(), got: sink.length, expected: file.size });
    }
    Ok(())
}

async fn from_disk(original: &Path, file: &SourceFile, sink: &mut PartFile<'_>) -> Result<(), StoreError> {
    let io = || StoreError::io(original);
    let mut input = tokio::fs::File::open(original).await.map_err(io())?;
    input.seek(std::io::SeekFrom::Start(sink.length)).await.map_err(io())?;
    let mut input = input.take(file.size - sink.length);
    let mut buffer = vec![0; WRITE_BUFFER_BYTES];
    loop {
        let count = input.read(&mut buffer).await.map_err(io())?;
        if count == 0 {
            return Ok(());
        }
        sink.write(&buffer[..count]).await?;
    }
}

async fn from_web(
    web: &web::WebClient,
    url: &reqwest::Url,
    file: &SourceFile,
    sink: &mut PartFile<'_>,
) -> Result<(), StoreError> {
    let tag_path = tag_path(&sink.path);
    let known = tokio::fs::read_to_string(&tag_path).await.ok();
    let resume = (sink.length > 0).then_some((sink.length, None));
    // Weak tags mean equivalent content, not equal bytes, and may not guard a range. Where the digest is known it decides:
    // the servers behind one name may each have tags of their own.
    let by_tag = file.digest.is_none();
    let guard = known.as_deref().filter(|tag| by_tag && resume.is_some() && !tag.starts_with("W/"));
    let mut response = web.get(url, resume, guard).await?.response;

    let tag = response.headers().get(ETAG).and_then(|tag| tag.to_str().ok()).map(str::to_owned);
    let changed = by_tag && matches!((&known, &tag), (Some(known), Some(tag)) if known != tag);
    if response.status().is_success() && !changed {
        web::check_size(url, &response, file.size)?;
    }
    match response.status() {
        StatusCode::PARTIAL_CONTENT if web::start(&response) == Some(sink.length) && !changed => {}
        StatusCode::OK => sink.restart().await?,
        // The server's file differs from the one the part began with: start again.
        status => {
            sink.restart().await?;
            tokio::fs::remove_file(&tag_path).await.ok();
            return Err(StoreError::Unreachable {
                what: url.to_string(),
                detail: format!("it cannot continue the part that is here (HTTP {status})"),
            });
        }
    }
    if let Some(tag) = &tag {
        tokio::fs::write(&tag_path, tag).await.map_err(StoreError::io(&tag_path))?;
    }
    loop {
        let chunk = match response.chunk().await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => return Ok(()),
            Err(error) => {
                sink.flush().await?;
                tracing::debug!(file = file.name, %error, "the connection broke");
                return Err(StoreError::Truncated {
                    file: file.name.clone(),
                    got: sink.length,
                    expected: file.size,
                });
            }
        };
        sink.append(&chunk, url.as_str(), file.size).await?;
    }
}

async fn from_object(
    object: &RemoteObject,
    file: &SourceFile,
    sink: &mut PartFile<'_>,
) -> Result<(), StoreError> {
    // The part belongs to the object version that was listed at its start.
    let tag_path = tag_path(&sink.path);
    let known = tokio::fs::read_to_string(&tag_path).await.ok();
    if known.as_deref() != object.tag() {
        sink.restart().await?;
        match object.tag() {
            Some(tag) => tokio::fs::write(&tag_path, tag).await.map_err(StoreError::io(&tag_path))?,
            None => tokio::fs::remove_file(&tag_path).await.map_err(StoreError::io(&tag_path))?,
        }
    }
    let mut stream = object.stream(sink.length..file.size).await?;
    loop {
        match stream.try_next().await {
            Ok(Some(chunk)) => sink.append(&chunk, object.what(), file.size).await?,
            Ok(None) => return Ok(()),
            Err(error) => {
                sink.flush().await?;
                tracing::debug!(file = file.name, error = error.chain(), "the connection broke");
                let (file, got, expected) = (file.name.clone(), sink.length, file.size);
                return Err(StoreError::Truncated { file, got, expected });
            }
        }
    }
}

/// The part file, written in long runs; bytes counted as progress are on disk after a flush.
struct PartFile<'a> {
    path: PathBuf,
    file: tokio::io::BufWriter<tokio::fs::File>,
    length: u64,
    limiter: &'a TransferLimiter,
    progress: &'a watch::Sender<TransferProgress>,
}

impl<'a> PartFile<'a> {
    async fn open(
        path: &Path,
        pace: &'a TransferLimiter,
        progress: &'a watch::Sender<TransferProgress>,
    ) -> Result<Self, StoreError> {
        let io = || StoreError::io(path);
        let mut options = tokio::fs::OpenOptions::new();
        let file = options.create(true).append(true).open(path).await.map_err(io())?;
        let length = file.metadata().await.map_err(io())?.len();
        let file = tokio::io::BufWriter::with_capacity(WRITE_BUFFER_BYTES, file);
        Ok(Self { path: path.to_owned(), file, length, limiter: pace, progress })
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        fail::fail_point!("part-write", |_| Err(StoreError::io(&self.path)(
            std::io::ErrorKind::StorageFull.into()
        )));
        self.file.write_all(bytes).await.map_err(StoreError::io(&self.path))?;
        self.length += bytes.len() as u64;
        self.progress.send_modify(|state| {
            state.done += bytes.len() as u64;
            state.last_error = None;
        });
        Ok(())
    }

    /// Appends bytes from `what`, unless they exceed the announced `size`.
    async fn append(&mut self, chunk: &[u8], what: &str, size: u64) -> Result<(), StoreError> {
        if chunk.len() as u64 > size.saturating_sub(self.length) {
            self.restart().await?;
            return Err(StoreError::Unreachable {
                what: what.to_owned(),
                detail: format!("it sends more than the {size} bytes it promised"),
            });
        }
        self.write(chunk).await?;
        // Received bytes are charged to the rate limit before more are read.
        self.limiter.acquire(chunk.len() as u64).await;
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), StoreError> {
        self.file.flush().await.map_err(StoreError::io(&self.path))
    }

    async fn restart(&mut self) -> Result<(), StoreError> {
        let io = || StoreError::io(&self.path);
        self.file.flush().await.map_err(io())?;
        self.file.get_mut().set_len(0).await.map_err(io())?;
        let length = std::mem::take(&mut self.length);
        self.progress.send_modify(|state| state.done = state.done.saturating_sub(length));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_until_bytes_flow_again() {
        let backoff = backoff(Duration::from_secs(1));
        let mut delays = backoff.build();
        let seconds: Vec<u64> = [false, false, false, true, false, false, false, false, false]
            .map(|progressed| next_delay(backoff, &mut delays, progressed).as_secs())
            .into();
        assert_eq!(seconds, [1, 2, 4, 1, 2, 4, 8, 16, 30]);
    }
}
