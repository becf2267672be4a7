//! A GGUF file that begins with any bytes, and has as much data behind them as the last four say: header, configuration,
//! weights and the first of their bytes, tokenizer, template, and the model that they make.

#![no_main]

use libfuzzer_sys::fuzz_target;
use russet_model::{
    gguf::{
        Gguf,
        header::{GgufHeader, HeaderRead},
    },
    shape::ModelShape,
    tokenizer_files::TokenizerFiles,
};

const FILE: &str = "model.gguf";

fuzz_target!(|bytes: &[u8]| {
    let Some((start, data)) = bytes.split_last_chunk::<4>() else { return };
    let size = start.len() as u64 + u64::from(u32::from_le_bytes(*data));
    match HeaderRead::new(FILE, start, size) {
        Ok(HeaderRead::Whole(header)) => whole(header, start, size),
        Ok(HeaderRead::Needs(more)) => assert!(more > start.len() as u64, "it needs {more} of {size} bytes"),
        Err(_) => {}
    }
});

fn whole(header: GgufHeader<'_>, start: &[u8], size: u64) {
    for tensor in &header.tensors {
        assert!(
            tensor.begin.checked_add(tensor.bytes).is_some_and(|end| end <= size),
            "{tensor:?} of {size}"
        );
    }
    let Ok(gguf) = Gguf::new(vec![(FILE.to_owned(), header)]) else { return };
    let factors = gguf.rope_factors().and_then(|(_, range)| {
        start.get(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
    });
    let _ = gguf.note();
    let _ = gguf.complete(&mut TokenizerFiles::default());
    let _ = gguf.tokenizer();
    let Ok(config) = gguf.configuration(factors) else { return };
    let Ok(weights) = gguf.weights(gguf.value_type(), None) else { return };
    for (_, entry) in weights.headers.iter().take(16) {
        let mut converted = vec![0; entry.bytes().min(256) as usize];
        let Some(layout) = weights.layouts.get(entry.file) else { continue };
        let _ = layout.read(entry.begin, &mut converted, &|offset, out| {
            // What lies behind the bytes given is zeros.
            let given = usize::try_from(offset).ok().and_then(|at| start.get(at..)).unwrap_or_default();
            let length = given.len().min(out.len());
            out.fill(0);
            out[..length].copy_from_slice(&given[..length]);
            Ok(())
        });
    }
    let _ = ModelShape::read(&config, &weights.headers);
}
