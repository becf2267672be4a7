//! Arguments of the store of responses, which `gateway` opens and `up` names.

use std::path::Path;
use std::time::Duration;

use russet_gateway::response_store::ResponseStoreConfig;

/// A day in seconds.
const DAY: u64 = 86_400;

/// How long responses are kept, and how many bytes of them.
#[derive(clap::Args, Clone, Debug, PartialEq)]
pub struct ResponseStoreArguments {
    /// Days after which a kept response, file or batch is deleted.
    #[arg(long, value_name = "DAYS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    responses_retention_days: u32,
    /// Size of the store of responses, files and batches, such as 10Gi; the oldest make room for new ones.
    #[arg(long, value_name = "SIZE", default_value = "1Gi", value_parser = size)]
    responses_max_size: u64,
}

fn size(text: &str) -> Result<u64, String> {
    /// SQLite's empty file, and a response.
    const MIN: u64 = 1 << 20;
    let bytes = russet_plan::quantity::parse(text).ok();
    bytes.filter(|bytes| *bytes >= MIN).ok_or_else(|| "write a size of at least 1Mi, such as 10Gi".to_owned())
}

impl ResponseStoreArguments {
    /// The store in this file.
    pub fn config(&self, path: &Path) -> ResponseStoreConfig {
        let Self { responses_retention_days, responses_max_size } = self;
        ResponseStoreConfig {
            path: path.into(),
            retention: Duration::from_secs(u64::from(*responses_retention_days) * DAY),
            max_bytes: *responses_max_size,
        }
    }

    /// The same for the command line of a child process.
    pub fn to_flags(&self, path: &Path) -> Vec<String> {
        let Self { responses_retention_days, responses_max_size } = self;
        let (path, days, size) = (
            path.display().to_string(),
            responses_retention_days.to_string(),
            responses_max_size.to_string(),
        );
        ["--responses-store", &path, "--responses-retention-days", &days, "--responses-max-size", &size]
            .map(str::to_owned)
            .to_vec()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[arg(long)]
        responses_store: Option<std::path::PathBuf>,
        #[command(flatten)]
        store: ResponseStoreArguments,
    }

    #[test]
    fn flags_for_a_child_say_the_same() {
        let path = Path::new("/data/responses.db");
        for (flags, days, bytes) in [
            (&[][..], 30, 1 << 30),
            (&["--responses-retention-days", "7", "--responses-max-size", "10Gi"], 7, 10 << 30),
        ] {
            let parsed = Line::parse_from([&["russet"], flags].concat());
            let config = parsed.store.config(path);
            assert_eq!(config.retention, Duration::from_secs(days * 86_400));
            assert_eq!((config.max_bytes, config.path.as_path()), (bytes, path));
            let again = Line::parse_from([vec!["russet".to_owned()], parsed.store.to_flags(path)].concat());
            assert_eq!((again.responses_store.as_deref(), &again.store), (Some(path), &parsed.store));
        }
        for wrong in ["0", "1Ki", "much", "-1Gi"] {
            let flag = format!("--responses-max-size={wrong}");
            assert!(Line::try_parse_from(["russet", &flag]).is_err(), "{wrong}");
        }
    }
}
