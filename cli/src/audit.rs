//! `russet audit`: the audit log of a gateway. It reads files of this machine; no cluster is asked.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use jiff::Timestamp;
use russet_crds::Zone;
use russet_gateway::audit::{AuditPeriod, AuditReport, verify};

use crate::data_dir::DataDir;
use crate::get::format_table;
use crate::stdout::out;

/// Arguments of `russet audit`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: AuditAction,
}

#[derive(clap::Subcommand)]
enum AuditAction {
    /// Check that nobody changed the log, and say how far from home the requests of a period went.
    Verify(VerifyArguments),
}

#[derive(clap::Args)]
struct VerifyArguments {
    /// Folder of the log; default that of `russet up` on this machine.
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Requests from then on, such as 2026-11-01T00:00:00Z.
    #[arg(long, value_name = "TIME")]
    since: Option<Timestamp>,
    /// Requests before then.
    #[arg(long, value_name = "TIME")]
    until: Option<Timestamp>,
    /// Fail unless every request of the period stayed in this zone.
    #[arg(long, value_name = "ZONE", value_enum)]
    stayed_in: Option<ZoneName>,
    /// The key that must have signed the log, as an earlier verification printed it.
    #[arg(long, value_name = "HEX")]
    public_key: Option<String>,
}

/// A zone on the command line.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
#[value(rename_all = "PascalCase")]
enum ZoneName {
    Local,
    Lan,
    Cloud,
}

impl ZoneName {
    fn zone(self) -> Zone {
        match self {
            Self::Local => Zone::Local,
            Self::Lan => Zone::Lan,
            Self::Cloud => Zone::Cloud,
        }
    }
}

/// Runs the subcommand.
pub fn run(arguments: Arguments) -> Result<()> {
    let AuditAction::Verify(VerifyArguments { folder, since, until, stayed_in, public_key }) =
        arguments.action;
    let folder = match folder {
        Some(folder) => folder,
        None => DataDir::resolve(None)?.gateway_audit(),
    };
    let report = verify(&folder, &AuditPeriod { since, until }, public_key.as_deref())?;
    out!("{}", shown(&report))?;
    if let Some(zone) = stayed_in.map(ZoneName::zone) {
        ensure!(
            report.is_whole(),
            "{} entries of the period could not be written, so nothing is proved",
            report.lost
        );
        ensure!(report.stayed_in(zone), "not every request of the period stayed in the zone {zone}");
        out!("\nEvery request of the period stayed in the zone {zone}.\n")?;
    }
    Ok(())
}

/// A report as people read it.
fn shown(report: &AuditReport) -> String {
    let AuditReport { entries, first_number, span, head, public_keys, requests, departures, lost } = report;
    let span = span.map_or_else(String::new, |(first, last)| format!(", {first} to {last}"));
    let mut text = format!("Log      intact: {entries} entries from number {first_number} on{span}\n");
    text += &format!("Head     {head}\n");
    for key in public_keys {
        text += &format!("Key      {key}\n");
    }
    if *lost > 0 {
        text += &format!("Missing  {lost} entries that could not be written\n");
    }
    let mut rows = vec![["ZONE", "REQUESTS"].map(str::to_owned).to_vec()];
    rows.extend(requests.iter().map(|(zone, count)| vec![zone.clone(), count.to_string()]));
    text += &format!("\n{}", format_table(&rows));
    if !departures.is_empty() {
        let mut rows = vec![["PROVIDER", "ZONE", "TIMES SENT"].map(str::to_owned).to_vec()];
        let row = |((provider, zone), count): (&(String, String), &u64)| {
            vec![provider.clone(), zone.clone(), count.to_string()]
        };
        rows.extend(departures.iter().map(row));
        text += &format!("\n{}", format_table(&rows));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_table_of_zones_and_providers() {
        let at = |text: &str| text.parse().unwrap();
        let report = AuditReport {
            entries: 7,
            first_number: 1,
            span: Some((at("2026-11-29T10:00:00Z"), at("2026-11-29T11:00:00Z"))),
            head: "ab12".into(),
            public_keys: vec!["cd34".into()],
            requests: [("Cloud".to_owned(), 1), ("Local".to_owned(), 4)].into(),
            departures: [(("default/openrouter".to_owned(), "Cloud".to_owned()), 2)].into(),
            lost: 0,
        };
        let expected = "\
Log      intact: 7 entries from number 1 on, 2026-11-29T10:00:00Z to 2026-11-29T11:00:00Z
Head     ab12
Key      cd34

ZONE    REQUESTS
Cloud   1
Local   4

PROVIDER             ZONE    TIMES SENT
default/openrouter   Cloud   2
";
        assert_eq!(shown(&report), expected);
        let lossy = AuditReport { lost: 3, ..report };
        assert!(shown(&lossy).contains("Missing  3 entries that could not be written\n"));
    }
}
