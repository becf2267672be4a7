//! Vocabularies of real models, which llama.cpp carries with texts and their tokens: the tokenizers that are made of them
//! give these. `cargo xtask test` fetches them and names their folder in `RUSSET_VOCABULARIES`.

use std::path::Path;

use russet_model::gguf::{Gguf, header::HeaderRead};
use tokenizers::Tokenizer;

use russet_tests::provided;

use super::share;
use russet_chat::grammar::TokenText;
use russet_engine::tokenizer::ChatTokenizer;

/// Vocabularies of the architectures that are read.
const READ: [&str; 6] = ["gemma-4", "llama-bpe", "llama-spm", "phi-3", "qwen2", "qwen35"];

/// The tokenizer of a file, or why there is none.
fn tokenizer(path: &Path) -> Result<Tokenizer, String> {
    let bytes = std::fs::read(path).unwrap();
    let HeaderRead::Whole(header) = HeaderRead::new("x.gguf", &bytes, bytes.len() as u64).unwrap() else {
        panic!("{} is cut", path.display())
    };
    let gguf = Gguf::new(vec![("x.gguf".to_owned(), header)]).map_err(|error| error.to_string())?;
    let tokenizer = gguf.tokenizer().map_err(|error| error.to_string())?;
    Ok(Tokenizer::from_bytes(tokenizer).unwrap())
}

#[test]
fn vocabularies_give_the_tokens_that_llama_cpp_recorded() {
    let Some(folder) = provided::path("RUSSET_VOCABULARIES") else { return };
    let mut texts = 0;
    for name in READ {
        let path = folder.join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = tokenizer(&path).unwrap();
        let beside = |end: &str| std::fs::read_to_string(format!("{}.{end}", path.display())).unwrap();
        let (inputs, outputs) = (beside("inp"), beside("out"));
        let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
        let outputs: Vec<&str> = outputs.lines().collect();
        // What follows the last one is nothing.
        assert!(outputs.len() > 40 && inputs.len().abs_diff(outputs.len()) <= 1, "{name}");
        for (text, expected) in inputs.iter().zip(&outputs) {
            let expected: Vec<u32> =
                expected.split_whitespace().map(|token| token.parse().unwrap()).collect();
            let found = tokenizer.encode(*text, false).unwrap();
            assert_eq!(found.get_ids(), expected, "{name}: {text:?}");
            texts += 1;
        }
    }
    println!("{texts} texts of {} vocabularies", READ.len());
    // Of architectures that are not read, none is taken for one that is.
    for name in ["command-r", "deepseek-llm", "falcon", "gpt-2", "mpt", "bert-bge"] {
        let refused = tokenizer(&folder.join(format!("ggml-vocab-{name}.gguf"))).unwrap_err();
        assert!(refused.contains("is not supported"), "{name}: {refused}");
    }
}

#[test]
fn bytes_of_tokens_are_what_they_are_decoded_to() {
    let Some(folder) = provided::path("RUSSET_VOCABULARIES") else { return };
    for name in share::of_this_run(READ.to_vec(), 3) {
        let tokenizer = tokenizer(&folder.join(format!("ggml-vocab-{name}.gguf"))).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for (file, text) in [
            ("tokenizer.json", tokenizer.to_string(false).unwrap()),
            ("tokenizer_config.json", "{}".to_owned()),
            ("config.json", r#"{"eos_token_id": 0}"#.to_owned()),
            ("chat_template.jinja", "{{ messages[0].content }}".to_owned()),
        ] {
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        let texts = ChatTokenizer::load(dir.path()).unwrap().token_texts();
        let bytes = |id: u32| match &texts[id as usize] {
            TokenText::Bytes(bytes) => bytes.as_slice(),
            TokenText::Special(_) | TokenText::None => &[],
        };
        let (mut state, mut spelled) = (1_u32, 0);
        for _ in 0..2000 {
            let ids: Vec<u32> = (0..6)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 8) % texts.len() as u32
                })
                .collect();
            let whole: Vec<u8> = ids.iter().flat_map(|id| bytes(*id)).copied().collect();
            let (whole, decoded) = (String::from_utf8_lossy(&whole), tokenizer.decode(&ids, true).unwrap());
            // SentencePiece drops the space before the first word.
            assert!(
                whole == decoded || whole.strip_prefix(' ') == Some(&decoded) || whole.contains('\u{FFFD}'),
                "{name}: {ids:?} are {whole:?}, and decoded {decoded:?}"
            );
            spelled += usize::from(!whole.is_empty());
        }
        let special = texts.iter().filter(|text| matches!(text, TokenText::Special(_))).count();
        println!("{name}: {} tokens, {special} of them special, {spelled} texts", texts.len());
        assert!(spelled > 1900, "{name}");
    }
}
