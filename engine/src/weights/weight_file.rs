//! A file of weights: read as it is, or converted while it is read to what the engine has in memory. `model` says where
//! each byte of the converted tensors would lie and what it is made of.

use std::{fs::File, io, os::unix::fs::FileExt as _, sync::Arc};

use russet_model::{
    gguf,
    packings::layout::{Layout, Runs},
};

use super::OpenFile;

/// Bytes of a tensor that are worth a thread: some milliseconds of conversion.
const MIN_PIECE_BYTES: u64 = 1 << 20;

/// A file of weights.
#[derive(Debug)]
pub(super) enum WeightFile {
    /// As the engine has them in memory.
    Plain(File),
    /// Converted as they are read.
    Gguf(File, gguf::layout::Layout),
    /// One of several files, by its number, whose tensors are converted, if some are.
    Packed(Arc<PackedFiles>, usize),
}

/// The files of a model whose weights are packed in another way than MLX's.
#[derive(Debug)]
pub(super) struct PackedFiles {
    files: Vec<WeightFile>,
    layout: Layout,
}

impl WeightFile {
    /// Fills `bytes` with these of the file, of converted weights where they are converted.
    pub fn read(&self, bytes: &mut [u8], runs: Runs) -> io::Result<()> {
        match self {
            Self::Plain(file) => each_run(bytes, runs, |bytes, start| file.read_exact_at(bytes, start)),
            Self::Gguf(file, layout) => each_run(bytes, runs, |bytes, start| {
                let read = |offset: u64, bytes: &mut [u8]| file.read_exact_at(bytes, offset);
                let piece = piece_bytes(bytes.len());
                let pieces = (start..).step_by(piece as usize).zip(bytes.chunks_mut(piece as usize));
                in_threads(pieces.collect(), |offset, piece| layout.read(*offset, piece, &read))
            }),
            Self::Packed(files, own) => files.read(*own, bytes, runs),
        }
    }
}

impl PackedFiles {
    /// The same files, of whose tensors the layout converts some.
    pub fn open(files: Vec<OpenFile>, layout: Layout) -> Vec<OpenFile> {
        let (paths, files): (Vec<_>, _) =
            files.into_iter().map(|OpenFile { path, file }| (path, file)).unzip();
        let files = Arc::new(Self { files, layout });
        let open = |(own, path)| OpenFile { path, file: WeightFile::Packed(Arc::clone(&files), own) };
        paths.into_iter().enumerate().map(open).collect()
    }

    fn read(&self, own: usize, mut bytes: &mut [u8], runs: Runs) -> io::Result<()> {
        let read = |file: usize, offset: u64, bytes: &mut [u8]| match self.files.get(file) {
            Some(file) => file.read(bytes, Runs::one(offset, bytes.len() as u64)),
            None => Err(io::Error::other(format!("there is no file {file}; report this as a bug"))),
        };
        let Some(tensor) = self.layout.tensor(own, runs.begin) else {
            return each_run(bytes, runs, |bytes, start| read(own, start, bytes));
        };
        let mut pieces = Vec::new();
        for window in tensor.windows(runs, piece_bytes(bytes.len()))? {
            let (piece, others) = bytes.split_at_mut(tensor.bytes(&window) as usize);
            pieces.push((window, piece));
            bytes = others;
        }
        in_threads(pieces, |window, piece| tensor.read(window, piece, &read))
    }
}

/// Fills the bytes of each run by the place where it starts.
fn each_run(
    bytes: &mut [u8],
    runs: Runs,
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<()>,
) -> io::Result<()> {
    let outs = bytes.chunks_mut(runs.length.max(1) as usize);
    runs.starts().zip(outs).try_for_each(|(start, out)| read(out, start))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes for each thread that converts so many.
fn piece_bytes(bytes: usize) -> u64 {
    (bytes.div_ceil(cores()) as u64).max(MIN_PIECE_BYTES)
}

/// Fills every piece, several at a time.
fn in_threads<P: Send>(
    mut pieces: Vec<(P, &mut [u8])>,
    fill: impl Fn(&P, &mut [u8]) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let fill_all =
        |pieces: &mut [(P, &mut [u8])]| pieces.iter_mut().try_for_each(|(piece, out)| fill(piece, out));
    if pieces.len() < 2 {
        return fill_all(&mut pieces);
    }
    let share = pieces.len().div_ceil(cores());
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            pieces.chunks_mut(share).map(|pieces| scope.spawn(|| fill_all(pieces))).collect();
        let ended = threads.into_iter().map(|thread| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread that converts weights panicked")))
        });
        ended.collect()
    })
}
