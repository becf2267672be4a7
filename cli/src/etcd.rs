//! The etcd flags, which `serve` takes and `up` passes on.

use std::path::PathBuf;

use russet_apiserver::store::etcd::{EtcdConfig, PREFIX};

/// etcd store, for several API servers that share their objects.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct EtcdArguments {
    /// Endpoints of the etcd that stores the objects, such as https://a:2379,https://b:2379; without them a
    /// file does.
    #[arg(long, value_delimiter = ',', value_name = "URL")]
    etcd_endpoints: Vec<String>,
    /// CA that signed etcd's certificates.
    #[arg(long, requires = "etcd_endpoints", value_name = "FILE")]
    etcd_cafile: Option<PathBuf>,
    /// Client certificate of the API server for etcd.
    #[arg(long, requires = "etcd_keyfile", value_name = "FILE")]
    etcd_certfile: Option<PathBuf>,
    /// Key of that certificate.
    #[arg(long, requires = "etcd_certfile", value_name = "FILE")]
    etcd_keyfile: Option<PathBuf>,
    /// Prefix of every key in etcd.
    #[arg(long, default_value = PREFIX)]
    etcd_prefix: String,
}

impl EtcdArguments {
    /// The etcd, if one is named.
    pub fn config(&self) -> Option<EtcdConfig> {
        let Self { etcd_endpoints, etcd_cafile, etcd_certfile, etcd_keyfile, etcd_prefix } = self.clone();
        if etcd_endpoints.is_empty() {
            return None;
        }
        Some(EtcdConfig {
            ca_file: etcd_cafile,
            cert_file: etcd_certfile,
            key_file: etcd_keyfile,
            prefix: etcd_prefix,
            ..EtcdConfig::new(etcd_endpoints)
        })
    }

    /// The same flags for a child process.
    pub fn to_flags(&self) -> Vec<String> {
        let Self { etcd_endpoints, etcd_cafile, etcd_certfile, etcd_keyfile, etcd_prefix } = self;
        if etcd_endpoints.is_empty() {
            return Vec::new();
        }
        let mut flags = vec!["--etcd-endpoints".to_owned(), etcd_endpoints.join(",")];
        let files = [
            ("--etcd-cafile", etcd_cafile),
            ("--etcd-certfile", etcd_certfile),
            ("--etcd-keyfile", etcd_keyfile),
        ];
        for (flag, file) in files {
            if let Some(file) = file {
                flags.extend([flag.to_owned(), file.display().to_string()]);
            }
        }
        flags.extend(["--etcd-prefix".to_owned(), etcd_prefix.clone()]);
        flags
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct EtcdFlags {
        #[command(flatten)]
        etcd: EtcdArguments,
    }

    #[test]
    fn child_process_gets_the_flags_of_its_parent() {
        let line = "russet --etcd-endpoints https://a:1,https://b:2 --etcd-cafile ca --etcd-certfile c --etcd-keyfile k";
        let parsed = EtcdFlags::try_parse_from(line.split(' ')).unwrap().etcd;
        let flags = [vec!["russet".to_owned()], parsed.to_flags()].concat();
        let flags_parsed = EtcdFlags::try_parse_from(flags).unwrap().etcd;
        assert_eq!(format!("{flags_parsed:?}"), format!("{parsed:?}"));
        assert_eq!(flags_parsed.config().unwrap().endpoints, ["https://a:1", "https://b:2"]);
        assert!(EtcdFlags::try_parse_from(["russet"]).unwrap().etcd.config().is_none());
        assert!(EtcdFlags::try_parse_from("russet --etcd-certfile c".split(' ')).is_err());
    }
}
