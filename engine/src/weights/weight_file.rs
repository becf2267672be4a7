//! A file of weights: read as it is, or converted while it is read to what the engine has in memory. `model` says where
//! each byte of the converted tensors would lie and what it is made of.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use russet_model::{
    gguf,
    packings::layout::{Layout, Runs},
};

use super::{checkpoint::OpenFile, source_file::SourceFile};

/// Bytes of a tensor that are worth a thread: a fraction of a millisecond as they are, some milliseconds of conversion.
const MIN_PIECE_BYTES: u64 = 1 << 20;

/// A file of weights.
#[derive(Debug)]
pub(super) enum WeightFile {
    /// As the engine has them in memory.
    Plain(SourceFile),
    /// Converted as they are read.
    Gguf(SourceFile, gguf::layout::Layout),
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
            Self::Plain(file) => each_run(bytes, runs, |bytes, start| file.read(bytes, start)),
            Self::Gguf(file, layout) => each_run(bytes, runs, |bytes, start| {
                layout.read(start, bytes, &|offset, bytes| file.read(bytes, offset))
            }),
            Self::Packed(files, own) => files.read(*own, bytes, runs),
        }
    }

    /// Bytes that were read of it so far; of files that belong together, the first counts all.
    pub fn bytes_read(&self) -> u64 {
        match self {
            Self::Plain(file) | Self::Gguf(file, _) => file.bytes_read(),
            Self::Packed(files, 0) => files.files.iter().map(Self::bytes_read).sum(),
            Self::Packed(..) => 0,
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
        for window in tensor.windows(runs, bytes.len() as u64)? {
            let (own, others) = bytes.split_at_mut(tensor.bytes(&window) as usize);
            tensor.read(&window, own, &read)?;
            bytes = others;
        }
        Ok(())
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

/// Bytes of the pieces that a tensor of so many is read in: for each thread one, if it is large enough.
pub(super) fn piece_bytes(bytes: usize) -> u64 {
    (bytes.div_ceil(cores()) as u64).max(MIN_PIECE_BYTES)
}

/// Fills every piece, several at a time.
pub(super) fn in_threads<P: Send>(
    pieces: Vec<(P, &mut [u8])>,
    fill: impl Fn(&P, &mut [u8]) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let threads = cores().min(pieces.len());
    // Each thread takes the next piece, since some take longer than others.
    let pieces = Mutex::new(pieces.into_iter());
    let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
    let fill_some = || {
        while let Some((piece, out)) = next() {
            fill(&piece, out)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        // The calling thread is one of them.
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(fill_some)).collect();
        let own = fill_some();
        let ended = others.into_iter().map(|thread| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread that reads weights panicked")))
        });
        ended.fold(own, |sum, ended| sum.and(ended))
    })
}
