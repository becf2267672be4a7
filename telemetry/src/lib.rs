//! Telemetry that all processes of Russet share: the log on stderr, log files, error chains in one line, the
//! admin endpoints (`/metrics`, `/healthz`, `/readyz`), and tasks whose end must end their process. Not here:
//! metrics, which each process defines in its own `metrics`.

pub mod admin;
pub mod errors;
pub mod logfile;
pub mod logs;
mod process;
pub mod stderr;
pub mod tasks;
