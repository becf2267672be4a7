//! Re-forming: whether this process can join the next formation that its agent describes and keep its
//! weights. Not here: the detection of a lost group and the decision to form it again.
//!
//! ```text
//! Failed by its group ─▶ asked to leave ─▶ reusable ──Form──▶ next formation, with the same weights
//!                           │                  └── no watcher, or asked to stop ──▶ exit 1
//!                           └── MLX does not reply ──▶ exit 1
//! ```

use clap::Parser as _;
use thiserror::Error;

use crate::args::{Args, Backend};

/// Why this process cannot be a rank of the next formation.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum IncompatibleArgs {
    /// Arguments that an engine of this build does not accept.
    #[error("these arguments are none of this engine's: {0}")]
    Arguments(String),
    /// A different rank, or different weights or caches.
    #[error("{flag} is {asked}, but this process was started with {own}; start a new one")]
    Differs {
        /// The flag.
        flag: &'static str,
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

impl Args {
    /// Whether this process can rejoin a re-formed group: over RDMA, MLX never reports that another rank is
    /// lost and never leaves.
    pub fn can_rejoin(&self) -> bool {
        self.size() > 1 && self.backend == Backend::Ring
    }

    /// The arguments of the next formation, given as for a new process without the program name.
    pub fn reformed_with(&self, arguments: Vec<String>) -> Result<Self, IncompatibleArgs> {
        let arguments = std::iter::once("russet-engine".to_owned()).chain(arguments);
        let next = Self::try_parse_from(arguments)
            .map_err(|error| IncompatibleArgs::Arguments(error.to_string()))?;
        if let Some((flag, own, asked)) = self.first_difference(&next) {
            return Err(IncompatibleArgs::Differs { flag, own, asked });
        }
        if next.epoch <= self.epoch {
            return Err(IncompatibleArgs::Epoch { own: self.epoch, asked: next.epoch });
        }
        Ok(next)
    }

    /// The first differing flag among those that determine weights, caches and the place in the group, with
    /// both values.
    fn first_difference(&self, next: &Self) -> Option<(&'static str, String, String)> {
        let facts = |args: &Self| {
            let Self {
                model_dir,
                rank,
                layers_per_rank,
                tensor_size,
                backend,
                group_uid,
                shard_uid,
                // MLX's files lie beside it, and their names are in this process's environment.
                control_socket,
                prefix_cache,
                prefix_dir,
                draft_dir,
                // MLX has read it already.
                fence,
                wired_memory,
                look_ahead,
                kv_cache,
                dtype,
                rdma_devices,
                // The next formation applies all other flags. The disk cache keeps its first size limit.
                served_model_name: _,
                epoch: _,
                listen: _,
                ring_hosts: _,
                tensor_hosts: _,
                transport: _,
                cables: _,
                peers: _,
                tls_dir: _,
                metrics_listen: _,
                context_tokens: _,
                max_sequences: _,
                prefix_dir_bytes: _,
                speculation: _,
                kv_tokens: _,
                log: _,
                orphan_seconds: _,
                no_smoke_prompt: _,
                drain_seconds: _,
            } = args.clone();
            [
                ("--model-dir", format!("{}", model_dir.display())),
                ("--rank", rank.to_string()),
                ("--layers-per-rank", format!("{layers_per_rank:?}")),
                ("--tensor-size", tensor_size.to_string()),
                ("--backend", format!("{backend:?}")),
                ("--group-uid", group_uid),
                ("--shard-uid", shard_uid),
                ("--control-socket", format!("{}", control_socket.display())),
                ("--prefix-cache", format!("{prefix_cache:?}")),
                ("--prefix-dir", format!("{prefix_dir:?}")),
                ("--draft-dir", format!("{draft_dir:?}")),
                ("--fence", format!("{fence:?}")),
                ("--wired-memory", format!("{wired_memory:?}")),
                ("--look-ahead", format!("{look_ahead:?}")),
                ("--kv-cache", format!("{kv_cache:?}")),
                ("--dtype", format!("{dtype:?}")),
                ("--rdma-devices", format!("{rdma_devices:?}")),
            ]
        };
        let pairs = facts(self).into_iter().zip(facts(next));
        pairs.map(|((flag, own), (_, asked))| (flag, own, asked)).find(|(_, own, asked)| own != asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(more: &str) -> Vec<String> {
        let base = "--model-dir /m --served-model-name m --tls-dir /t --control-socket /s --group-uid g --shard-uid u \
                    --layers-per-rank 2,2 --rank 1";
        base.split_whitespace().chain(more.split_whitespace()).map(str::to_owned).collect()
    }

    fn args(line: Vec<String>) -> Args {
        Args::try_parse_from(std::iter::once("russet-engine".to_owned()).chain(line)).unwrap()
    }

    #[test]
    fn reform_rejects_changed_weights_or_caches_only() {
        let lost = "--epoch 3 --listen 127.0.0.1:1 --ring-hosts 127.0.0.1:2,127.0.0.1:3 --prefix-dir /p";
        let own = args(line(lost));
        let moved = "--epoch 5 --listen 127.0.0.1:4 --ring-hosts 127.0.0.1:5,127.0.0.1:6 --prefix-dir /p \
                     --peers 0=127.0.0.1:7@a,1=127.0.0.1:4@b --prefix-dir-bytes 7 --transport direct";
        let next = own.reformed_with(line(moved)).unwrap();
        assert_eq!((next.epoch, next.listen.port(), next.ring_hosts.len()), (5, 4, 2));

        let again =
            |more: &str| own.reformed_with(line(&format!("--epoch 4 --prefix-dir /p {more}"))).unwrap_err();
        for (flag, value) in [
            ("--tensor-size", "2"),
            ("--backend", "jaccl"),
            ("--prefix-cache", "off"),
            ("--draft-dir", "/d"),
            ("--fence", "fast"),
            ("--look-ahead", "on"),
            ("--wired-memory", "off"),
            ("--kv-cache", "int8"),
            ("--dtype", "f32"),
            ("--rdma-devices", r#"[[["a"]]]"#),
        ] {
            let refused = again(&format!("{flag} {value}"));
            assert!(
                matches!(refused, IncompatibleArgs::Differs { flag: told, .. } if told == flag),
                "{refused}"
            );
        }
        for (flag, value) in [
            ("--model-dir", "/other"),
            ("--control-socket", "/other"),
            ("--group-uid", "h"),
            ("--shard-uid", "v"),
            ("--layers-per-rank", "1,3"),
            ("--rank", "0"),
        ] {
            let mut other = line("--epoch 4 --prefix-dir /p");
            let at = other.iter().position(|word| word == flag).unwrap();
            other[at + 1] = value.to_owned();
            let refused = own.reformed_with(other).unwrap_err();
            assert!(
                matches!(refused, IncompatibleArgs::Differs { flag: told, .. } if told == flag),
                "{refused}"
            );
            assert!(refused.to_string().contains("start a new one"), "{refused}");
        }
        let refused = own.reformed_with(line("--epoch 4")).unwrap_err();
        assert!(matches!(refused, IncompatibleArgs::Differs { flag: "--prefix-dir", .. }), "{refused}");
    }

    #[test]
    fn reform_rejects_old_epochs_and_unknown_flags() {
        let own = args(line("--epoch 3"));
        assert_eq!(own.reformed_with(line("--epoch 3")), Err(IncompatibleArgs::Epoch { own: 3, asked: 3 }));
        let refused = own.reformed_with(line("--epoch 4 --never-heard-of x")).unwrap_err();
        assert!(refused.to_string().contains("--never-heard-of"), "{refused}");
    }

    #[test]
    fn only_ranks_over_tcp_can_rejoin() {
        for (flags, outlives) in [
            ("", true),
            ("--tensor-size 2", true),
            ("--tensor-size 2 --backend jaccl", false),
            ("--tensor-size 2 --backend jaccl-ring", false),
        ] {
            assert_eq!(args(line(flags)).can_rejoin(), outlives, "{flags}");
        }
        let alone = "--model-dir /m --served-model-name m --tls-dir /t --control-socket /s";
        assert!(!args(alone.split(' ').map(str::to_owned).collect()).can_rejoin());
    }
}
