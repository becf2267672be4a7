//! Arrays whose memory a function of the engine fills: MLX allocates it, as it does for every array, and no second copy
//! is made. MLX's own way to fill memory is a reader of a safetensors file, so this is one, whose file has one tensor.

use std::{
    ffi::{c_char, c_int, c_void},
    io,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
};

use mlx_rs::{Array, Dtype, Stream, error::Exception, transforms::async_eval};
use thiserror::Error;

use crate::{Error, array::item_size, error::check, install_error_handler};

/// Why an array has no elements.
#[derive(Debug, Error)]
pub enum FillError {
    /// MLX refused or failed.
    #[error(transparent)]
    Mlx(#[from] Error),
    /// The function failed.
    #[error(transparent)]
    Fill(#[from] io::Error),
}

/// An array of `shape` whose bytes `fill` writes: little-endian elements in row order. It is evaluated, and `fill` runs
/// on the calling thread.
pub fn filled(
    shape: &[i32],
    dtype: Dtype,
    fill: impl FnOnce(&mut [u8]) -> io::Result<()>,
) -> Result<Array, FillError> {
    install_error_handler();
    let item = item_size(dtype);
    let bytes = shape.iter().try_fold(item, |product, &dim| usize::try_from(dim).ok()?.checked_mul(product));
    let bytes = bytes.ok_or_else(|| Error::Size { bytes: 0, shape: shape.to_vec(), item })?;
    if bytes == 0 {
        // MLX allocates nothing, so there is nothing to lend.
        return Ok(crate::array::from_bytes(&[], shape, dtype)?);
    }
    let (lend, lent) = mpsc::channel();
    let (give_back, given_back) = mpsc::channel();
    let header = header(shape, dtype, bytes)?;
    let (size, position) = (header.len() + bytes, AtomicUsize::new(0));
    let array = open(TensorFile { header, size, position, lend, given_back: Mutex::new(given_back) })?;
    let failed =
        |error: Exception| Error::Mlx { operation: "allocate an array", message: error.what().to_owned() };
    async_eval([&array]).map_err(failed)?;
    let Ok(Loan { pointer, length }) = lent.recv() else {
        let message = "it asked for no elements".to_owned();
        return Err(Error::Mlx { operation: "fill an array", message }.into());
    };
    prefer_huge_pages(pointer, length);
    // SAFETY: MLX allocated so many bytes for the elements and uses them for nothing until its reader returns, which
    // waits until `give_back` is dropped, below or by a panic.
    let result = fill(unsafe { std::slice::from_raw_parts_mut(pointer, length) });
    drop(give_back);
    array.eval().map_err(failed)?;
    result?;
    Ok(array)
}

/// Memory of MLX that the function fills.
struct Loan {
    pointer: *mut u8,
    length: usize,
}

// SAFETY: the sender does not use the memory while the receiver has it.
unsafe impl Send for Loan {}

/// Asks for huge pages for the memory, of whole ones that lie in it: with pages of 4 KiB, half of the time that weights
/// take to load goes into the faults of their first use.
#[cfg(target_os = "linux")]
fn prefer_huge_pages(pointer: *mut u8, length: usize) {
    const HUGE_PAGE: usize = 2 << 20;
    let before = pointer.align_offset(HUGE_PAGE);
    let whole = length.saturating_sub(before) / HUGE_PAGE * HUGE_PAGE;
    if whole > 0 {
        // SAFETY: the pages lie in the memory that MLX allocated, and the advice changes none of their bytes. A kernel
        // without huge pages refuses it.
        let _ = unsafe {
            rustix::mm::madvise(pointer.wrapping_add(before).cast(), whole, rustix::mm::Advice::LinuxHugepage)
        };
    }
}

/// Other systems choose the size of pages themselves.
#[cfg(not(target_os = "linux"))]
fn prefer_huge_pages(_: *mut u8, _: usize) {}

/// A safetensors file whose only tensor's bytes come from the thread that asked for the array.
struct TensorFile {
    header: Vec<u8>,
    /// Bytes of the file.
    size: usize,
    /// The next byte to be read.
    position: AtomicUsize,
    lend: mpsc::Sender<Loan>,
    /// Nothing comes from it: its sender is dropped when the memory is filled.
    given_back: Mutex<mpsc::Receiver<()>>,
}

/// As in C.
const SEEK_SET: c_int = 0;
const SEEK_CUR: c_int = 1;
/// The only tensor.
const NAME: &std::ffi::CStr = c"array";

/// The start of a file with one tensor.
fn header(shape: &[i32], dtype: Dtype, bytes: usize) -> Result<Vec<u8>, Error> {
    let dtype = match dtype {
        Dtype::Float32 => "F32",
        Dtype::Float16 => "F16",
        Dtype::Bfloat16 => "BF16",
        Dtype::Uint32 => "U32",
        Dtype::Uint8 => "U8",
        other => {
            let message = format!("elements of type {other:?} are not filled");
            return Err(Error::Mlx { operation: "fill an array", message });
        }
    };
    let json = format!(r#"{{"array":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[0,{bytes}]}}}}"#);
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json.bytes());
    Ok(header)
}

/// The array of a file, not evaluated.
fn open(file: TensorFile) -> Result<Array, Error> {
    // Arrays are read from files on the CPU, into memory that a GPU shares.
    let stream = Stream::cpu();
    // SAFETY: the reader owns the file and frees it by `free`.
    let reader = unsafe { mlx_sys::mlx_io_reader_new(Box::into_raw(Box::new(file)).cast(), VTABLE) };
    // SAFETY: empty maps that the next call fills; freed below in every case.
    let (mut arrays, mut metadata) =
        unsafe { (mlx_sys::mlx_map_string_to_array_new(), mlx_sys::mlx_map_string_to_string_new()) };
    // SAFETY: all handles are live.
    let loaded =
        unsafe { mlx_sys::mlx_load_safetensors_reader(&mut arrays, &mut metadata, reader, stream.as_ptr()) };
    // SAFETY: a null handle that the next call fills; owned by `array` in every case.
    let mut handle = unsafe { mlx_sys::mlx_array_new() };
    let found = match loaded {
        // SAFETY: the map is live, and the name ends with a zero.
        0 => unsafe { mlx_sys::mlx_map_string_to_array_get(&mut handle, arrays, NAME.as_ptr()) },
        failed => failed,
    };
    // SAFETY: the handle is ours alone.
    let array = unsafe { Array::from_ptr(handle) };
    // SAFETY: made above, and used by nothing else; the array keeps the reader while it needs it.
    unsafe {
        mlx_sys::mlx_map_string_to_array_free(arrays);
        mlx_sys::mlx_map_string_to_string_free(metadata);
        mlx_sys::mlx_io_reader_free(reader);
    }
    check("describe an array", loaded)?;
    check("describe an array", found)?;
    Ok(array)
}

const VTABLE: mlx_sys::mlx_io_vtable = mlx_sys::mlx_io_vtable {
    is_open: Some(is_open),
    good: Some(is_open),
    tell: Some(tell),
    seek: Some(seek),
    read: Some(read_header),
    read_at_offset: Some(lend_memory),
    write: None,
    label: Some(label),
    free: Some(free),
};

/// The file of a reader.
///
/// # Safety
///
/// `file` is what `mlx_io_reader_new` got, and `free` was not called.
unsafe fn file<'a>(file: *mut c_void) -> &'a TensorFile {
    // SAFETY: by the contract of this function; the file is shared, and its fields may be used from any thread.
    unsafe { &*file.cast::<TensorFile>() }
}

unsafe extern "C" fn is_open(_: *mut c_void) -> bool {
    true
}

unsafe extern "C" fn tell(reader: *mut c_void) -> usize {
    // SAFETY: MLX passes the file of the reader that it uses.
    unsafe { file(reader) }.position.load(Ordering::Relaxed)
}

unsafe extern "C" fn seek(reader: *mut c_void, offset: i64, whence: c_int) -> c_int {
    // SAFETY: MLX passes the file of the reader that it uses.
    let file = unsafe { file(reader) };
    let from = match whence {
        SEEK_SET => 0,
        SEEK_CUR => file.position.load(Ordering::Relaxed),
        _ => file.size,
    };
    let Some(position) = isize::try_from(offset).ok().and_then(|offset| from.checked_add_signed(offset))
    else {
        return -1;
    };
    file.position.store(position, Ordering::Relaxed);
    0
}

unsafe extern "C" fn read_header(reader: *mut c_void, out: *mut c_char, count: usize) -> usize {
    // SAFETY: MLX passes the file of the reader that it uses.
    let file = unsafe { file(reader) };
    let position = file.position.fetch_add(count, Ordering::Relaxed);
    let Some(bytes) = file.header.get(position..).and_then(|bytes| bytes.get(..count)) else { return 0 };
    // SAFETY: MLX has room for `count` bytes, which are not those of the header.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.cast(), count) };
    count
}

/// Lends the memory of the elements, and waits until it comes back.
unsafe extern "C" fn lend_memory(reader: *mut c_void, out: *mut c_char, count: usize, _: usize) -> usize {
    // SAFETY: MLX passes the file of the reader that it uses.
    let file = unsafe { file(reader) };
    // Without a borrower nothing comes back, either: the array is not used then.
    let _ = file.lend.send(Loan { pointer: out.cast(), length: count });
    let _ = file.given_back.lock().unwrap_or_else(PoisonError::into_inner).recv();
    count
}

unsafe extern "C" fn label(_: *mut c_void) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn free(reader: *mut c_void) {
    // SAFETY: MLX calls this once, when nothing uses the reader any more.
    drop(unsafe { Box::from_raw(reader.cast::<TensorFile>()) });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_an_array_is_filled_in_place() {
        for (dtype, bytes) in [(Dtype::Float32, 24), (Dtype::Bfloat16, 12), (Dtype::Uint8, 6)] {
            let array = filled(&[2, 3], dtype, |memory| {
                assert_eq!(memory.len(), bytes);
                memory.fill(0);
                memory[bytes - 1] = 0x40;
                Ok(())
            })
            .unwrap();
            assert_eq!((array.shape(), array.dtype()), (&[2, 3][..], dtype));
            let values = array.as_dtype(Dtype::Float32).unwrap();
            let last = if dtype == Dtype::Uint8 { 64.0 } else { 2.0 };
            assert_eq!(values.to_vec_exact::<f32>().unwrap(), [0.0, 0.0, 0.0, 0.0, 0.0, last], "{dtype:?}");
        }
        assert_eq!(filled(&[0, 3], Dtype::Float32, |_| Ok(())).unwrap().shape(), [0, 3]);
        assert_eq!(filled(&[], Dtype::Uint32, |_| Ok(())).unwrap().shape(), [0; 0]);
    }

    #[test]
    fn failure_to_fill_an_array_is_returned() {
        let error = filled(&[2], Dtype::Float32, |_| Err(io::Error::other("no such page"))).unwrap_err();
        assert_eq!(error.to_string(), "no such page");
        assert!(matches!(filled(&[-1], Dtype::Float32, |_| Ok(())), Err(FillError::Mlx(Error::Size { .. }))));
        assert!(matches!(filled(&[1], Dtype::Int64, |_| Ok(())), Err(FillError::Mlx(Error::Mlx { .. }))));
        let panicked =
            std::panic::catch_unwind(|| filled(&[2], Dtype::Float32, |_| panic!("a panic of the function")));
        assert!(panicked.is_err());
    }
}
