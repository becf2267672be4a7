//! Server-sent events, the streams of most dialects.

use serde::Serialize;

use super::json_line::write_json_line;

/// Their content type.
pub(super) const STREAM_TYPE: &str = "text/event-stream; charset=utf-8";
/// A comment, which clients skip.
pub(super) const KEEP_ALIVE: &[u8] = b": still working\n\n";

/// One server-sent event with a name, for clients that read events by it.
pub(super) fn named_event(out: &mut Vec<u8>, name: &str, value: &impl Serialize) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    sse_event(out, value);
}

/// One server-sent event: one `data:` line.
pub(super) fn sse_event(out: &mut Vec<u8>, value: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    write_json_line(out, value);
    out.extend_from_slice(b"\n\n");
}
