//! Headers that are right, damaged and hostile.

use super::*;

fn read(header: &str, data: u64) -> Result<Headers, FileError> {
    let mut headers = Headers::default();
    headers.add("x.safetensors", header.as_bytes(), 8 + header.len() as u64 + data)?;
    Ok(headers)
}

fn one(offsets: &str) -> String {
    format!(
        r#"{{"__metadata__":{{"shape":"x"}},"t":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}"#
    )
}

#[test]
fn tensors_have_their_place_in_the_file() {
    let text = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12],"more":[{}]}}  "#;
    let headers = read(text, 12).unwrap();
    let entry = Entry { file: 0, dtype: Dtype::F16, shape: vec![2, 3], begin: 0, end: 12 };
    assert_eq!(headers.get("a"), Some(&entry));
    assert_eq!((entry.bytes(), entry.elements()), (12, 6));
    assert_eq!(headers.files(), [File { name: "x.safetensors".into(), data_start: 8 + text.len() as u64 }]);
}

#[test]
fn damaged_headers_are_refused_with_file_and_remedy() {
    assert_eq!(read(&one("[0,8]"), 8).unwrap().iter().count(), 1);
    for (header, data, part) in [
        (one("[0,8]"), 4, "outside the 4 bytes"),
        (one("[0,8]"), 9, "accounts for"),
        (one("[8,0]"), 8, "outside"),
        (one("[0,4]"), 8, "does not take"),
        (one("[0]"), 8, "pair"),
        (one("[-1,8]"), 8, "pair"),
        (one("{}"), 8, "pair"),
        (r#"{"t":{"shape":[2],"data_offsets":[0,8]}}"#.to_owned(), 8, "dtype is absent"),
        (r#"{"t":{"dtype":7,"shape":[2],"data_offsets":[0,8]}}"#.to_owned(), 8, "dtype is no text"),
        (r#"{"t":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]}}"#.to_owned(), 8, "no list of sizes"),
        (r#"{"t":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,8]}}"#.to_owned(), 8, "does not take"),
        (r#"{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#.to_owned(), 8, "overlap"),
        (r#"{"t":[]}"#.to_owned(), 8, "tensor t: invalid type: sequence"),
        (r#"{"t":["F32",[2],[0,8]]}"#.to_owned(), 8, "tensor t: invalid type: sequence"),
        ("[]".to_owned(), 8, "JSON"),
        ("{} x".to_owned(), 0, "JSON"),
        ("{nonsense".to_owned(), 8, "JSON"),
        ("".to_owned(), 8, "JSON"),
    ] {
        let error = read(&header, data).unwrap_err().to_string();
        assert!(
            error.contains(part) && error.contains("x.safetensors") && error.contains("again"),
            "{header}: {error}"
        );
    }
}

#[test]
fn length_is_checked_against_file_and_limit() {
    let length = |bytes: &[u8], size| Headers::default().next_length("x", bytes, size);
    assert_eq!(length(&16_u64.to_le_bytes(), 24), Ok(16));
    assert!(matches!(
        length(&17_u64.to_le_bytes(), 24),
        Err(FileError::BeyondFile { length: 17, size: 24, .. })
    ));
    assert!(matches!(length(&u64::MAX.to_le_bytes(), 24), Err(FileError::TooLong { .. })));
    assert!(matches!(
        length(&(MAX_HEADER_BYTES + 1).to_le_bytes(), u64::MAX),
        Err(FileError::TooLong { .. })
    ));
    assert!(matches!(length(&[1, 2], 2), Err(FileError::BeyondFile { length: 8, size: 2, .. })));
    // A header may be as long as the limit, and those of a model together as long as theirs.
    let mut headers = Headers::default();
    for (so_far, length, fits) in [
        (0, MAX_HEADER_BYTES, true),
        (MAX_MODEL_HEADER_BYTES - 8, 8, true),
        (MAX_MODEL_HEADER_BYTES - 8, 9, false),
    ] {
        headers.bytes = so_far;
        let found = headers.next_length("x", &length.to_le_bytes(), u64::MAX);
        assert_eq!(found.is_ok(), fits, "{so_far} + {length}: {found:?}");
        assert!(fits || matches!(found, Err(FileError::HeadersTooLong { .. })));
    }
}

#[test]
fn bytes_of_all_headers_are_counted() {
    let mut headers = Headers::default();
    for (file, tensor) in [("a", "t"), ("b", "u")] {
        let header = one("[0,8]").replace("\"t\"", &format!("\"{tensor}\""));
        headers.add(file, header.as_bytes(), 16 + header.len() as u64).unwrap();
    }
    assert_eq!(headers.bytes, 2 * one("[0,8]").len() as u64);
}

#[test]
fn pointer_of_git_lfs_is_called_one() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
    let error = Headers::default().next_length("model.safetensors", &pointer[..8], pointer.len() as u64);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("model.safetensors is a pointer of git-lfs") && error.contains("git lfs pull"));
    assert!(
        !lfs::is_pointer(b"versions of this file")
            && !lfs::is_pointer(b"version")
            && lfs::is_pointer(pointer)
    );
}

#[test]
fn gap_between_tensors_is_passed_over() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[68,72]}}"#;
    let headers = read(header, 72).unwrap();
    assert_eq!((headers.get("a").unwrap().end, headers.get("b").unwrap().begin), (4, 68));
}

#[test]
fn unknown_dtype_waits_until_its_tensor_is_wanted() {
    let header = r#"{"t":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#;
    let headers = read(header, 2).unwrap();
    let dtype = &headers.get("t").unwrap().dtype;
    assert_eq!(
        (dtype, dtype.bytes(), dtype.to_string()),
        (&Dtype::Unknown("F4".into()), None, "F4".to_owned())
    );
}

#[test]
fn tensor_in_two_files_is_refused() {
    let header = one("[0,8]");
    let mut headers = Headers::default();
    headers.add("a", header.as_bytes(), 16 + header.len() as u64).unwrap();
    let error = headers.add("b", header.as_bytes(), 16 + header.len() as u64).unwrap_err().to_string();
    assert!(error.contains("tensor t is in a and again in b"), "{error}");
    let twice = r#"{"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#;
    assert!(read(twice, 0).unwrap_err().to_string().contains("again in x.safetensors"));
}

#[test]
fn too_many_tensors_are_refused_and_not_kept() {
    let (mut tensors, mut spans, mut failure) = (BTreeMap::new(), Vec::new(), None);
    let reader = HeaderReader {
        file: "x",
        files: &[],
        data: 0,
        limit: 2,
        tensors: &mut tensors,
        spans: &mut spans,
        failure: &mut failure,
    };
    // Tensors of no bytes count like others.
    let entry = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let header = format!(r#"{{"a":{entry},"b":{entry},"c":{entry},"d":{entry}}}"#);
    reader.deserialize(&mut serde_json::Deserializer::from_str(&header)).unwrap_err();
    assert_eq!((failure, tensors.len()), (Some(FileError::TooMany { file: "x".to_owned(), limit: 2 }), 2));
}

#[test]
fn deep_nesting_is_an_error_and_no_overflow() {
    for header in [
        "[".repeat(100_000),
        format!(r#"{{"__metadata__":{}"#, "[".repeat(100_000)),
        format!(r#"{{"t":{{"shape":{}"#, "[".repeat(100_000)),
        format!(r#"{{"t":{}"#, r#"{"a":"#.repeat(100_000)),
    ] {
        assert!(matches!(read(&header, 0), Err(FileError::BadJson { .. })));
    }
}
