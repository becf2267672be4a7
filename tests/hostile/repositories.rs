//! Repositories of a hub whose configuration or headers mean endless work or memory.

use std::path::{Path, PathBuf};

use anyhow::Result;
use russet_tests::cluster::repository;
use serde_json::{Value, json};

pub const LONG_CONFIG: &str = "hostile/long-config";
pub const LONG_HEADER: &str = "hostile/long-header";
pub const MANY_HEADERS: &str = "hostile/many-headers";
pub const MANY_HEADS: &str = "hostile/many-heads";
pub const MANY_LAYERS: &str = "hostile/many-layers";

/// Writes all of them below `folder`, each with its name.
pub fn write(folder: &Path) -> Result<Vec<(&'static str, PathBuf)>> {
    let mut written = Vec::new();
    let smoke: Value =
        serde_json::from_slice(&std::fs::read(repository().join("engine/smoke/model/config.json"))?)?;
    let changed = |fields: Value| {
        let mut config = smoke.clone();
        if let (Some(config), Some(fields)) = (config.as_object_mut(), fields.as_object()) {
            config.extend(fields.clone());
        }
        config.to_string().into_bytes()
    };
    let plain = smoke.to_string().into_bytes();
    for (name, config, headers) in [
        (
            LONG_CONFIG,
            [b"{\"x\":[0".to_vec(), b",0".repeat(50_000_000), b"]}".to_vec()].concat(),
            vec![tensors(1)],
        ),
        (
            LONG_HEADER,
            plain.clone(),
            vec![[b"{\"x\":[0".to_vec(), b",0".repeat(50_000_000), b"]}".to_vec()].concat()],
        ),
        (MANY_HEADERS, plain, vec![tensors(150_000); 6]),
        (
            MANY_HEADS,
            changed(json!({"num_key_value_heads": 1 << 29, "num_attention_heads": 1 << 29})),
            vec![tensors(1)],
        ),
        (MANY_LAYERS, changed(json!({"num_hidden_layers": 10_000})), vec![tensors(10_000)]),
    ] {
        let place = folder.join(name.replace('/', "-"));
        std::fs::create_dir(&place)?;
        std::fs::write(place.join("config.json"), config)?;
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(repository().join("engine/smoke/model").join(file), place.join(file))?;
        }
        let count = headers.len();
        for (number, header) in headers.into_iter().enumerate() {
            let file = match count {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            let bytes = [(header.len() as u64).to_le_bytes().to_vec(), header, vec![0; 2]].concat();
            std::fs::write(place.join(file), bytes)?;
        }
        written.push((name, place));
    }
    Ok(written)
}

/// A header of so many tensors, of which only the first has bytes.
fn tensors(count: usize) -> Vec<u8> {
    let mut header = String::from("{");
    for number in 0..count {
        let (comma, end) = if number == 0 { ("", 2) } else { (",", 2) };
        let (shape, begin) = if number == 0 { ("[1]", 0) } else { ("[0]", 2) };
        header.push_str(&format!(
            r#"{comma}"model.layers.{number}.input_layernorm.weight":{{"dtype":"BF16","shape":{shape},"data_offsets":[{begin},{end}]}}"#
        ));
    }
    header.push('}');
    header.into_bytes()
}
