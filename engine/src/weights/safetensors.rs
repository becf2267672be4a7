//! Header of a safetensors file, fully validated: 8 bytes of length, a JSON object of tensors, then the data
//! that the offsets point to. Reads no data.

use std::{collections::BTreeMap, fs::File, os::unix::fs::FileExt};

use serde::Deserialize;
use thiserror::Error;

/// Maximum header size: a trillion-parameter model needs a few MB, and a damaged length must not cause a
/// large allocation.
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// Why a header is invalid.
#[derive(Debug, Error)]
pub enum HeaderError {
    /// An I/O error.
    #[error("reading the header failed: {0}")]
    Io(#[from] std::io::Error),
    /// The file is too short.
    #[error("the file has {have} bytes, but its header needs {need}")]
    Short {
        /// Actual length of the file.
        have: u64,
        /// Required length.
        need: u64,
    },
    /// An implausible length.
    #[error("the header claims {0} bytes, more than the limit of {MAX_HEADER_BYTES}")]
    Long(u64),
    /// Invalid JSON.
    #[error("the header is not what safetensors defines: {0}")]
    Json(String),
    /// Offsets outside the data, or not matching shape and type.
    #[error("tensor {tensor} claims bytes {begin}..{end} of {data} for shape {shape:?} of {dtype}")]
    Offsets {
        /// Its name.
        tensor: String,
        /// First byte.
        begin: u64,
        /// Byte after the last.
        end: u64,
        /// Bytes of data in the file.
        data: u64,
        /// Its shape.
        shape: Vec<usize>,
        /// Its element type.
        dtype: String,
    },
}

/// A validated header.
#[derive(Debug)]
pub struct Header {
    /// Tensors by name.
    pub entries: BTreeMap<String, Entry>,
    /// File position of offset 0.
    pub data_start: u64,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Element type, in the format's notation.
    pub dtype: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// First byte in the data.
    pub begin: u64,
    /// Byte after the last.
    pub end: u64,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// Reads and validates the header of a file `length` bytes long.
pub fn read_header(file: &File, length: u64) -> Result<Header, HeaderError> {
    if length < 8 {
        return Err(HeaderError::Short { have: length, need: 8 });
    }
    let mut size = [0; 8];
    file.read_exact_at(&mut size, 0)?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER_BYTES {
        return Err(HeaderError::Long(size));
    }
    let data_start = 8 + size;
    if data_start > length {
        return Err(HeaderError::Short { have: length, need: data_start });
    }
    let mut text = vec![0; size as usize];
    file.read_exact_at(&mut text, 8)?;
    let entries = parse(&text, length - data_start)?;
    Ok(Header { entries, data_start })
}

/// The tensors of a header that is followed by `data` bytes of data.
fn parse(text: &[u8], data: u64) -> Result<BTreeMap<String, Entry>, HeaderError> {
    let json = |error: serde_json::Error| HeaderError::Json(error.to_string());
    let object: BTreeMap<String, serde_json::Value> = serde_json::from_slice(text).map_err(json)?;
    let mut entries = BTreeMap::new();
    for (tensor, value) in object {
        if tensor == "__metadata__" {
            continue;
        }
        let RawEntry { dtype, shape, data_offsets: (begin, end) } =
            serde_json::from_value(value).map_err(|error| HeaderError::Json(format!("{tensor}: {error}")))?;
        let bytes = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim as u64));
        // An unknown element type is refused only when such a tensor is loaded.
        let matches = match item_bytes(&dtype) {
            Some(item) => bytes.and_then(|count| count.checked_mul(item)) == end.checked_sub(begin),
            None => begin <= end,
        };
        if !matches || end > data {
            return Err(HeaderError::Offsets { tensor, begin, end, data, shape, dtype });
        }
        entries.insert(tensor, Entry { dtype, shape, begin, end });
    }
    Ok(entries)
}

fn item_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" => Some(1),
        "U16" | "I16" | "F16" | "BF16" => Some(2),
        "U32" | "I32" | "F32" => Some(4),
        "U64" | "I64" | "F64" => Some(8),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_headers_are_read_and_bad_ones_say_what_is_wrong() {
        let good =
            br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F16","shape":[2,3],"data_offsets":[4,16]}}  "#;
        let entries = parse(good, 16).unwrap();
        assert_eq!(entries["a"], Entry { dtype: "F16".into(), shape: vec![2, 3], begin: 4, end: 16 });

        for (header, data, said) in [
            (r#"{"a":{"dtype":"F16","shape":[2,3],"data_offsets":[4,16]}}"#, 15, "claims bytes 4..16 of 15"),
            (r#"{"a":{"dtype":"F16","shape":[2,3],"data_offsets":[0,10]}}"#, 16, "claims bytes 0..10"),
            (r#"{"a":{"dtype":"F16","shape":[2,3],"data_offsets":[12,0]}}"#, 16, "claims bytes 12..0"),
            (
                r#"{"a":{"dtype":"F16","shape":[4294967296,4294967296,2],"data_offsets":[0,0]}}"#,
                16,
                "claims bytes 0..0",
            ),
            (r#"{"a":{"dtype":"F16","shape":[-1],"data_offsets":[0,0]}}"#, 16, "a: invalid value"),
            (r#"{"a":{"dtype":"F16"}}"#, 16, "missing field"),
            (r#"{"a":"#, 16, "EOF"),
            (r#"[]"#, 16, "invalid type"),
        ] {
            let error = parse(header.as_bytes(), data).unwrap_err().to_string();
            assert!(error.contains(said), "{header}: {error}");
        }
    }
}
