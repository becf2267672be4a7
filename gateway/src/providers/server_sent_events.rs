//! Server-sent events of a stranger: bytes in any pieces, and the data of each event. What one event may have is bounded.

/// Bytes of one event: more than the largest call of a tool.
const MAX_EVENT_BYTES: usize = 4 << 20;

/// Cuts bytes into events.
#[derive(Debug, Default)]
pub(super) struct EventReader {
    /// Bytes of a line that has not ended yet.
    line: Vec<u8>,
    data: String,
    has_data: bool,
    ended_by_return: bool,
}

/// An event is larger than any that a provider sends, or no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidEvent(pub(super) &'static str);

impl EventReader {
    /// The data of the events that these bytes end.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, InvalidEvent> {
        let mut events = Vec::new();
        for &byte in bytes {
            match byte {
                b'\n' if std::mem::take(&mut self.ended_by_return) => {}
                b'\n' | b'\r' => {
                    self.ended_by_return = byte == b'\r';
                    events.extend(self.end_line()?);
                }
                _ => {
                    self.ended_by_return = false;
                    self.line.push(byte);
                    if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
                        return Err(InvalidEvent("an event of more than 4 MiB"));
                    }
                }
            }
        }
        Ok(events)
    }

    /// The data of the event that the line ends, if it does.
    fn end_line(&mut self) -> Result<Option<String>, InvalidEvent> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            return Ok(std::mem::take(&mut self.has_data).then_some(data));
        }
        let line = str::from_utf8(&line).map_err(|_| InvalidEvent("an event that is no UTF-8"))?;
        // Other fields and comments say nothing that the data do not.
        let value = line.strip_prefix("data:").or_else(|| (line == "data").then_some(""));
        if let Some(value) = value {
            if std::mem::replace(&mut self.has_data, true) {
                self.data.push('\n');
            }
            self.data.push_str(value.strip_prefix(' ').unwrap_or(value));
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_same_in_any_pieces() {
        let text = ": ping\r\n\r\nevent: a\r\ndata: one\r\n\r\ndata: two\ndata:  more\n\ndata\ndata:x\r\rdata: é\n\ndata: cut";
        let expected = ["one", "two\n more", "\nx", "é"];
        for size in 1..=text.len() {
            let mut reader = EventReader::default();
            let pieces = text.as_bytes().chunks(size);
            let events: Vec<String> = pieces.flat_map(|piece| reader.push(piece).unwrap()).collect();
            assert_eq!(events, expected, "pieces of {size}");
        }
    }

    #[test]
    fn what_never_ends_is_refused() {
        let mut reader = EventReader::default();
        let piece = [b'a'; 65_536];
        let refused = (0..100).find_map(|_| reader.push(&piece).err());
        assert_eq!(refused, Some(InvalidEvent("an event of more than 4 MiB")));
        let mut lines = EventReader::default();
        let line = [b"data: ".as_slice(), &[b'b'; 65_530], b"\n"].concat();
        assert!((0..100).any(|_| lines.push(&line).is_err()));
        assert!(EventReader::default().push(b"data: \xff\n").is_err());
    }
}
