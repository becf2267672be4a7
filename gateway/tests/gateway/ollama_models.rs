//! What Ollama's clients read of models, and do about them.

use std::collections::BTreeMap;

use russet_gateway::routes::{DeploymentState, ModelDetails, ModelHeaders};
use serde_json::{Value, json};

use crate::harness::{GatewayLab, hello, limits};
use crate::ollama::sent;

/// What an agent has read of the Model of every deployment in these tests.
fn details() -> ModelDetails {
    let headers = ModelHeaders {
        architecture: "llama".into(),
        parameters: 1_235_814_400,
        bytes: 695_283_921,
        layers: 16,
        hidden_size: 2048,
        ..ModelHeaders::default()
    };
    ModelDetails {
        digest: "ab".repeat(32),
        format: "safetensors",
        quantization: "4bit".into(),
        headers: Some(headers),
        ..ModelDetails::default()
    }
}

/// Tells the gateway of the Model `small`.
pub fn publish_details(lab: &GatewayLab) {
    lab.change(|table| {
        table.models = BTreeMap::from([(("default".into(), "small".into()), details())]);
        for deployment in &mut table.deployments {
            deployment.memory_bytes = 900_000_000;
        }
    });
}

async fn get(lab: &GatewayLab, path: &str) -> Value {
    lab.client.get(lab.url(path)).send().await.unwrap().json().await.unwrap()
}

#[tokio::test]
async fn models_are_listed_shown_and_loaded() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    let working = DeploymentState::Working("copying 3 of 9 GiB".into());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine]), ("late", working, &[])]);
    let tags = get(&lab, "/api/tags").await;
    let names: Vec<&str> =
        tags["models"].as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["m", "late"]);
    let first = &tags["models"][0];
    assert_eq!((&first["model"], &first["modified_at"]), (&json!("m"), &json!("2023-11-14T22:13:20Z")));
    assert!(first["size"] == 0 && first["digest"].as_str().unwrap().len() == 64, "{first}");
    assert_eq!((&first["details"]["family"], &first["details"]["families"]), (&json!(""), &json!([])));
    let ps = get(&lab, "/api/ps").await;
    assert_eq!(ps["models"].as_array().unwrap().len(), 1);
    let loaded = &ps["models"][0];
    assert_eq!((&loaded["name"], &loaded["context_length"]), (&json!("m"), &json!(8192)));
    assert!(loaded["size_vram"].is_u64());
    loaded["expires_at"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    let (status, shown) = sent(&lab, "/api/show", json!({"model": "late:latest"})).await;
    let architecture = shown["model_info"]["general.architecture"].as_str().unwrap();
    assert_eq!((status, &shown["model_info"][format!("{architecture}.context_length")]), (200, &json!(8192)));
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
    let version = get(&lab, "/api/version").await["version"].as_str().unwrap().to_owned();
    assert_eq!(version.split('.').filter(|part| part.parse::<u32>().is_ok()).count(), 3, "{version}");
    for path in ["/", "/ollama", "/api/version", "/api/tags"] {
        let head = lab.client.head(lab.url(path)).send().await.unwrap();
        assert_eq!(head.status(), 200, "{path}");
    }
    let root = lab.client.get(lab.url("/")).send().await.unwrap().text().await.unwrap();
    assert_eq!(root, "Russet is running");
}

#[tokio::test]
async fn details_of_a_model_are_those_of_its_headers() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine]), ("n", DeploymentState::Ready, &[&engine])]);
    publish_details(&lab);
    lab.change(|table| table.deployments[1].load_quantization = "8bit");
    let details = |quantization: &str| {
        json!({
            "parent_model": "", "format": "safetensors", "family": "llama", "families": ["llama"],
            "parameter_size": "1.2B", "quantization_level": quantization,
        })
    };
    for base in ["/api", "/api/api", "/v1/api", "/ollama/api", "/ollama/api/api"] {
        let tags = get(&lab, &format!("{base}/tags")).await;
        let [first, second] = tags["models"].as_array().unwrap().as_slice() else { panic!("{tags}") };
        assert_eq!((&first["size"], &first["details"]), (&json!(695_283_921), &details("4bit")), "{base}");
        // They run the same files, one of them packed while it loads.
        assert_eq!((&first["digest"], &second["digest"]), (&json!("ab".repeat(32)), &first["digest"]));
        assert_eq!(second["details"], details("8bit"));
        let ps = get(&lab, &format!("{base}/ps")).await;
        let loaded = &ps["models"][0];
        assert_eq!((&loaded["size"], &loaded["size_vram"]), (&json!(900_000_000), &json!(900_000_000)));
        let (_, shown) = sent(&lab, &format!("{base}/show"), json!({"model": "m"})).await;
        assert_eq!(shown["model_info"]["llama.context_length"], 8192, "{base}");
        assert_eq!(
            (&shown["model_info"]["llama.block_count"], &shown["details"]),
            (&json!(16), &details("4bit"))
        );
    }
}

#[tokio::test]
async fn digest_of_an_adapter_is_another_one() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    publish_details(&lab);
    let digest = async |name: &str| {
        let tags = get(&lab, "/api/tags").await;
        let models = tags["models"].as_array().unwrap();
        models.iter().find(|model| model["name"] == name).unwrap()["digest"].as_str().unwrap().to_owned()
    };
    lab.change(|table| {
        table.deployments[0].adapters.insert("clerk".into(), "clerk-lora".into());
    });
    let unknown = digest("m:clerk").await;
    assert_ne!(unknown, digest("m").await);
    lab.change(|table| {
        let files = ModelDetails { digest: "cd".repeat(32), ..ModelDetails::default() };
        table.models.insert(("default".into(), "clerk-lora".into()), files);
    });
    let known = digest("m:clerk").await;
    assert!(known.len() == 64 && known != unknown && known != digest("m").await);
}
