//! What every process of Russet shows about itself: its log on stderr, the files such logs go to, and
//! its admin endpoints (`/metrics`, `/healthz`, `/readyz`). What is measured belongs to each process's own `metrics`.

pub mod admin;
pub mod logfile;
pub mod logs;
mod process;
