//! A whole cluster for tests and the demo: two machines on one computer, a hub that serves model files, and
//! an OpenAI client. Real processes, real sockets; nothing of Russet is mocked.

pub mod booted;
pub mod chat;
pub mod clock;
pub mod cluster;
pub mod control_plane;
pub mod etcd;
pub mod flux;
pub mod hub;
pub mod lab;
pub mod mac;
pub mod processes;
pub mod prometheus;
pub mod tool;
