//! Where the converted tensors of a model would lie in its files, and any of their bytes, made of those that the files
//! have: of a rank's rows or columns only the rows and columns that they stand for are read.

use std::{io, ops::Range};

use super::{
    awq::InterleavedWords, biases::Biases, cast::Cast, fp8::ScaledBlocks, gptq::GroupedWords, matrix::ReadAt,
    transposed::TransposedMatrix,
};

/// Bytes of a tensor: `count` runs of `length` bytes, one every `stride` bytes from `begin` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// The first byte.
    pub begin: u64,
    /// Bytes of a run.
    pub length: u64,
    /// From one run to the next.
    pub stride: u64,
    /// How many.
    pub count: u64,
}

impl Runs {
    /// Bytes that lie together.
    pub fn one(begin: u64, length: u64) -> Self {
        Self { begin, length, stride: length, count: 1 }
    }

    /// The first byte of each run.
    pub fn starts(self) -> impl Iterator<Item = u64> {
        (0..self.count).map(move |run| self.begin + run * self.stride)
    }
}

/// Some rows of a converted tensor, and of each the same columns. A tensor of more dimensions has its last as columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The rows.
    pub(super) rows: Range<u64>,
    /// Elements of each: numbers, or words of packed ones.
    pub(super) columns: Range<u64>,
}

impl Window {
    /// Rows.
    pub(super) fn height(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    /// Elements of a row.
    pub(super) fn width(&self) -> u64 {
        self.columns.end - self.columns.start
    }
}

/// The converted tensors of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    /// Of each file, in the order of their bytes.
    pub(super) files: Vec<Vec<ConvertedTensor>>,
}

/// A converted tensor and what it is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvertedTensor {
    pub(super) name: Box<str>,
    /// Its first byte, as headers have it.
    pub(super) begin: u64,
    /// The byte after its last.
    pub(super) end: u64,
    /// Elements of a row.
    pub(super) columns: u64,
    /// Bytes of an element.
    pub(super) element_bytes: u64,
    pub(super) part: Part,
}

/// What a converted tensor is of a packing.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Part {
    Blocks(ScaledBlocks),
    Biases(Biases),
    Transposed(TransposedMatrix),
    Interleaved(InterleavedWords),
    Words(GroupedWords),
    Cast(Cast),
}

impl Layout {
    /// The tensor whose bytes lie there; `None` where they are the file's own.
    pub fn tensor(&self, file: usize, offset: u64) -> Option<&ConvertedTensor> {
        let tensors = self.files.get(file)?;
        let index = tensors.partition_point(|tensor| tensor.end <= offset);
        tensors.get(index).filter(|tensor| tensor.begin <= offset)
    }
}

impl ConvertedTensor {
    /// The windows that these bytes are, in their order, each of some `piece` bytes and of a row at least.
    pub fn windows(&self, runs: Runs, piece: u64) -> io::Result<Vec<Window>> {
        let Runs { begin, length, stride, count } = runs;
        let (width, row) = (self.element_bytes, self.columns * self.element_bytes);
        let last =
            count.saturating_sub(1).saturating_mul(stride).saturating_add(begin).saturating_add(length);
        let parts = [begin.wrapping_sub(self.begin), length, stride];
        if begin < self.begin || last > self.end || !parts.iter().all(|part| part.is_multiple_of(width)) {
            let problem = format!("{runs:?} are no whole elements of {}; report this as a bug", self.name);
            return Err(io::Error::other(problem));
        }
        let begin = begin - self.begin;
        let mut windows = Vec::new();
        let mut add = |rows: Range<u64>, bytes: Range<u64>| {
            let step = (piece / (bytes.end - bytes.start).max(1)).max(1);
            windows.extend(rows.clone().step_by(step as usize).map(|first| Window {
                rows: first..(first + step).min(rows.end),
                columns: bytes.start / width..bytes.end / width,
            }));
        };
        let within = begin % row;
        if stride == row && within + length <= row {
            add(begin / row..begin / row + count, within..within + length);
            return Ok(windows);
        }
        for start in (Runs { begin, ..runs }).starts() {
            let (mut at, end) = (start, start + length);
            while at < end {
                let (first, within) = (at / row, at % row);
                let rows = if within == 0 { ((end - at) / row).max(1) } else { 1 };
                let to = (within + end - at).min(row);
                add(first..first + rows, within..to);
                at += (to - within) * rows;
            }
        }
        Ok(windows)
    }

    /// Fills `out` with the elements of a window, row after row; `read` fills bytes of a file, by its number, from an
    /// offset on.
    pub fn read(&self, window: &Window, out: &mut [u8], read: &ReadAt<'_>) -> io::Result<()> {
        match &self.part {
            Part::Blocks(part) => part.convert(&self.name, window, out, read),
            Part::Biases(part) => part.convert(&self.name, window, out, read),
            Part::Transposed(part) => part.convert(window, out, read),
            Part::Interleaved(part) => part.convert(window, out, read),
            Part::Words(part) => part.convert(&self.name, window, out, read),
            Part::Cast(part) => part.convert(&self.name, window, out, read),
        }
    }

    /// Bytes of a window.
    pub fn bytes(&self, window: &Window) -> u64 {
        window.height() * window.width() * self.element_bytes
    }
}
