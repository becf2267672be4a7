//! Sources with a model in GGUF: what is listed, what is reported before it is copied, and what is refused.

use std::path::Path;

use super::super::source::HeaderTurns;
use super::super::{Context, SourceSpec, file};
use super::*;

/// A text or a list of them, as GGUF has them.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A Llama of one layer in Q8_0.
fn llama(architecture: &str, pre: &str) -> Vec<u8> {
    let (mut keys, mut metadata) = (0_u64, Vec::new());
    let mut add = |key: &str, kind: u32, value: Vec<u8>| {
        keys += 1;
        metadata.extend([text(key), kind.to_le_bytes().to_vec(), value].concat());
    };
    for (key, value) in [
        ("general.architecture", architecture),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", pre),
        ("tokenizer.chat_template", "{{ messages }}"),
    ] {
        add(key, 8, text(value));
    }
    let list = [8_u32.to_le_bytes().to_vec(), 2_u64.to_le_bytes().to_vec(), text("a"), text("b")].concat();
    add("tokenizer.ggml.tokens", 9, list);
    for (key, number) in [
        ("llama.block_count", 1),
        ("llama.context_length", 128),
        ("llama.embedding_length", 64),
        ("llama.feed_forward_length", 128),
        ("llama.attention.head_count", 4),
        ("tokenizer.ggml.eos_token_id", 1_u32),
    ] {
        add(key, 4, number.to_le_bytes().to_vec());
    }
    add("llama.attention.layer_norm_rms_epsilon", 6, 1e-5_f32.to_le_bytes().to_vec());
    let (mut table, mut data, mut tensors) = (Vec::new(), 0_u64, 0_u64);
    for (name, sizes) in [
        ("token_embd.weight", &[64, 2][..]),
        ("output_norm.weight", &[64]),
        ("blk.0.attn_norm.weight", &[64]),
        ("blk.0.ffn_norm.weight", &[64]),
        ("blk.0.attn_q.weight", &[64, 64]),
        ("blk.0.attn_k.weight", &[64, 64]),
        ("blk.0.attn_v.weight", &[64, 64]),
        ("blk.0.attn_output.weight", &[64, 64]),
        ("blk.0.ffn_gate.weight", &[64, 128]),
        ("blk.0.ffn_up.weight", &[64, 128]),
        ("blk.0.ffn_down.weight", &[128, 64_u64]),
    ] {
        let elements: u64 = sizes.iter().product();
        let (kind, bytes) = if sizes.len() == 1 { (0_u32, elements * 4) } else { (8, elements / 32 * 34) };
        table.extend([text(name), (sizes.len() as u32).to_le_bytes().to_vec()].concat());
        sizes.iter().for_each(|size| table.extend(size.to_le_bytes()));
        table.extend(kind.to_le_bytes());
        table.extend(data.to_le_bytes());
        data = (data + bytes).next_multiple_of(32);
        tensors += 1;
    }
    let mut file = [b"GGUF".to_vec(), 3_u32.to_le_bytes().to_vec()].concat();
    file.extend([tensors.to_le_bytes(), keys.to_le_bytes()].concat());
    file.extend(metadata);
    file.extend(table);
    file.resize(file.len().next_multiple_of(32) + data as usize, 0);
    file
}

async fn read(dir: &Path, uri: &str) -> Result<(SourceListing, ModelShape), StoreError> {
    let context = Context::new("http://127.0.0.1:1", vec![dir.canonicalize().unwrap()])?;
    let spec = SourceSpec { uri: uri.to_owned(), ..SourceSpec::default() };
    HeaderTurns::default().read((file::SCHEME.list)(&context, &spec).await?).await
}

#[tokio::test]
async fn model_in_gguf_is_reported_as_it_will_be_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("x.Q8_0.gguf"), llama("llama", "smollm")).unwrap();
    std::fs::write(dir.path().join("mmproj-x.gguf"), "an image's projector").unwrap();
    for name in ["", "/x.Q8_0.gguf"] {
        let uri = format!("file://{}{name}", dir.path().display());
        let (source, shape) = read(dir.path(), &uri).await.unwrap();
        let names: Vec<&str> = source.files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["x.Q8_0.gguf"], "{uri}");
        assert_eq!((&shape.unsupported, &shape.chat_unsupported), (&None, &None));
        assert_eq!(
            (shape.architecture.as_str(), shape.layers, shape.quantization_group_size),
            ("llama", 1, 32)
        );
        // Eight bits and two scales of 16 for each group of 32.
        assert_eq!(shape.embedding_bytes, 2 * 64 + 2 * 2 * 4);
        assert_eq!(shape.notes.len(), 1);
        assert!(
            shape.notes[0].contains("speed and memory differ from an MLX repository's"),
            "{:?}",
            shape.notes
        );
    }
}

#[tokio::test]
async fn faults_of_a_model_in_gguf_are_said_before_it_is_copied() {
    for (files, said) in [
        (vec![("x.gguf", llama("mamba", "smollm"))], "\"mamba\" is not supported as GGUF"),
        (vec![("x.gguf", llama("llama", "klingon"))], "tokenizer.ggml.pre: \"klingon\" is not supported"),
        (vec![("x.gguf", b"GGUF but no more".to_vec())], "x.gguf is no usable GGUF file: its version is"),
        (
            vec![("a.gguf", llama("llama", "smollm")), ("b.gguf", llama("llama", "smollm"))],
            "holds 2 models in GGUF, such as a.gguf, b.gguf",
        ),
        (vec![("x-00001-of-00002.gguf", llama("llama", "smollm"))], "x-00002-of-00002.gguf is missing"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in &files {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        let found = read(dir.path(), &format!("file://{}", dir.path().display())).await;
        let why = match found {
            Ok((_, shape)) => shape.unsupported.unwrap_or_default(),
            Err(error) => russet_telemetry::errors::chain(&error),
        };
        assert!(why.contains(said), "{said}: {why}");
    }
}
