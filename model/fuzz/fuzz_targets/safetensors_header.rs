//! The header of a safetensors file, of any bytes: as it lies at a file's beginning, and as the JSON within it, of a
//! file with as much data as the last four bytes say.

#![no_main]

use libfuzzer_sys::fuzz_target;
use russet_model::{safetensors::Headers, shape::ModelShape};

const FILE: &str = "model.safetensors";
/// What the seed's tensors belong to.
const CONFIG: &[u8] =
    br#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "rms_norm_eps": 1e-5}"#;

fuzz_target!(|bytes: &[u8]| {
    let Some((header, data)) = bytes.split_last_chunk::<4>() else { return };
    let data = u64::from(u32::from_le_bytes(*data));
    let mut headers = Headers::default();
    if let Some(start) = bytes.get(..8)
        && let Ok(length) = headers.next_length(FILE, start, data)
    {
        assert!(length + 8 <= data, "{length} bytes of header in a file of {data}");
    }
    let size = 8 + header.len() as u64 + data;
    if headers.add(FILE, header, size).is_ok() {
        for (name, entry) in headers.iter() {
            assert!(entry.begin <= entry.end && entry.end <= data, "{name}: {entry:?} of {data} bytes");
        }
        let _ = ModelShape::read(CONFIG, &headers);
    }
});
