//! A whole cluster for tests and the demo: two machines on one computer, a hub that serves model files, and
//! an OpenAI client. Real processes, real sockets; nothing of Russet is mocked.

pub mod apart;
pub mod booted;
pub mod bucket;
pub mod chat;
pub mod clock;
pub mod cluster;
pub mod control_plane;
pub mod etcd;
pub mod flux;
pub mod hub;
pub mod kubeconfig;
pub mod lab;
pub mod mac;
pub mod peak_memory;
pub mod processes;
pub mod prometheus;
pub mod provided;
pub mod tenants;
pub mod tool;

/// The model that every agent has built in, and a deployment of it, as docs/catalog.md makes them.
pub const SMOKE: &str = r#"apiVersion: russet.dev/v1alpha1
kind: Model
metadata: {name: smoke}
spec: {source: {uri: "builtin://smoke"}}
---
apiVersion: russet.dev/v1alpha1
kind: ModelDeployment
metadata: {name: smoke}
spec: {modelRef: {name: smoke}}
"#;
