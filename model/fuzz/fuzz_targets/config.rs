//! A `config.json` of any bytes, of a model without a tensor: every family describes its layers before one is missed.

#![no_main]

use libfuzzer_sys::fuzz_target;
use russet_model::{safetensors::Headers, shape::ModelShape};

fuzz_target!(|config: &[u8]| {
    let headers = Headers::default();
    let _ = russet_model::read(config, &headers);
    let _ = ModelShape::read(config, &headers);
});
