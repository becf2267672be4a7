//! Re-forming: whether this process can join the next formation that its agent describes and keep its
//! weights. Not here: the detection of a lost group and the decision to form it again.
//!
//! ```text
//! Failed by its group ─▶ asked to leave ─▶ reusable ──Form──▶ next formation, with the same weights
//!                           │                  └── no watcher, or asked to stop ──▶ exit 1
//!                           └── MLX does not reply ──▶ exit 1
//! ```

use russet_wire::engine_config::{EngineConfig, EngineConfigError};
use russet_wire::engine_options::EngineOptions;
use serde_json::Value;
use thiserror::Error;

use crate::jaccl::Topology;

/// Why this process cannot be a rank of the next formation.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum IncompatibleConfig {
    /// An agent of a release that sent arguments, not a configuration.
    #[error(
        "the agent sent no configuration, so it is of an older release than this engine; start a new one"
    )]
    Absent,
    /// A configuration that an engine of this build does not accept.
    #[error("{0}; start a new engine")]
    Unusable(#[from] EngineConfigError),
    /// A different rank, or different weights or caches.
    #[error("{field} is {asked}, but this process was started with {own}; start a new one")]
    Differs {
        /// The field.
        field: String,
        /// Value of this process.
        own: String,
        /// Requested value.
        asked: String,
    },
    /// An epoch that has passed.
    #[error("epoch {asked} does not follow epoch {own}; ask for a higher one")]
    Epoch {
        /// Epoch of the lost formation.
        own: u64,
        /// Requested epoch.
        asked: u64,
    },
}

/// Whether the process can rejoin a re-formed group: over RDMA, MLX never reports that another rank is lost
/// and never leaves.
pub fn can_rejoin(config: &EngineConfig) -> bool {
    config.size() > 1 && Topology::of(config.backend).is_none()
}

/// The configuration of the next formation, from the JSON that a new process would read.
pub fn next_config(own: &EngineConfig, json: &str) -> Result<EngineConfig, IncompatibleConfig> {
    if json.is_empty() {
        return Err(IncompatibleConfig::Absent);
    }
    let next = EngineConfig::from_json(json)?;
    if let Some((field, own, asked)) = first_difference(own, &next) {
        return Err(IncompatibleConfig::Differs { field, own, asked });
    }
    if next.epoch <= own.epoch {
        return Err(IncompatibleConfig::Epoch { own: own.epoch, asked: next.epoch });
    }
    Ok(next)
}

/// The first differing field among those that determine weights, caches and the place in the group, with both
/// values. A field counts among them unless [`carried_over`] names it.
fn first_difference(own: &EngineConfig, next: &EngineConfig) -> Option<(String, String, String)> {
    let fields = |config: &EngineConfig| serde_json::to_value(config).unwrap_or_default();
    differing_field("", Some(&fields(&carried_over(own, next))), Some(&fields(next)))
}

/// The configuration of this process with the fields that a running process takes from the next formation.
/// All others were read once: MLX's files lie beside the control socket, and MLX has read the fence.
fn carried_over(own: &EngineConfig, next: &EngineConfig) -> EngineConfig {
    let next = next.clone();
    EngineConfig {
        served_model_name: next.served_model_name,
        epoch: next.epoch,
        listen: next.listen,
        ring_hosts: next.ring_hosts,
        tensor_hosts: next.tensor_hosts,
        transport: next.transport,
        cables: next.cables,
        peers: next.peers,
        tls_dir: next.tls_dir,
        metrics_listen: next.metrics_listen,
        context_tokens: next.context_tokens,
        max_sequences: next.max_sequences,
        kv_tokens: next.kv_tokens,
        options: EngineOptions { speculation: next.options.speculation, ..own.options },
        // The disk cache keeps its first size limit.
        prefix_dir_bytes: next.prefix_dir_bytes,
        log: next.log,
        orphan_seconds: next.orphan_seconds,
        smoke_prompt: next.smoke_prompt,
        drain_seconds: next.drain_seconds,
        ..own.clone()
    }
}

/// The first field in which two values differ, a nested one by its path, with both texts.
fn differing_field(
    path: &str,
    own: Option<&Value>,
    asked: Option<&Value>,
) -> Option<(String, String, String)> {
    if let (Some(Value::Object(own)), Some(Value::Object(asked))) = (own, asked) {
        return own.keys().chain(asked.keys()).find_map(|field| {
            let path = if path.is_empty() { field.clone() } else { format!("{path}.{field}") };
            differing_field(&path, own.get(field), asked.get(field))
        });
    }
    // An option that has its default is left out.
    let text = |value: Option<&Value>| value.map_or_else(|| "the default".to_owned(), Value::to_string);
    (own != asked).then(|| (path.to_owned(), text(own), text(asked)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(more: Value) -> Value {
        let mut all = json!({
            "modelDir": "/m", "servedModelName": "m", "tlsDir": "/t", "controlSocket": "/s", "groupUid": "g",
            "shardUid": "u", "layersPerRank": [2, 2], "rank": 1,
        });
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    }

    fn config(more: Value) -> EngineConfig {
        EngineConfig::from_json(&fields(more).to_string()).unwrap()
    }

    fn next(own: &EngineConfig, more: Value) -> Result<EngineConfig, IncompatibleConfig> {
        next_config(own, &fields(more).to_string())
    }

    #[test]
    fn reform_rejects_changed_weights_or_caches_only() {
        let own = config(json!({
            "epoch": 3, "listen": "127.0.0.1:1", "ringHosts": ["127.0.0.1:2", "127.0.0.1:3"], "prefixDir": "/p",
        }));
        let moved = next(
            &own,
            json!({
                "epoch": 5, "listen": "127.0.0.1:4", "ringHosts": ["127.0.0.1:5", "127.0.0.1:6"],
                "tensorHosts": ["127.0.0.1:8"], "prefixDir": "/p", "prefixDirBytes": 7, "transport": "Direct",
                "peers": [
                    {"rank": 0, "address": "127.0.0.1:7", "node": "a"},
                    {"rank": 1, "address": "127.0.0.1:4", "node": "b"},
                ],
                "cables": [{"node": "a", "own": "192.0.2.1", "peer": "192.0.2.2"}], "servedModelName": "n",
                "tlsDir": "/u", "metricsListen": "127.0.0.1:9", "contextTokens": 9, "maxSequences": 1,
                "kvTokens": 8, "options": {"speculation": "Off"}, "log": "Json", "orphanSeconds": 1,
                "smokePrompt": false, "drainSeconds": 2,
            }),
        )
        .unwrap();
        assert_eq!((moved.epoch, moved.listen.port(), moved.ring_hosts.len()), (5, 4, 2));

        for (field, value) in [
            ("tensorSize", json!(2)),
            ("backend", json!("Jaccl")),
            ("prefixCache", json!(false)),
            ("prefixDir", json!("/other")),
            ("prefixDir", json!(null)),
            ("draftDir", json!("/d")),
            ("overlapScheduling", json!("On")),
            ("wiredMemory", json!(false)),
            ("dtype", json!("F32")),
            ("rdmaDevices", json!([[["a"]]])),
            ("modelDir", json!("/other")),
            ("controlSocket", json!("/other")),
            ("groupUid", json!("h")),
            ("shardUid", json!("v")),
            ("layersPerRank", json!([1, 3])),
            ("rank", json!(0)),
        ] {
            let mut more = json!({"epoch": 4, "prefixDir": "/p"});
            more[field] = value.clone();
            let refused = next(&own, more).unwrap_err();
            let text = refused.to_string();
            assert!(
                text.starts_with(&format!("{field} is {value}, but this process was started with "))
                    && text.ends_with("start a new one"),
                "{text}"
            );
        }
        for (option, value) in [("kvCache", "Int8"), ("fence", "Fast")] {
            let refused = next(&own, json!({"epoch": 4, "prefixDir": "/p", "options": {option: value}}));
            assert_eq!(
                refused.unwrap_err(),
                IncompatibleConfig::Differs {
                    field: format!("options.{option}"),
                    own: "the default".into(),
                    asked: format!("{value:?}")
                }
            );
        }
    }

    #[test]
    fn reform_rejects_old_epochs_and_unknown_fields() {
        let own = config(json!({"epoch": 3}));
        assert_eq!(next(&own, json!({"epoch": 3})), Err(IncompatibleConfig::Epoch { own: 3, asked: 3 }));
        let refused = next(&own, json!({"epoch": 4, "neverHeardOf": "x"})).unwrap_err().to_string();
        assert!(refused.contains("neverHeardOf") && refused.ends_with("start a new engine"), "{refused}");
        // An agent of the release before sends arguments, in a field that this engine does not read.
        assert_eq!(next_config(&own, ""), Err(IncompatibleConfig::Absent));
    }

    #[test]
    fn only_ranks_over_tcp_can_rejoin() {
        for (more, outlives) in [
            (json!({}), true),
            (json!({"tensorSize": 2, "backend": "Ring"}), true),
            (json!({"tensorSize": 2, "backend": "Jaccl"}), false),
            (json!({"tensorSize": 2, "backend": "JacclRing"}), false),
            (json!({"layersPerRank": [], "rank": 0}), false),
        ] {
            assert_eq!(can_rejoin(&config(more.clone())), outlives, "{more}");
        }
    }
}
