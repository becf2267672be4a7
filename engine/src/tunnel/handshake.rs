//! Handshake of two ring members before MLX's bytes: both send the label of the ring at the same time. The
//! label is not secret; the certificates authenticate the peer, and the label names the ring.

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Maximum length of a label; a peer that announces more is not one of ours.
const MAX_LABEL_BYTES: u16 = 1024;

/// Sends the label and checks that the peer's is the same.
pub(super) async fn exchange_labels<S>(stream: &mut S, label: &str) -> Result<(), String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let closed = |error: std::io::Error| format!("it refused us or went away: {}", super::error_chain(error));
    let length = u16::try_from(label.len()).ok().filter(|length| *length <= MAX_LABEL_BYTES);
    let length =
        length.ok_or_else(|| format!("the label {label:?} is longer than {MAX_LABEL_BYTES} bytes"))?;
    stream.write_u16(length).await.map_err(closed)?;
    stream.write_all(label.as_bytes()).await.map_err(closed)?;
    stream.flush().await.map_err(closed)?;

    let length = stream.read_u16().await.map_err(closed)?;
    if length > MAX_LABEL_BYTES {
        return Err(format!("it announced a label of {length} bytes; {MAX_LABEL_BYTES} is the most"));
    }
    let mut said = vec![0; length.into()];
    stream.read_exact(&mut said).await.map_err(closed)?;
    if said == label.as_bytes() {
        return Ok(());
    }
    Err(format!("it is in the ring {:?} and not in {label:?}", String::from_utf8_lossy(&said)))
}
