//! Headers that exporters write, and those that none does: each is an error that names the fault.

use super::*;
use crate::gguf::{metadata::MetaValue, tests::GgufFile};

fn read(bytes: &[u8], size: u64) -> Result<HeaderRead<'_>, FileError> {
    HeaderRead::new("x.gguf", bytes, size)
}

fn rejection(bytes: &[u8]) -> String {
    match read(bytes, bytes.len() as u64) {
        Err(error) => error.to_string(),
        Ok(found) => panic!("{found:?}"),
    }
}

#[test]
fn header_is_read_in_as_few_parts_as_it_needs() {
    let tokens: Vec<String> = (0..2000).map(|number| format!("token {number}")).collect();
    let file = GgufFile::new()
        .text("general.architecture", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .tensor("token_embd.weight", &[64, 4], 8, vec![0; 4 * 68])
        .bytes();
    let (mut length, mut reads) = (64_u64, 0);
    let header = loop {
        reads += 1;
        match read(&file[..length as usize], file.len() as u64).unwrap() {
            HeaderRead::Whole(header) => break header,
            HeaderRead::Needs(more) => {
                assert!(more > length && more <= file.len() as u64);
                length = more;
            }
        }
    };
    assert!(reads <= 11, "{reads}");
    assert_eq!(header.metadata.text("general.architecture"), Some("llama"));
    let list = header.metadata.list("tokenizer.ggml.tokens").unwrap();
    assert_eq!((list.count, list.texts().nth(1999)), (2000, Some(Some("token 1999"))));
    let [tensor] = &header.tensors[..] else { panic!("{:?}", header.tensors) };
    assert_eq!((tensor.shape.clone(), tensor.bytes), (vec![4, 64], 272));
    assert!(tensor.begin % 32 == 0 && tensor.begin + 272 == file.len() as u64);
    // Not one byte less is enough.
    assert!(matches!(read(&file[..60], file.len() as u64), Ok(HeaderRead::Needs(_))));
}

#[test]
fn values_of_every_type_are_read() {
    let file = GgufFile::new()
        .value("a", 0, &[200])
        .value("b", 1, &[200])
        .value("c", 3, &(-2_i16).to_le_bytes())
        .value("d", 6, &1.5_f32.to_le_bytes())
        .value("e", 7, &[1])
        .value("f", 10, &u64::MAX.to_le_bytes())
        .value("g", 11, &i64::MIN.to_le_bytes())
        .value("h", 12, &2.5_f64.to_le_bytes())
        .bytes();
    let HeaderRead::Whole(header) = read(&file, file.len() as u64).unwrap() else { panic!("it is whole") };
    for (key, value) in [
        ("a", MetaValue::Whole(200)),
        ("b", MetaValue::Whole(-56)),
        ("c", MetaValue::Whole(-2)),
        ("d", MetaValue::Float(1.5)),
        ("e", MetaValue::Flag(true)),
        ("f", MetaValue::Whole(u64::MAX.into())),
        ("g", MetaValue::Whole(i64::MIN.into())),
        ("h", MetaValue::Float(2.5)),
    ] {
        assert_eq!(header.metadata.get(key), Some(value), "{key}");
    }
}

#[test]
fn damaged_and_hostile_headers_are_named() {
    let one = |name: &str, sizes: &[u64], kind: u32, data: usize| {
        GgufFile::new().tensor(name, sizes, kind, vec![0; data]).bytes()
    };
    let huge = u64::MAX.to_le_bytes();
    let list = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let start = |version: u32, tensors: u64, keys: u64| {
        [b"GGUF", &version.to_le_bytes()[..], &tensors.to_le_bytes(), &keys.to_le_bytes()].concat()
    };
    for (bytes, said) in [
        (b"GGML0000".to_vec(), "does not begin with GGUF"),
        (b"GG".to_vec(), "its magic of 4 bytes at 0 ends beyond its 2 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n".to_vec(), "pointer of git-lfs"),
        (start(1, 0, 0), "its version is 1; versions 2 and 3 are read"),
        (start(0x0300_0000, 0, 0), "big-endian (version 3)"),
        (start(3, u64::MAX, 0), "more than the limit of 300000"),
        (start(3, 300_000, 0), "take at least 9600000 bytes, and 0 are left"),
        (start(3, 0, u64::MAX), "keys, more than the limit of 4096"),
        (start(3, 0, 4096), "ends beyond its 24 bytes"),
        // Wild lengths of keys, texts and lists.
        (
            GgufFile::new().raw_key(&huge).bytes(),
            "a key of the metadata at 24 has 18446744073709551615 bytes",
        ),
        (GgufFile::new().value("k", 8, &huge).bytes(), "the value of \"k\" at"),
        (GgufFile::new().value("k", 9, &list(8, u64::MAX)).bytes(), "has 18446744073709551615 values"),
        (
            GgufFile::new().value("k", 9, &list(8, 1 << 60)).bytes(),
            "of 9223372036854775808 bytes at 49 ends beyond its 49 bytes",
        ),
        (GgufFile::new().value("k", 9, &list(4, 1 << 20)).bytes(), "of 4194304 bytes at 49 ends beyond"),
        (GgufFile::new().value("k", 9, &list(77, 1)).bytes(), "is of type 77, which there is not"),
        (GgufFile::new().value("k", 13, &[0; 8]).bytes(), "has type 13, which there is not"),
        // Lists in lists, however deep.
        (
            GgufFile::new().value("k", 9, &[list(9, 1), list(9, 1), list(9, 1)].concat()).bytes(),
            "is a list of 1 lists",
        ),
        (GgufFile::new().text("k", "a").text("k", "b").bytes(), "has \"k\" twice"),
        (GgufFile::new().value("k", 8, &[&1_u64.to_le_bytes()[..], &[255]].concat()).bytes(), "is no UTF-8"),
        (GgufFile::new().whole("general.alignment", 24).bytes(), "no power of two"),
        (GgufFile::new().whole("general.alignment", 0).bytes(), "no power of two"),
        // Tensors.
        (one("t", &[], 0, 64), "has 0 dimensions"),
        (one("t", &[1; 5], 0, 4), "has 5 dimensions"),
        (one("t", &[32], 77, 34), "has type 77"),
        (one("t", &[48], 8, 68), "has rows of 48, which are no whole blocks of 32"),
        (one("t", &[0, 5], 0, 0), "impossible sizes, [0, 5]"),
        (one("t", &[1 << 40, 1 << 40], 0, 0), "impossible sizes"),
        (one("t", &[u64::MAX], 0, 0), "impossible sizes"),
        (one("t", &[1 << 62], 0, 0), "impossible sizes"),
        (one("t", &[1 << 59], 0, 0), "it is cut"),
        (one("t", &[64], 8, 67), "it is cut"),
        (one(&"n".repeat(200), &[1], 0, 4), "has 200 bytes, more than the limit of 128"),
        (GgufFile::new().tensor_at("t", &[1], 0, 3).bytes(), "begins at 3, no multiple of 32"),
        (GgufFile::new().tensor_at("t", &[1], 0, u64::MAX - 31).bytes(), "it is cut"),
        (
            GgufFile::new().tensor("a", &[16], 0, vec![0; 64]).tensor_at("b", &[1], 0, 32).bytes(),
            "\"a\" and \"b\" overlap",
        ),
    ] {
        let error = rejection(&bytes);
        assert!(error.contains(said) && error.len() < 600, "{said}: {error}");
    }
}

#[test]
fn header_beyond_the_limit_is_refused_before_it_is_read() {
    let text = (1_u64 << 40).to_le_bytes();
    let file = GgufFile::new().value("k", 8, &text).bytes();
    let error = read(&file, 1 << 50).unwrap_err().to_string();
    assert!(error.contains("more than the limit of 67108864"), "{error}");
    let list = [&8_u32.to_le_bytes()[..], &(1_u64 << 40).to_le_bytes()].concat();
    let file = GgufFile::new().value("k", 9, &list).bytes();
    let error = read(&file, 1 << 50).unwrap_err().to_string();
    assert!(error.contains("67108864, the limit of a header"), "{error}");
}

#[test]
fn every_cut_and_every_changed_byte_is_read_or_refused() {
    let file = GgufFile::llama().bytes();
    for end in 0..file.len() {
        drop(read(&file[..end], end as u64));
    }
    for at in 0..file.len().min(2000) {
        for change in [1, 0x80, 0xff] {
            let mut file = file.clone();
            file[at] ^= change;
            if let Ok(HeaderRead::Whole(header)) = read(&file, file.len() as u64)
                && let Ok(gguf) = crate::gguf::Gguf::new(vec![("x.gguf".to_owned(), header)])
            {
                drop(gguf.configuration(None));
                drop(gguf.weights(gguf.value_type(), None));
                drop((gguf.tokenizer(), gguf.tokenizer_config(), gguf.note()));
            }
        }
    }
}
