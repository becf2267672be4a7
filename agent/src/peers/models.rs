//! Serves this machine's models to other agents: the manifest, which chunks are here, and bytes of them.
//!
//! ```text
//! GET /models/<id>                                 the manifest
//! GET /models/<id>/chunks                          a bit for each complete chunk, the first one in the
//!                                                  lowest bit; then as many bytes for the started ones
//! GET /models/<id>/chunks/<n>/<offset>/<length>    bytes of a complete chunk
//! ```

use bytes::Bytes;
use hyper::StatusCode;

use crate::store::{LocalChunks, Store};

/// Prefix of the paths.
pub(crate) const MODELS: &str = "/models/";
/// Maximum bytes of one reply, to bound memory.
const MAX_BYTES_PER_REQUEST: u64 = 4 << 20;

/// Path of a manifest.
pub(crate) fn manifest_path(id: &str) -> String {
    format!("{MODELS}{id}")
}

/// Path of the chunk bits.
pub(crate) fn chunks_path(id: &str) -> String {
    format!("{MODELS}{id}/chunks")
}

/// Path of bytes of a chunk.
pub(crate) fn bytes_path(id: &str, chunk: usize, offset: u64, length: u64) -> String {
    format!("{MODELS}{id}/chunks/{chunk}/{offset}/{length}")
}

/// Encodes chunks as bits.
pub(crate) fn pack(has: &[bool]) -> Vec<u8> {
    let byte = |bits: &[bool]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | u8::from(*bit));
    has.chunks(8).map(byte).collect()
}

/// Decodes bits to chunks, with padding at the end.
pub(crate) fn unpack(bits: &[u8]) -> Vec<bool> {
    bits.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1)).collect()
}

/// Handles a request below [`MODELS`].
pub(super) async fn handle(path: &str, store: &Store) -> Result<Bytes, StatusCode> {
    let (path, store) = (path.to_owned(), store.clone());
    let found = tokio::task::spawn_blocking(move || respond(&path, &store)).await;
    found.unwrap_or(Err(StatusCode::INTERNAL_SERVER_ERROR))
}

fn respond(path: &str, store: &Store) -> Result<Bytes, StatusCode> {
    let parts: Vec<&str> = path.strip_prefix(MODELS).unwrap_or_default().split('/').collect();
    let held = parts.first().and_then(|id| store.local_chunks(id)).ok_or(StatusCode::NOT_FOUND)?;
    match parts[1..] {
        [] => serde_json::to_vec(&**held.manifest())
            .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
            .map(Bytes::from),
        ["chunks"] => Ok([pack(&held.complete()), pack(&held.started())].concat().into()),
        ["chunks", chunk, offset, length] => {
            let number = |text: &str| text.parse().map_err(|_| StatusCode::BAD_REQUEST);
            let chunk = chunk.parse().map_err(|_| StatusCode::BAD_REQUEST)?;
            read_piece(&held, chunk, number(offset)?, number(length)?)
        }
        _ => Err(StatusCode::NOT_FOUND),
    }
}

fn read_piece(held: &LocalChunks, chunk: usize, offset: u64, length: u64) -> Result<Bytes, StatusCode> {
    if length > MAX_BYTES_PER_REQUEST {
        return Err(StatusCode::BAD_REQUEST);
    }
    match held.read(chunk, offset, length) {
        Ok(Some(bytes)) => Ok(bytes.into()),
        Ok(None) => Err(StatusCode::NOT_FOUND),
        Err(error) => {
            // The model may be in removal; the requester finds another node.
            tracing::debug!(%error, "bytes of a model could not be sent");
            Err(StatusCode::NOT_FOUND)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_bitmap_survives_the_round_trip() {
        for count in [0, 1, 7, 8, 9, 17] {
            let has: Vec<bool> = (0..count).map(|number| number % 3 == 0).collect();
            let back = unpack(&pack(&has));
            assert_eq!(back[..count], has, "{count}");
            assert!(back[count..].iter().all(|bit| !bit));
        }
    }
}
