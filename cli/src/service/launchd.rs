//! The property list of a service, for launchd. Pure text functions. It was never loaded on a Mac;
//! `docs/service.md` lists what is known and the sources.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use plist::{Dictionary, Value};

use super::spec::{ServiceSpec, Verb};
use crate::log_rotation;

/// launchd's own default, made explicit: the minimum interval between two starts of a failing service.
const THROTTLE_SECONDS: u64 = 10;
/// Children get 15 s to stop before `up` kills them.
const EXIT_SECONDS: u64 = 30;
/// launchd's default of 256 is less than a gateway's clients.
const OPEN_FILES: u64 = 10_240;
/// 077: all files belong to the service's user only. The property list needs a decimal number.
const UMASK: u64 = 0o077;

/// Name of a service.
pub fn label(verb: Verb) -> String {
    format!("dev.russet.{}", verb.word())
}

/// Path of the service's log. macOS's own rotation renames a file to which the process then still writes, so
/// the process rotates it itself.
pub fn log_path(service: &ServiceSpec) -> PathBuf {
    log_folder(&service.data_dir).join(format!("{}.log", service.verb.word()))
}

/// Folder where `russet logs` looks.
pub fn log_folder(data_dir: &Path) -> PathBuf {
    data_dir.join("logs")
}

/// The property list.
pub fn property_list(service: &ServiceSpec) -> Result<String> {
    let log = log_path(service).display().to_string();
    let ServiceSpec { verb, argv, user, data_dir: _, environment, homes: _, low_port: _, programs: _ } =
        service;
    let mut variables = Dictionary::new();
    for (name, value) in environment {
        variables.insert(name.clone(), value.clone().into());
    }
    variables.insert(log_rotation::LOG_FILE_VARIABLE.to_owned(), log.clone().into());
    let files = Dictionary::from_iter([("NumberOfFiles", Value::from(OPEN_FILES))]);
    let list = Dictionary::from_iter([
        ("Label", Value::from(label(*verb))),
        ("ProgramArguments", Value::Array(argv.iter().cloned().map(Value::from).collect())),
        ("UserName", user.clone().into()),
        ("WorkingDirectory", "/".into()),
        ("EnvironmentVariables", variables.into()),
        // Start with the machine, without a login, and restart whenever it exits.
        ("RunAtLoad", true.into()),
        ("KeepAlive", true.into()),
        ("ThrottleInterval", THROTTLE_SECONDS.into()),
        ("ExitTimeOut", EXIT_SECONDS.into()),
        // Engines outlive their agent by a minute, so that the next agent can adopt them.
        ("AbandonProcessGroup", verb.has_engines().into()),
        // Interactive: nothing of it is background work.
        ("ProcessType", "Interactive".into()),
        ("SoftResourceLimits", files.clone().into()),
        ("HardResourceLimits", files.into()),
        ("Umask", UMASK.into()),
        ("StandardOutPath", log.clone().into()),
        ("StandardErrorPath", log.into()),
    ]);
    let mut text = Vec::new();
    Value::Dictionary(list).to_writer_xml(&mut text).context("the property list could not be written")?;
    let mut text = String::from_utf8(text).context("the property list is not UTF-8")?;
    text.push('\n');
    Ok(text)
}

fn parse(text: &str) -> Option<Dictionary> {
    Value::from_reader_xml(std::io::Cursor::new(text)).ok()?.into_dictionary()
}

/// Whether this program wrote the file: no other program's service has such a name.
pub fn is_ours(verb: Verb, text: &str) -> bool {
    parse(text).is_some_and(|list| list.get("Label").and_then(Value::as_string) == Some(&label(verb)))
}

/// The command that a service runs.
pub fn exec_command(text: &str) -> Option<String> {
    let list = parse(text)?;
    let words = list.get("ProgramArguments")?.as_array()?.iter().filter_map(Value::as_string);
    Some(words.collect::<Vec<_>>().join(" "))
}
