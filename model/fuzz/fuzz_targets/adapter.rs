//! The files of an adapter, of any bytes: its configuration, and behind the first zero byte the header of its weights,
//! in a file of as much data as the last four bytes say; bound to a model's tensors.

#![no_main]

use libfuzzer_sys::fuzz_target;
use russet_model::{
    adapter::Adapter,
    safetensors::Headers,
    shape::ModelShape,
    tensors::{Recipe, Role, ShardAxis, Stored, Tensor},
};

/// The one matrix of a model.
const MATRIX: &str = "model.layers.0.self_attn.q_proj.weight";

fuzz_target!(|bytes: &[u8]| {
    let Some((bytes, data)) = bytes.split_last_chunk::<4>() else { return };
    let Some(border) = bytes.iter().position(|byte| *byte == 0) else { return };
    let (config, header) = (&bytes[..border], &bytes[border + 1..]);
    let size = 8 + header.len() as u64 + u64::from(u32::from_le_bytes(*data));
    let mut headers = Headers::default();
    if headers.add("adapters.safetensors", header, size).is_err() {
        return;
    }
    let shape = ModelShape::read_adapter(config, &headers);
    let Ok(adapter) = Adapter::read(config, &headers) else { return };
    let shape = shape.expect("an adapter that is read has a shape");
    assert_eq!(shape.adapter, Some(adapter.shape()));
    let tensor = Tensor {
        name: MATRIX.to_owned(),
        role: Role::Layer(0),
        shape: vec![6, 8],
        axis: ShardAxis::Replicated,
        sources: vec![MATRIX.to_owned()],
        recipe: Recipe::AsIs,
        is_matrix: true,
        packs_to: None,
        is_auxiliary: false,
    };
    if let Ok(binding) = adapter.bind(&[(tensor, Stored::default())]) {
        assert_eq!(binding.len(), 1, "every module is bound");
    }
});
