//! A real vocabulary for a model of random weights: those that llama.cpp carries as GGUF.

use std::path::Path;

use russet_model::gguf::{Gguf, header::HeaderRead};
use serde_json::json;

/// Writes the tokenizer of a GGUF file into a model's folder, with a template without special tokens.
pub fn write(file: &Path, end: &str, model: &Path) {
    let bytes = std::fs::read(file).unwrap();
    let HeaderRead::Whole(header) = HeaderRead::new("x.gguf", &bytes, bytes.len() as u64).unwrap() else {
        panic!("{} is cut", file.display())
    };
    let tokenizer = Gguf::new(vec![("x.gguf".to_owned(), header)]).unwrap().tokenizer().unwrap();
    let parsed: tokenizers::Tokenizer = tokenizers::Tokenizer::from_bytes(&tokenizer).unwrap();
    let end_id = parsed.token_to_id(end).unwrap();
    std::fs::write(model.join("tokenizer.json"), tokenizer).unwrap();
    std::fs::write(model.join("tokenizer_config.json"), json!({"eos_token": end}).to_string()).unwrap();
    std::fs::write(
        model.join("chat_template.jinja"),
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    )
    .unwrap();
    let path = model.join("config.json");
    if let Ok(text) = std::fs::read(&path) {
        let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
        config["eos_token_id"] = end_id.into();
        std::fs::write(path, config.to_string()).unwrap();
    }
}
