//! Fields that are there, absent, null, invalid and contradictory.

use serde_json::json;

use super::*;
use crate::testing::llama;

fn read(value: &Value) -> Result<Config, Error> {
    Config::read(&Document::parse(value.to_string().as_bytes())?)
}

#[test]
fn field_without_a_usable_number_is_named() {
    for (field, value) in [
        ("num_hidden_layers", json!(0)),
        ("num_hidden_layers", json!(4_000_000_000_u64)),
        ("num_hidden_layers", json!(1.5)),
        ("hidden_size", json!("wide")),
        ("hidden_size", json!([[[[]]]])),
        ("vocab_size", json!(null)),
        ("intermediate_size", json!(-1)),
        ("head_dim", json!(-1)),
        ("head_dim", json!(1 << 20)),
        ("num_key_value_heads", json!(1 << 29)),
        ("num_key_value_heads", json!(3)),
        ("num_key_value_heads", json!(0)),
        ("model_type", json!(7)),
        ("rms_norm_eps", json!("small")),
        ("attention_bias", json!("yes")),
        ("layer_types", json!({"0": "full"})),
        ("rope_scaling", json!([])),
    ] {
        let mut json = llama(2);
        json[field] = value;
        let error = read(&json).unwrap_err();
        assert!(matches!(error, Error::File(FileError::Field { .. })), "{error:?}");
        assert!(error.to_string().contains(field), "{error}");
    }
}

#[test]
fn null_is_absent_and_whole_fractions_are_whole() {
    let mut json = llama(2);
    for field in [
        "attention_bias",
        "mlp_bias",
        "rope_traditional",
        "rope_scaling",
        "head_dim",
        "tie_word_embeddings",
        "layer_types",
        "sliding_window",
        "rms_norm_eps",
        "num_key_value_heads",
    ] {
        json[field] = json!(null);
    }
    json["num_hidden_layers"] = json!(2.0);
    json["max_position_embeddings"] = json!(2048.0);
    let config = read(&json).unwrap();
    assert_eq!((config.num_hidden_layers, config.max_position_embeddings), (2, 2048));
    assert_eq!((config.attention_bias, config.mlp_bias, config.rope_traditional), (false, false, false));
    assert_eq!((config.rms_norm_eps, config.num_key_value_heads, config.head_dim), (1e-6, 4, None));
}

#[test]
fn context_length_has_one_default() {
    let mut json = llama(2);
    json.as_object_mut().unwrap().remove("max_position_embeddings");
    for model_type in families() {
        json["model_type"] = json!(model_type);
        assert_eq!(read(&json).unwrap().max_position_embeddings, DEFAULT_CONTEXT_LENGTH, "{model_type}");
    }
}

fn families() -> impl Iterator<Item = &'static str> {
    crate::families::model_types()
}

#[test]
fn tied_is_what_the_file_says_then_what_the_weights_have() {
    for (said, has_head, tied) in [
        (json!(true), true, true),
        (json!(true), false, true),
        (json!(false), true, false),
        (json!(false), false, false),
        (json!(null), true, false),
        (json!(null), false, true),
    ] {
        let mut json = llama(2);
        json["tie_word_embeddings"] = said.clone();
        assert_eq!(read(&json).unwrap().tied(has_head), tied, "{said}, {has_head}");
    }
}

#[test]
fn rotary_base_is_read_wherever_it_stands() {
    for (fields, base) in [
        (json!({}), None),
        (json!({"rope_theta": 1e6}), Some(1e6)),
        (json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}), Some(1e6)),
        (json!({"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}}), Some(1e6)),
        (json!({"rope_theta": 1000000, "rope_parameters": {"rope_theta": 1e6}}), Some(1e6)),
    ] {
        let mut json = llama(2);
        json.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        assert_eq!(read(&json).unwrap().rope_theta, base, "{fields}");
    }
}

#[test]
fn contradictions_of_the_rotary_embedding_are_refused() {
    for (fields, said) in [
        (json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}), "said twice"),
        (json!({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}), "said twice"),
        (
            json!({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}),
            "said twice",
        ),
    ] {
        let mut json = llama(2);
        json.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let error = read(&json).unwrap_err();
        assert!(
            matches!(error, Error::Unsupported(_)) && error.to_string().contains(said),
            "{fields}: {error}"
        );
    }
}

#[test]
fn files_that_are_no_configuration_say_so() {
    assert!(matches!(Document::parse(b"[1]"), Err(FileError::BadJson { .. })));
    assert!(matches!(
        Document::parse(&vec![b' '; MAX_CONFIG_BYTES as usize + 1]),
        Err(FileError::TooLarge { .. })
    ));
    let deep = format!(r#"{{"model_type":"llama","x":{}"#, "[".repeat(100_000));
    assert!(matches!(Document::parse(deep.as_bytes()), Err(FileError::BadJson { .. })));
}
