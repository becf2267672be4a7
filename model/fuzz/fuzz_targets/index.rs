//! A `model.safetensors.index.json` of any bytes, beside files with and without numbers.

#![no_main]

use libfuzzer_sys::fuzz_target;
use russet_model::index::{index_files, weight_files};

const NAMES: &[&str] = &[
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors",
];

fuzz_target!(|index: &[u8]| {
    let _ = weight_files(Some(index), NAMES);
    if let Ok(files) = index_files(index) {
        assert!(files.len() <= index.len(), "more files than bytes");
    }
});
