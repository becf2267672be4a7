//! What it costs to read a stranger's files: the peak of memory for each of their bytes, measured in a process of its
//! own, since other tests run beside this one.

use std::process::{Command, Stdio};

use crate::{
    config::{Document, MAX_CONFIG_BYTES},
    index,
    safetensors::Headers,
    tokenizer_files::{TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, TokenizerFiles},
};

/// Which case the process measures.
const CASE: &str = "RUSSET_PEAK_CASE";
/// A quarter of the longest header: what is measured grows with it.
const HEADER_BYTES: usize = 4 << 20;

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

/// The file of a case and how it is read.
fn case(name: &str) -> (Vec<u8>, fn(&[u8])) {
    let header: fn(&[u8]) = |bytes| drop(Headers::default().add("x", bytes, 8 + bytes.len() as u64));
    let config: fn(&[u8]) = |bytes| drop(Document::parse(bytes));
    let entry =
        |at: usize, shape: &str| format!(r#""{at}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}"#);
    let small = MAX_CONFIG_BYTES as usize;
    match name {
        "header: tensors without bytes" => (file("{", "}", HEADER_BYTES, |at| entry(at, "0")), header),
        "header: eight dimensions" => {
            (file("{", "}", HEADER_BYTES, |at| entry(at, "0,1,1,1,1,1,1,1")), header)
        }
        "header: metadata" => (file(r#"{"__metadata__":["#, "]}", HEADER_BYTES, |_| "0".to_owned()), header),
        "config: one list" => {
            (file(r#"{"model_type":"llama","x":["#, "]}", small, |_| "0".to_owned()), config)
        }
        "config: many lists" => {
            let list = vec!["0"; 500].join(",");
            (file(r#"{"model_type":"llama","#, "}", small, move |at| format!("\"{at}\":[{list}]")), config)
        }
        "config: overrides" => (
            file(r#"{"model_type":"llama","quantization":{"#, "}}", small, |at| {
                format!(r#""{at}":{{"bits":4,"x":[0,0]}}"#)
            }),
            config,
        ),
        "index: files" => (
            file(r#"{"weight_map":{"#, "}}", HEADER_BYTES, |at| format!(r#""{at}":"model{at}.safetensors""#)),
            |bytes| drop(index::weight_files(Some(bytes), &[])),
        ),
        "tokenizer_config: added tokens" => (
            file(r#"{"added_tokens_decoder":{"#, "}}", HEADER_BYTES, |at| {
                format!(r#""{at}":{{"content":""}}"#)
            }),
            |bytes| {
                let files = TokenizerFiles {
                    names: vec![TOKENIZER.to_owned(), TEMPLATE.to_owned()],
                    config: b"{}".to_vec(),
                    judged: vec![(TOKENIZER_CONFIG, bytes.to_vec())],
                };
                drop(files.check_chat());
            },
        ),
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
        let (bytes, read) = case(&name);
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
        ("header: metadata", 1.0),
        ("config: one list", 2.0),
        ("config: many lists", 20.0),
        ("config: overrides", 4.0),
        ("index: files", 2.0),
        ("tokenizer_config: added tokens", 2.0),
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
