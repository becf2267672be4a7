//! The lines of a file: cut into parts of whole lines as they arrive, and read part by part. Not here: what a line says.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::response_store::{FilePart, ResponseStore, ResponseStoreError};

/// Bytes of a part, but for lines that are longer.
const MIN_PART_BYTES: usize = 256 << 10;
/// The longest line: as long as the body of a request, and what is around it.
pub(crate) const MAX_LINE_BYTES: usize = (16 << 20) + (64 << 10);
/// Kibibytes of parts that all running batches have in memory.
pub(super) const MAX_READ_KIB: usize = 64 << 10;

/// Cuts a file into parts of whole lines.
#[derive(Default)]
pub(crate) struct LineSplitter {
    buffer: BytesMut,
    /// The number of the first line in the buffer.
    first: u64,
    /// Lines that end in the buffer.
    lines: u64,
    /// Where the last of them ends.
    whole: usize,
}

impl LineSplitter {
    /// Adds bytes; a part where there are enough, or the number of a line that is too long.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<Option<FilePart>, u64> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.buffer.extend_from_slice(piece);
            if self.buffer.len() - self.whole > MAX_LINE_BYTES {
                return Err(self.first + self.lines);
            }
            if piece.ends_with(b"\n") {
                self.lines += 1;
                self.whole = self.buffer.len();
            }
        }
        Ok((self.whole >= MIN_PART_BYTES).then(|| self.cut(self.whole)))
    }

    /// The last part.
    pub(crate) fn finish(mut self) -> Option<FilePart> {
        let length = self.buffer.len();
        (length > 0).then(|| self.cut(length))
    }

    /// Bytes that wait for a part.
    pub(crate) fn buffered(&self) -> usize {
        self.buffer.len()
    }

    fn cut(&mut self, length: usize) -> FilePart {
        let part = FilePart { first: self.first, text: self.buffer.split_to(length).freeze() };
        self.first += std::mem::take(&mut self.lines);
        self.whole = 0;
        part
    }
}

/// The lines of a part with their numbers, without line breaks, and the number of the line that follows it.
pub(super) fn lines(FilePart { first, text }: &FilePart) -> (Vec<(u64, Bytes)>, u64) {
    let mut number = *first;
    let mut lines = Vec::new();
    for piece in text.split_inclusive(|byte| *byte == b'\n') {
        let mut line = piece.trim_ascii();
        if number == 0 {
            // Editors on Windows begin a file so.
            line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        }
        if !line.is_empty() {
            lines.push((number, text.slice_ref(line)));
        }
        number += 1;
    }
    (lines, number)
}

/// A line of a file, whose part counts as long as the line is there.
#[derive(Clone)]
pub(super) struct InputLine {
    pub(super) number: u64,
    pub(super) text: Bytes,
    _read: Arc<OwnedSemaphorePermit>,
}

/// Reads the lines of a file in turn.
pub(super) struct InputLines {
    store: Arc<ResponseStore>,
    owner: String,
    file: String,
    /// Bounds what is read by all.
    budget: Arc<Semaphore>,
    next: u64,
    waiting: VecDeque<InputLine>,
}

impl InputLines {
    pub(super) fn new(store: Arc<ResponseStore>, owner: &str, file: &str, budget: Arc<Semaphore>) -> Self {
        let waiting = VecDeque::new();
        Self { store, owner: owner.to_owned(), file: file.to_owned(), budget, next: 0, waiting }
    }

    /// The next line that is not blank. Cancel safe.
    pub(super) async fn next(&mut self) -> Result<Option<InputLine>, ResponseStoreError> {
        loop {
            if let Some(line) = self.waiting.pop_front() {
                return Ok(Some(line));
            }
            let (owner, file, from) = (self.owner.clone(), self.file.clone(), self.next);
            // As much as a part may have, until it is known how much it has.
            let largest = ((MAX_LINE_BYTES + MIN_PART_BYTES) >> 10) as u32;
            let permit = self.budget.clone().acquire_many_owned(largest).await;
            let mut permit = permit.map_err(|_| ResponseStoreError::Failed("the gateway ends".to_owned()))?;
            let Some(part) = self.store.read(move |store| store.part(&owner, &file, from)).await? else {
                return Ok(None);
            };
            let spare = (largest as usize).saturating_sub((part.text.len() >> 10) + 1);
            drop(permit.split(spare));
            let permit = Arc::new(permit);
            let (lines, next) = lines(&part);
            self.next = next;
            let line = |(number, text)| InputLine { number, text, _read: permit.clone() };
            self.waiting.extend(lines.into_iter().map(line));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of a file that arrives in pieces of this size.
    fn parts(file: &[u8], size: usize) -> Result<Vec<FilePart>, u64> {
        let mut splitter = LineSplitter::default();
        let mut parts = Vec::new();
        for piece in file.chunks(size) {
            parts.extend(splitter.push(piece)?);
        }
        parts.extend(splitter.finish());
        Ok(parts)
    }

    #[test]
    fn parts_have_whole_lines_and_all_of_the_file() {
        let line = |number: usize| format!("{{\"line\":{number},\"x\":\"{}\"}}\n", "x".repeat(number % 300));
        let file: String = (0..5000).map(line).collect();
        for (file, size) in [
            (file.as_bytes(), 1 << 10),
            (file.as_bytes(), 100 << 10),
            (file.as_bytes(), 10 << 20),
            (file.trim_end().as_bytes(), 7777),
            (b"", 1),
            (b"\n", 1),
            (b"a", 1),
        ] {
            let parts = parts(file, size).unwrap();
            let all: Vec<u8> = parts.iter().flat_map(|part| part.text.to_vec()).collect();
            assert!(all == file, "{} bytes in pieces of {size}", file.len());
            let mut next = 0;
            for part in &parts {
                assert_eq!(part.first, next);
                next = lines(part).1;
            }
            let read: Vec<Bytes> =
                parts.iter().flat_map(|part| lines(part).0).map(|(_, text)| text).collect();
            let expected: Vec<&[u8]> =
                file.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).collect();
            assert!(read == expected);
        }
    }

    #[test]
    fn lines_are_numbered_with_the_blank_ones() {
        let part = FilePart { first: 0, text: "\u{feff}a\r\n\n \n b \nc".into() };
        let (found, next) = lines(&part);
        let found: Vec<(u64, &[u8])> = found.iter().map(|(number, text)| (*number, &text[..])).collect();
        assert_eq!(found, [(0, &b"a"[..]), (3, b"b"), (4, b"c")]);
        assert_eq!(next, 5);
        assert_eq!(lines(&FilePart { first: 7, text: "\u{feff}".into() }).0[0].0, 7);
    }

    #[test]
    fn a_line_that_is_too_long_is_named() {
        let long = [&b"a\nb\n"[..], &vec![b'x'; MAX_LINE_BYTES + 1]].concat();
        assert_eq!(parts(&long, 64 << 10), Err(2));
        assert!(parts(&long[..long.len() - 1], 64 << 10).is_ok());
    }
}
