//! What it costs to read a stranger's files: the peak of memory for each of their bytes, measured in a process of its
//! own, since other tests run beside this one.

use std::process::{Command, Stdio};

use crate::{
    config::{Document, MAX_CONFIG_BYTES},
    gguf::{Gguf, header::HeaderRead},
    index, packings,
    safetensors::Headers,
    tokenizer_files::{TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, TokenizerFiles},
};

/// Which case the process measures.
const CASE: &str = "RUSSET_PEAK_CASE";
/// A quarter of the longest header: what is measured grows with it.
const HEADER_BYTES: usize = 4 << 20;
/// A page.
const LITTLE: usize = 4096;

/// A file of up to `most` bytes: `parts` between `open` and `close`.
fn file(open: &str, close: &str, most: usize, part: impl Fn(usize) -> String) -> Vec<u8> {
    let mut text = String::with_capacity(most);
    text.push_str(open);
    for at in 0.. {
        let part = part(at);
        if text.len() + 1 + part.len() + close.len() > most {
            break;
        }
        if at > 0 {
            text.push(',');
        }
        text.push_str(&part);
    }
    text.push_str(close);
    text.into_bytes()
}

/// A GGUF file of up to `most` bytes: so many keys and tensors as `part` gives bytes of.
fn gguf(keys: bool, most: usize, part: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
    let (mut count, mut parts) = (0, Vec::with_capacity(most));
    while parts.len() + 24 + part(count).len() < most && (!keys || count < 4096) {
        parts.extend(part(count));
        count += 1;
    }
    let (tensors, keys) = if keys { (0, count as u64) } else { (count as u64, 0) };
    [b"GGUF", &3_u32.to_le_bytes()[..], &tensors.to_le_bytes(), &keys.to_le_bytes(), &parts].concat()
}

/// Reads a GGUF file, and makes what can be made of it.
fn read_gguf(bytes: &[u8]) {
    let read = HeaderRead::new("x", bytes, bytes.len() as u64 + (1 << 40));
    let Ok(HeaderRead::Whole(header)) = read else { return };
    if let Ok(gguf) = Gguf::new(vec![("x".to_owned(), header)]) {
        drop((gguf.configuration(None), gguf.weights(gguf.value_type(), None)));
        drop((gguf.tokenizer(), gguf.tokenizer_config()));
    }
}

/// Reads a header of tensors in fp8 with their scales, which have five bytes each, and what they are converted to.
fn read_packed(bytes: &[u8]) {
    let data = 5 * bytes.windows(3).filter(|text| text == b"F32").count() as u64;
    let config = br#"{"model_type":"llama","quantization_config":{"quant_method":"fp8"}}"#;
    let mut headers = Headers::default();
    headers.add("x", bytes, 8 + bytes.len() as u64 + data).unwrap();
    drop(packings::convert(&Document::parse(config).unwrap(), &headers).unwrap().unwrap());
}

/// A text of GGUF.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A GGUF file with a vocabulary of so many tokens of as many bytes as fit.
fn vocabulary(model: &str, most: usize, token: impl Fn(usize) -> String) -> Vec<u8> {
    let key = |key: &str, kind: u32, value: Vec<u8>| [text(key), kind.to_le_bytes().to_vec(), value].concat();
    let list = |kind: u32, count: u64, values: Vec<u8>| {
        [kind.to_le_bytes().to_vec(), count.to_le_bytes().to_vec(), values].concat()
    };
    let (mut count, mut tokens) = (0, Vec::new());
    while tokens.len() < most && count < 1 << 20 {
        tokens.extend(text(&token(count)));
        count += 1;
    }
    let scores = (0..count).flat_map(|at| (at as f32).to_le_bytes()).collect();
    let keys = [
        key("general.architecture", 8, text("llama")),
        key("tokenizer.ggml.model", 8, text(model)),
        key("tokenizer.ggml.tokens", 9, list(8, count as u64, tokens.clone())),
        key("tokenizer.ggml.scores", 9, list(6, count as u64, scores)),
        key("tokenizer.ggml.merges", 9, list(8, 1, text("a b"))),
    ];
    [b"GGUF", &3_u32.to_le_bytes()[..], &[0; 8], &(keys.len() as u64).to_le_bytes(), &keys.concat()].concat()
}

/// The file of a case, a header or a configuration of up to so many bytes, and how it is read.
fn case(name: &str, header_bytes: usize, config_bytes: usize) -> (Vec<u8>, fn(&[u8])) {
    let header: fn(&[u8]) = |bytes| drop(Headers::default().add("x", bytes, 8 + bytes.len() as u64));
    let config: fn(&[u8]) = |bytes| drop(Document::parse(bytes));
    let entry =
        |at: usize, shape: &str| format!(r#""{at}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}"#);
    match name {
        "header: tensors without bytes" => (file("{", "}", header_bytes, |at| entry(at, "0")), header),
        "header: eight dimensions" => {
            (file("{", "}", header_bytes, |at| entry(at, "0,1,1,1,1,1,1,1")), header)
        }
        "header: packed tensors" => {
            let part = |at: usize| {
                let (begin, middle, end) = (5 * at, 5 * at + 1, 5 * at + 5);
                format!(
                    r#""{at}":{{"dtype":"F8_E4M3","shape":[1],"data_offsets":[{begin},{middle}]}},"{at}_scale_inv":{{"dtype":"F32","shape":[1],"data_offsets":[{middle},{end}]}}"#
                )
            };
            (file("{", "}", header_bytes, part), read_packed)
        }
        "header: metadata" => (file(r#"{"__metadata__":["#, "]}", header_bytes, |_| "0".to_owned()), header),
        "config: one list" => {
            (file(r#"{"model_type":"llama","x":["#, "]}", config_bytes, |_| "0".to_owned()), config)
        }
        "config: many lists" => {
            let list = vec!["0"; 500].join(",");
            (
                file(r#"{"model_type":"llama","#, "}", config_bytes, move |at| format!("\"{at}\":[{list}]")),
                config,
            )
        }
        "config: overrides" => (
            file(r#"{"model_type":"llama","quantization":{"#, "}}", config_bytes, |at| {
                format!(r#""{at}":{{"bits":4,"x":[0,0]}}"#)
            }),
            config,
        ),
        "index: files" => (
            file(r#"{"weight_map":{"#, "}}", header_bytes, |at| format!(r#""{at}":"model{at}.safetensors""#)),
            |bytes| drop(index::weight_files(Some(bytes), &[])),
        ),
        "tokenizer_config: added tokens" => (
            file(r#"{"added_tokens_decoder":{"#, "}}", header_bytes, |at| {
                format!(r#""{at}":{{"content":""}}"#)
            }),
            |bytes| {
                let files = TokenizerFiles {
                    names: vec![TOKENIZER.to_owned(), TEMPLATE.to_owned()],
                    config: b"{}".to_vec(),
                    judged: vec![(TOKENIZER_CONFIG.to_owned(), bytes.to_vec())],
                };
                drop((files.check_chat(), files.chat_templates()));
            },
        ),
        "gguf: keys" => (
            gguf(true, header_bytes, |at| {
                [text(&at.to_string()), 0_u32.to_le_bytes().to_vec(), vec![0]].concat()
            }),
            read_gguf,
        ),
        "gguf: tensors" => (
            gguf(false, header_bytes, |at| {
                let sizes = [1_u32.to_le_bytes().to_vec(), 1_u64.to_le_bytes().to_vec()].concat();
                [text(""), sizes, 0_u32.to_le_bytes().to_vec(), (32 * at as u64).to_le_bytes().to_vec()]
                    .concat()
            }),
            read_gguf,
        ),
        "gguf: tokens" => (vocabulary("gpt2", header_bytes, |_| String::new()), read_gguf),
        "gguf: tokens of one byte" => (vocabulary("gpt2", header_bytes, |_| "\0".to_owned()), read_gguf),
        "gguf: pieces" => (vocabulary("llama", header_bytes, |at| "a".repeat(at % 9)), read_gguf),
        "gguf: long pieces" => (vocabulary("llama", header_bytes, |at| "a".repeat(at % 129)), read_gguf),
        other => panic!("{other}"),
    }
}

/// Bytes of a line of this process' status, such as its peak.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn peak_of_memory_per_byte_of_a_hostile_file_is_bounded() {
    if let Ok(name) = std::env::var(CASE) {
        // Pages of the program itself are in memory once a little file has been read.
        let (little, read) = case(&name, LITTLE, LITTLE);
        read(&little);
        let (bytes, _) = case(&name, HEADER_BYTES, MAX_CONFIG_BYTES as usize);
        // From here on the peak counts anew.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = memory("VmRSS");
        read(&bytes);
        println!("peak {} {}", memory("VmHWM").saturating_sub(before), bytes.len());
        return;
    }
    for (name, most) in [
        ("header: tensors without bytes", 6.0),
        ("header: eight dimensions", 6.0),
        ("header: packed tensors", 8.0),
        ("header: metadata", 1.0),
        ("config: one list", 2.0),
        ("config: many lists", 40.0),
        ("config: overrides", 4.0),
        ("index: files", 2.0),
        ("tokenizer_config: added tokens", 2.0),
        ("gguf: keys", 20.0),
        ("gguf: tensors", 6.0),
        ("gguf: tokens", 8.0),
        ("gguf: tokens of one byte", 8.0),
        ("gguf: pieces", 20.0),
        ("gguf: long pieces", 8.0),
    ] {
        let out = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "peak_memory::peak_of_memory_per_byte_of_a_hostile_file_is_bounded",
                "--nocapture",
            ])
            .env(CASE, name)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let line = text.lines().find_map(|line| line.split_once("peak ")).map(|(_, rest)| rest);
        let numbers: Vec<f64> =
            line.expect(&text).split_whitespace().map(|number| number.parse().unwrap()).collect();
        let each = numbers[0] / numbers[1];
        println!("{name}: {each:.1} bytes of memory for each of {}", numbers[1]);
        assert!(each <= most, "{name}: {each:.1} bytes for each byte, more than {most}");
    }
}
