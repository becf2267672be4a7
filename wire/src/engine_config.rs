//! The configuration of one engine process: all its options, declared once. The agent writes it to
//! a file for a new process and sends it to a running one that joins the next formation of its group. Not
//! here: what an engine does with it, and whether the fields together describe a group.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use thiserror::Error;

use crate::engine_options::{ADAPTERS, DRAFT_MODEL, ENGINE_OPTIONS, EngineOptions};

/// Release of this engine, for errors.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Maximum tensor parallel size.
const MAX_TENSOR_SIZE: u64 = 64;
/// Maximum concurrent sequences.
const MAX_SEQUENCES: u64 = 1024;

/// The configuration of one rank of a group that serves a model. Fields that are left out have their
/// defaults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
#[schemars(extend("required" = ["modelDir", "servedModelName", "tlsDir", "controlSocket"]))]
pub struct EngineConfig {
    /// Model folder: config.json, safetensors, tokenizer.json and a chat template.
    pub model_dir: PathBuf,
    /// Name clients use for the model.
    pub served_model_name: String,
    /// This process's rank; 0 samples and answers requests.
    pub rank: u32,
    /// Layers per pipeline stage, in rank order; without it, one stage holds all layers.
    pub layers_per_rank: Vec<u32>,
    /// Tensor parallel size: rank r is tensor rank r % N of stage r / N.
    #[schemars(range(min = 1, max = 64))]
    pub tensor_size: u32,
    /// Transport for tensor parallel collectives.
    pub backend: Backend,
    /// Epoch of the group: the number of this formation. A higher epoch replaces it.
    pub epoch: u64,
    /// Uid of the ShardGroup.
    pub group_uid: String,
    /// Uid of the Shard.
    pub shard_uid: String,
    /// gRPC address at which gateways and rank 0 reach this rank.
    pub listen: SocketAddr,
    /// Addresses of the pipeline ring, in rank order; omitted when there is one stage.
    pub ring_hosts: Vec<SocketAddr>,
    /// Addresses of the tensor parallel ring, in rank order; omitted when a stage has one rank.
    pub tensor_hosts: Vec<SocketAddr>,
    /// RDMA devices between the tensor ranks of this stage, for jaccl: rows are tensor ranks, columns their
    /// peers, and each cell is a list of device names.
    pub rdma_devices: Vec<Vec<Vec<String>>>,
    /// Transport of connections between ranks.
    pub transport: Transport,
    /// Cables to the nodes of other ranks. Tunnels run over them, over the first of a node if it works.
    pub cables: Vec<CableEnds>,
    /// gRPC addresses and nodes of the ranks.
    pub peers: Vec<PeerRank>,
    /// Folder with the node's identity: tls.crt, tls.key, ca.crt.
    pub tls_dir: PathBuf,
    /// Unix socket of the Control service, which the agent uses.
    pub control_socket: PathBuf,
    /// Address of /metrics, /healthz and /readyz.
    pub metrics_listen: SocketAddr,
    /// Maximum tokens of one sequence, prompt and output together.
    #[schemars(range(min = 1))]
    pub context_tokens: u32,
    /// Maximum sequences that run at the same time.
    #[schemars(range(min = 1, max = 1024))]
    pub max_sequences: u32,
    /// KV-cache capacity in tokens, summed over all sequences; without it, enough for every sequence at full
    /// context.
    #[schemars(range(min = 1))]
    pub kv_tokens: Option<u64>,
    /// Options of the deployment.
    pub options: EngineOptions,
    /// Prefix cache: a prefix shared by several prompts is prefilled once. It uses memory that running
    /// requests do not need.
    pub prefix_cache: bool,
    /// Folder of the prefix cache's disk tier, which survives restarts; safe to delete. Without it, the
    /// prefix cache is in memory only.
    pub prefix_dir: Option<PathBuf>,
    /// Maximum size of that folder in bytes.
    pub prefix_dir_bytes: u64,
    /// Folder of a draft model for speculative decoding: a smaller model with the same tokenizer. Only rank 0
    /// loads it.
    pub draft_dir: Option<PathBuf>,
    /// Adapters of the model, which requests choose by name. Every rank loads its part of each.
    pub adapters: Vec<AdapterDir>,
    /// Overlap scheduling: a decode step starts before the tokens of the previous step are known.
    pub overlap_scheduling: OverlapScheduling,
    /// Whether the GPU keeps its memory resident, up to the driver's recommendation; macOS only.
    pub wired_memory: bool,
    /// Element type of the weights in memory.
    pub dtype: Dtype,
    /// Log format.
    pub log: LogFormat,
    /// Seconds without a watching agent after which the engine exits.
    pub orphan_seconds: u64,
    /// Whether the engine answers a smoke prompt before it serves. Random weights need it off: they choose
    /// tokens that the tokenizer does not have.
    pub smoke_prompt: bool,
    /// Seconds that running requests get to finish when the engine is asked to stop.
    pub drain_seconds: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        let any_port = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        Self {
            model_dir: PathBuf::new(),
            served_model_name: String::new(),
            rank: 0,
            layers_per_rank: Vec::new(),
            tensor_size: 1,
            backend: Backend::default(),
            epoch: 0,
            group_uid: String::new(),
            shard_uid: String::new(),
            listen: any_port,
            ring_hosts: Vec::new(),
            tensor_hosts: Vec::new(),
            rdma_devices: Vec::new(),
            transport: Transport::default(),
            cables: Vec::new(),
            peers: Vec::new(),
            tls_dir: PathBuf::new(),
            control_socket: PathBuf::new(),
            metrics_listen: any_port,
            context_tokens: 4096,
            max_sequences: 4,
            kv_tokens: None,
            options: EngineOptions::default(),
            prefix_cache: true,
            prefix_dir: None,
            prefix_dir_bytes: 8 << 30,
            draft_dir: None,
            adapters: Vec::new(),
            overlap_scheduling: OverlapScheduling::default(),
            wired_memory: true,
            dtype: Dtype::default(),
            log: LogFormat::default(),
            orphan_seconds: 60,
            smoke_prompt: true,
            drain_seconds: 30,
        }
    }
}

/// An adapter, by the name that requests choose it by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AdapterDir {
    /// Its name.
    pub name: String,
    /// Its folder: adapter_config.json and safetensors.
    pub dir: PathBuf,
}

/// How ranks exchange activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Backend {
    /// One rank, nothing to exchange.
    #[default]
    None,
    /// MLX's TCP ring.
    Ring,
    /// MLX's RDMA backend over Thunderbolt 5, every rank cabled to every other rank.
    Jaccl,
    /// MLX's RDMA backend, every rank cabled to its two neighbours.
    JacclRing,
    /// A backend from a newer release; this release cannot start it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// How the ring's TCP connections travel between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Transport {
    /// Inside mutual TLS: MLX's own traffic has no authentication.
    #[default]
    Tunnel,
    /// As MLX sends it, over point-to-point Thunderbolt cables only.
    Direct,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A cable between this machine and another one, by the addresses at its ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CableEnds {
    /// The node it leads to.
    pub node: String,
    /// This end.
    pub own: IpAddr,
    /// The other end.
    pub peer: IpAddr,
}

/// A rank of the group, as the other ranks reach it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PeerRank {
    /// Its rank.
    pub rank: u32,
    /// Its gRPC address.
    pub address: SocketAddr,
    /// The node it runs on, which its certificate must name.
    pub node: String,
}

/// Overlap scheduling: whether a decode step starts before the tokens of the previous step are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OverlapScheduling {
    /// On where it pays: on a GPU, and on a CPU with a single rank. With several ranks on a CPU, starting a
    /// batch means computing it, which would delay the output of the previous batch.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Element type of the weights in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Dtype {
    /// The type stored in the files. On a CPU products with quantised weights are computed in 32 bits.
    #[default]
    Auto,
    /// 32-bit floats, faster than 16-bit ones on a CPU.
    F32,
}

/// Log format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LogFormat {
    /// JSON, for log collectors.
    Json,
    /// Text, for people.
    #[default]
    Text,
}

/// A configuration that this engine does not accept.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EngineConfigError {
    /// No JSON object, or one with a field twice.
    #[error(
        "the engine's configuration is no JSON object with each field once: {0}; `russet-engine --config-schema` describes it"
    )]
    Json(String),
    /// A field of another release, or a misspelt one.
    #[error(
        "{field} ({value}) is no field of the configuration of a russet-engine {VERSION}; correct its name, or use an engine of the release that wrote it"
    )]
    UnknownField {
        /// The field.
        field: String,
        /// Its value.
        value: String,
    },
    /// A value of another type.
    #[error("{field} is {value}: {reason}; correct it as `russet-engine --config-schema` describes")]
    Value {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// Why it is none.
        reason: String,
    },
    /// A value that only newer releases know.
    #[error(
        "{field} is {value}, which a russet-engine {VERSION} does not know; use a newer engine, or another value"
    )]
    NewerValue {
        /// The field.
        field: String,
        /// Its value.
        value: String,
    },
    /// A required text.
    #[error("{0} is missing or empty, and an engine needs it; give it a value")]
    Missing(&'static str),
    /// A number out of bounds.
    #[error("{field} is {value}, but has to be from {min} to {max}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The least.
        min: u64,
        /// The greatest.
        max: u64,
    },
}

impl EngineConfig {
    /// Parses and checks JSON. An error names the field, its value and the remedy.
    pub fn from_json(text: &str) -> Result<Self, EngineConfigError> {
        let wrong = |error: serde_json::Error| EngineConfigError::Json(error.to_string());
        let fields: Map<String, Value> = serde_json::from_str(text).map_err(wrong)?;
        let config: Self = serde_json::from_str(text)
            .map_err(|error| faulty_field(&fields).unwrap_or_else(|| wrong(error)))?;
        // The kinds ignore options of newer releases; an engine must not.
        let options = fields.get("options").and_then(Value::as_object);
        let known =
            |option: &str| ENGINE_OPTIONS.contains(&option) && ![ADAPTERS, DRAFT_MODEL].contains(&option);
        if let Some((option, value)) = options.into_iter().flatten().find(|(option, _)| !known(option)) {
            let (field, value) = (format!("options.{option}"), value.to_string());
            return Err(EngineConfigError::UnknownField { field, value });
        }
        config.check(&fields)?;
        Ok(config)
    }

    /// The JSON that [`Self::from_json`] reads. Fails if a path is not UTF-8.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// The JSON Schema of the configuration: every field, with its meaning and default.
    pub fn json_schema() -> Value {
        schemars::schema_for!(Self).to_value()
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> u32 {
        self.layers_per_rank.len().max(1) as u32
    }

    /// KV-cache capacity in tokens, summed over all sequences.
    pub fn kv_capacity(&self) -> u64 {
        let most = u64::from(self.context_tokens) * u64::from(self.max_sequences);
        self.kv_tokens.map_or(most, |given| given.min(most))
    }

    /// Refuses missing texts, numbers out of bounds, and values of newer releases by their text in `fields`.
    fn check(&self, fields: &Map<String, Value>) -> Result<(), EngineConfigError> {
        let required = [
            ("modelDir", self.model_dir.as_os_str().is_empty()),
            ("servedModelName", self.served_model_name.is_empty()),
            ("tlsDir", self.tls_dir.as_os_str().is_empty()),
            ("controlSocket", self.control_socket.as_os_str().is_empty()),
            ("peers[].node", self.peers.iter().any(|peer| peer.node.is_empty())),
            ("cables[].node", self.cables.iter().any(|cable| cable.node.is_empty())),
            ("adapters[].name", self.adapters.iter().any(|adapter| adapter.name.is_empty())),
        ];
        if let Some((field, _)) = required.into_iter().find(|(_, missing)| *missing) {
            return Err(EngineConfigError::Missing(field));
        }
        let numbers = [
            ("tensorSize", self.tensor_size.into(), MAX_TENSOR_SIZE),
            ("contextTokens", self.context_tokens.into(), u32::MAX.into()),
            ("maxSequences", self.max_sequences.into(), MAX_SEQUENCES),
            ("kvTokens", self.kv_tokens.unwrap_or(1), u64::MAX),
        ];
        if let Some((field, value, max)) =
            numbers.into_iter().find(|(_, value, max)| !(1..=*max).contains(value))
        {
            return Err(EngineConfigError::Range { field, value, min: 1, max });
        }
        let newer = if self.backend == Backend::Unknown {
            Some((String::from("backend"), fields.get("backend")))
        } else if self.transport == Transport::Unknown {
            Some((String::from("transport"), fields.get("transport")))
        } else {
            let options = fields.get("options");
            self.options
                .unknown()
                .map(|option| (format!("options.{option}"), options.and_then(|options| options.get(option))))
        };
        newer.map_or(Ok(()), |(field, value)| {
            let value = value.map_or_else(String::new, Value::to_string);
            Err(EngineConfigError::NewerValue { field, value })
        })
    }
}

/// The field that makes a configuration unreadable.
fn faulty_field(fields: &Map<String, Value>) -> Option<EngineConfigError> {
    let known = serde_json::to_value(EngineConfig::default()).unwrap_or_default();
    if let Some((field, value)) = fields.iter().find(|(field, _)| known.get(field).is_none()) {
        let (field, value) = (field.clone(), value.to_string());
        return Some(EngineConfigError::UnknownField { field, value });
    }
    let (field, value, reason) = first_faulty::<EngineConfig>(fields)?;
    let nested = value.as_object().filter(|_| field == "options").and_then(first_faulty::<EngineOptions>);
    let (field, value, reason) = match nested {
        Some((option, value, reason)) => (format!("{field}.{option}"), value, reason),
        None => (field.to_owned(), value, reason),
    };
    Some(EngineConfigError::Value { field, value: value.to_string(), reason })
}

/// The first field that is no `T` by itself, whose fields all have defaults; with its value and the reason.
fn first_faulty<T: DeserializeOwned>(fields: &Map<String, Value>) -> Option<(&str, &Value, String)> {
    fields.iter().find_map(|(field, value)| {
        let alone = Map::from_iter([(field.clone(), value.clone())]);
        let error = serde_json::from_value::<T>(alone.into()).err()?;
        Some((field.as_str(), value, error.to_string()))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::engine_options::{Fence, KvCacheType, RouterBroadcast, Speculation, WeightQuantization};

    /// The required fields.
    fn least() -> Value {
        json!({"modelDir": "/m", "servedModelName": "m", "tlsDir": "/t", "controlSocket": "/s"})
    }

    /// The required fields with others.
    fn with(more: Value) -> Value {
        let mut all = least();
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    }

    #[test]
    fn engine_config_with_every_field_round_trips() {
        let address = |port| SocketAddr::new([10, 0, 0, 1].into(), port);
        let config = EngineConfig {
            model_dir: "/m".into(),
            served_model_name: "chat".into(),
            rank: 1,
            layers_per_rank: vec![3, 2],
            tensor_size: 2,
            backend: Backend::JacclRing,
            epoch: 7,
            group_uid: "g".into(),
            shard_uid: "s".into(),
            listen: address(1),
            ring_hosts: vec![address(2), "[::1]:3".parse().unwrap()],
            tensor_hosts: vec![address(4)],
            rdma_devices: vec![vec![vec![], vec!["rdma_en4".into()]]],
            transport: Transport::Direct,
            cables: vec![CableEnds {
                node: "b".into(),
                own: [192, 0, 2, 1].into(),
                peer: [192, 0, 2, 2].into(),
            }],
            peers: vec![PeerRank { rank: 0, address: address(5), node: "a".into() }],
            tls_dir: "/t".into(),
            control_socket: "/s".into(),
            metrics_listen: address(6),
            context_tokens: 100,
            max_sequences: 5,
            kv_tokens: Some(300),
            options: EngineOptions {
                kv_cache: KvCacheType::Int4,
                quantization: WeightQuantization::Int8,
                speculation: Speculation::Off,
                fence: Fence::Fast,
                router_broadcast: RouterBroadcast::On,
                max_waiting_requests: Some(7),
            },
            prefix_cache: false,
            prefix_dir: Some("/p".into()),
            prefix_dir_bytes: 9,
            draft_dir: Some("/d".into()),
            adapters: vec![AdapterDir { name: "a".into(), dir: "/a".into() }],
            overlap_scheduling: OverlapScheduling::Off,
            wired_memory: false,
            dtype: Dtype::F32,
            log: LogFormat::Json,
            orphan_seconds: 1,
            smoke_prompt: false,
            drain_seconds: 2,
        };
        let text = config.to_json().unwrap();
        assert_eq!(EngineConfig::from_json(&text).unwrap(), config);
        let (all, defaults) = (
            serde_json::from_str::<Value>(&text).unwrap(),
            serde_json::to_value(EngineConfig::default()).unwrap(),
        );
        for (field, value) in all.as_object().unwrap() {
            assert_ne!(Some(value), defaults.get(field), "{field} has its default");
        }
    }

    #[test]
    fn engine_config_needs_four_fields_and_has_defaults() {
        let config = EngineConfig::from_json(&least().to_string()).unwrap();
        let expected = EngineConfig {
            model_dir: "/m".into(),
            served_model_name: "m".into(),
            tls_dir: "/t".into(),
            control_socket: "/s".into(),
            ..EngineConfig::default()
        };
        assert_eq!(config, expected);
        assert_eq!((config.context_tokens, config.max_sequences, config.size()), (4096, 4, 1));
        let schema = EngineConfig::json_schema();
        for field in ["modelDir", "servedModelName", "tlsDir", "controlSocket"] {
            let mut fields = least();
            fields.as_object_mut().unwrap().remove(field);
            let error = EngineConfig::from_json(&fields.to_string()).unwrap_err();
            assert_eq!(error, EngineConfigError::Missing(field));
            assert!(schema["required"].as_array().unwrap().contains(&field.into()), "{schema:#}");
        }
        let known = serde_json::to_value(EngineConfig::default()).unwrap();
        for field in known.as_object().unwrap().keys() {
            assert!(schema["properties"][field]["description"].is_string(), "{field} is not described");
        }
    }

    #[test]
    fn wrong_engine_config_is_refused_by_field_and_value() {
        for (more, said) in [
            (json!({"neverHeardOf": 7}), &["neverHeardOf (7) is no field", VERSION, "correct its name"][..]),
            (json!({"options": {"kvStyle": "x"}}), &["options.kvStyle (\"x\") is no field"]),
            (json!({"options": {"draftModel": "x"}}), &["options.draftModel (\"x\") is no field"]),
            (json!({"options": {"kvCache": "Int2"}}), &["options.kvCache is \"Int2\"", "use a newer engine"]),
            (json!({"options": {"kvCache": 2}}), &["options.kvCache is 2: ", "--config-schema"]),
            (json!({"options": 2}), &["options is 2: "]),
            (json!({"backend": "Fibre"}), &["backend is \"Fibre\"", "use a newer engine"]),
            (json!({"transport": "Pigeon"}), &["transport is \"Pigeon\"", "use a newer engine"]),
            (json!({"rank": -1}), &["rank is -1: ", "--config-schema"]),
            (json!({"listen": "here"}), &["listen is \"here\": invalid socket address"]),
            (
                json!({"overlapScheduling": "Sometimes"}),
                &["overlapScheduling is \"Sometimes\": ", "`Auto`, `On`, `Off`"],
            ),
            (json!({"peers": [{"rank": 1, "address": "10.0.0.2", "node": "b"}]}), &["peers is [{"]),
            (json!({"peers": [{"rank": 1, "address": "10.0.0.2:1"}]}), &["peers is", "missing field `node`"]),
            (
                json!({"peers": [{"rank": 1, "address": "10.0.0.2:1", "node": ""}]}),
                &["peers[].node is missing"],
            ),
            (
                json!({"cables": [{"node": "b", "own": "192.0.2.1:7", "peer": "192.0.2.2"}]}),
                &["cables is", "invalid IP address"],
            ),
            (json!({"cables": [{"node": "b", "own": "192.0.2.1"}]}), &["cables is", "missing field `peer`"]),
            (
                json!({"cables": [{"node": "", "own": "fe80::1", "peer": "fe80::2"}]}),
                &["cables[].node is missing"],
            ),
            (
                json!({"cables": [{"node": "b", "own": "1", "peer": "2"}]}),
                &["cables is", "invalid IP address"],
            ),
            (json!({"tensorSize": 65}), &["tensorSize is 65, but has to be from 1 to 64"]),
            (json!({"maxSequences": 0}), &["maxSequences is 0, but has to be from 1 to 1024"]),
            (json!({"contextTokens": 0}), &["contextTokens is 0"]),
            (json!({"kvTokens": 0}), &["kvTokens is 0"]),
        ] {
            let error = EngineConfig::from_json(&with(more.clone()).to_string()).unwrap_err().to_string();
            for text in said {
                assert!(error.contains(text), "{more}: {error}");
            }
        }
        for text in ["", "[]", r#"{"rank": 1, "rank": 2}"#] {
            let error = EngineConfig::from_json(text).unwrap_err();
            assert!(matches!(error, EngineConfigError::Json(_)), "{text}: {error}");
        }
    }

    #[test]
    fn kv_capacity_is_of_all_sequences_or_as_given() {
        for (more, expected) in [
            (json!({}), 4 * 4096),
            (json!({"contextTokens": 1_000_000, "maxSequences": 1024}), 1_024_000_000),
            (json!({"kvTokens": 5000}), 5000),
            (json!({"kvTokens": 5000, "contextTokens": 100}), 400),
        ] {
            let config = EngineConfig::from_json(&with(more.clone()).to_string()).unwrap();
            assert_eq!(config.kv_capacity(), expected, "{more}");
        }
    }
}
