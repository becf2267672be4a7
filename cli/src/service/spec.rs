//! A validated service: a verb of this program with its options, made independent of a home folder, a working
//! directory and an environment. The options come from the command-line definition, so a new one needs no
//! change here.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use clap::builder::{Resettable, ValueParser};
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory as _};

use super::manager::Manager;
use super::secrets;

/// Verbs that can be a service.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// The node agent of a machine that has joined.
    Agent,
    /// A control plane, its gateway and its agent.
    Up,
    /// The gateway alone.
    Gateway,
    /// The operator alone.
    Operator,
    /// The root helper of a machine whose agent may change its network.
    Helper,
}

impl Verb {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Agent, Self::Up, Self::Gateway, Self::Operator, Self::Helper];

    /// The verb as typed.
    pub fn word(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Up => "up",
            Self::Gateway => "gateway",
            Self::Operator => "operator",
            Self::Helper => "helper",
        }
    }

    /// Description for service listings.
    pub fn description(self) -> &'static str {
        match self {
            Self::Agent => "Russet node agent",
            Self::Up => "Russet control plane, gateway and node agent",
            Self::Gateway => "Russet gateway",
            Self::Operator => "Russet operator",
            Self::Helper => "Russet root helper",
        }
    }

    /// Whether it starts engines, which need devices, wired memory, and to outlive it by a minute.
    pub fn has_engines(self) -> bool {
        matches!(self, Self::Agent | Self::Up)
    }
}

/// The requested service.
pub struct ServiceRequest {
    /// The service manager.
    pub manager: Manager,
    /// User that runs it.
    pub user: String,
    /// The program.
    pub program: PathBuf,
    /// Variables given explicitly.
    pub environment: BTreeMap<String, String>,
    /// The caller's environment.
    pub caller_environment: BTreeMap<String, String>,
    /// The verb and its options.
    pub command: Vec<String>,
}

/// Variables without a flag that a service needs.
const CARRIED: [&str; 8] = [
    russet_telemetry::logs::FILTER_VARIABLE,
    "HF_ENDPOINT",
    // For downloads; the control plane is reached directly.
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
];

/// Why a secret may not be in a service's file.
const READABLE: &str = "which every user could read in the service's file";

/// Whether a flag or variable names a program, or a folder of programs.
fn is_program(flag: &str) -> bool {
    matches!(flag, "--engine-binary" | "RUSSET_ENGINE" | "--fabric-tools" | "RUSSET_FABRIC_TOOLS" | "--tools")
}

/// Access to home folders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HomeAccess {
    /// None: it needs nothing there.
    Hidden,
    /// Read access.
    Read,
    /// Write access: its data folder is there.
    Written,
}

/// A validated service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSpec {
    /// What it runs.
    pub verb: Verb,
    /// The program and all its arguments.
    pub argv: Vec<String>,
    /// The programs among them.
    pub programs: Vec<PathBuf>,
    /// User that runs it.
    pub user: String,
    /// Folder of its state.
    pub data_dir: PathBuf,
    /// Its environment.
    pub environment: BTreeMap<String, String>,
    /// Access to home folders.
    pub homes: HomeAccess,
    /// Whether it listens on a privileged port, below 1024.
    pub low_port: bool,
}

/// Parses `NAME=VALUE` arguments.
pub fn assignments(given: &[String]) -> Result<BTreeMap<String, String>> {
    let read = |text: &String| {
        let (name, value) =
            text.split_once('=').with_context(|| format!("--env {text} is not NAME=VALUE"))?;
        let mut letters = name.chars();
        let begins = letters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        ensure!(
            begins && letters.all(|c| c.is_ascii_alphanumeric() || c == '_'),
            "--env {text}: {name:?} is not the name of a variable"
        );
        Ok((name.to_owned(), value.to_owned()))
    };
    given.iter().map(read).collect()
}

impl ServiceSpec {
    /// Validates the request.
    pub fn new(request: ServiceRequest) -> Result<Self> {
        let ServiceRequest { manager, user, program, environment: named, caller_environment: here, command } =
            request;
        let (word, options) =
            command.split_first().context("name a verb: agent, up, gateway, operator or helper")?;
        let verb = Verb::ALL.into_iter().find(|verb| verb.word() == word).with_context(|| match word.as_str() {
            "join" => "a service cannot join: its token would be in a world-readable file. Join once with `russet join … --no-agent`, then install `agent`".to_owned(),
            _ => format!("{word} cannot be a service; agent, up, gateway, operator and helper can"),
        })?;
        ensure!(
            user.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                && user.len() <= 31
                && user.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-')),
            "--user {user:?} is not the name of a user"
        );
        let parsed = ParsedOptions::read(verb, options, &here)?;
        let is_helper = verb == Verb::Helper;
        let own = if is_helper { manager.helper_dir() } else { manager.data_dir() };
        let data_dir = parsed.data_dir.clone().unwrap_or_else(|| own.into());
        let mut argv = vec![text(&program)?, word.clone()];
        argv.extend(options.iter().cloned());
        if parsed.takes_data_dir && parsed.data_dir.is_none() {
            argv.extend(["--data-dir".to_owned(), text(&data_dir)?]);
        }
        // The requests come from the agent's user; the helper runs as root.
        let user = if is_helper {
            argv.extend(["--user".to_owned(), user]);
            argv.extend(["--state".to_owned(), text(&data_dir)?]);
            "root".to_owned()
        } else {
            user
        };
        check(&program, &argv, parsed.paths.iter())?;
        let carried = CARRIED.iter().filter_map(|name| Some(((*name).to_owned(), here.get(*name)?.clone())));
        let mut environment: BTreeMap<String, String> = carried.collect();
        environment.extend(parsed.environment);
        environment.extend(named);
        for (name, value) in &environment {
            ensure!(
                !secrets::in_name(name) && !parsed.secret_variables.contains(name),
                "the variable {name} holds a secret, {READABLE}; set it in a file of mode 600 that a drop-in names (systemd: EnvironmentFile=), or give a Model's source a Secret (`russet credentials`)"
            );
            if let Some(words) = secrets::in_value(value) {
                bail!(
                    "the variable {name}: {words}, {READABLE}; leave the login out, or set the variable in a file of mode 600 that a drop-in names (systemd: EnvironmentFile=)"
                );
            }
            ensure!(!value.contains(char::is_control), "the variable {name} holds a control character");
        }
        let mut programs = vec![program.clone()];
        programs
            .extend(parsed.paths.iter().filter(|(flag, _)| is_program(flag)).map(|(_, path)| path.clone()));
        let read = parsed.paths.iter().map(|(_, path)| path).chain([&program]);
        let mut homes =
            read.map(|path| if is_in_home(path) { HomeAccess::Read } else { HomeAccess::Hidden }).max();
        // Its agent reads the models of its user, as when a person starts it.
        if verb == Verb::Up || parsed.paths.iter().any(|(_, path)| path == Path::new("/")) {
            homes = homes.max(Some(HomeAccess::Read));
        }
        if is_in_home(&data_dir) {
            homes = Some(HomeAccess::Written);
        }
        let homes = homes.unwrap_or(HomeAccess::Hidden);
        Ok(Self { verb, argv, programs, user, data_dir, environment, homes, low_port: parsed.low_port })
    }
}

/// The options as the command line parses them.
struct ParsedOptions {
    takes_data_dir: bool,
    data_dir: Option<PathBuf>,
    /// Every file and folder, by flag.
    paths: Vec<(String, PathBuf)>,
    /// Values from environment variables, by name.
    environment: BTreeMap<String, String>,
    /// Variables of flags whose values the help hides.
    secret_variables: BTreeSet<String>,
    low_port: bool,
}

impl ParsedOptions {
    fn read(verb: Verb, options: &[String], here: &BTreeMap<String, String>) -> Result<Self> {
        let whole = crate::Arguments::command();
        let known = whole.find_subcommand(verb.word()).context("the verb is not known")?.clone();
        // Variables are read here, and not from this process's environment.
        let mut bare = known.clone().no_binary_name(true).mut_args(|arg| arg.env(Resettable::Reset));
        let matches = match bare.try_get_matches_from_mut(options) {
            Ok(matches) => matches,
            Err(error) => bail!("`russet {}` does not take these options:\n{error}", verb.word()),
        };
        let given = |id| matches.value_source(id) == Some(ValueSource::CommandLine);
        ensure!(
            verb != Verb::Helper || !(given("user") || given("state") || given("revert")),
            "a service names its helper's user by --user before the verb, and keeps its journal where uninstalling finds it: leave out --user, --state and --revert behind it"
        );
        ensure!(
            !matches!(matches.try_get_one::<bool>("exit_with_parent"), Ok(Some(true))),
            "--exit-with-parent would end the service at once: it has no standard input"
        );
        let mut read = Self {
            takes_data_dir: known.get_arguments().any(|arg| arg.get_id() == "data_dir"),
            data_dir: matches.try_get_one::<PathBuf>("data_dir").ok().flatten().cloned(),
            paths: Vec::new(),
            environment: BTreeMap::new(),
            secret_variables: BTreeSet::new(),
            low_port: false,
        };
        for arg in known.get_arguments() {
            let id = arg.get_id().as_str();
            let flag = format!("--{}", arg.get_long().unwrap_or(id));
            let kind = arg.get_value_parser().type_id();
            let is_path = kind == ValueParser::path_buf().type_id();
            let variable = arg.get_env().and_then(OsStr::to_str);
            let from_variable = variable.and_then(|name| Some((name, here.get(name)?)));
            let given = matches.value_source(id) == Some(ValueSource::CommandLine);
            if arg.is_hide_env_values_set() {
                ensure!(!given, "{flag} is a secret, {READABLE}");
                read.secret_variables.extend(variable.map(str::to_owned));
            }
            if !given && let Some((name, value)) = from_variable {
                read.environment.insert(name.to_owned(), value.clone());
                if is_path {
                    read.paths.push((name.to_owned(), value.into()));
                }
                continue;
            }
            if is_path {
                let paths = values::<PathBuf>(&matches, id);
                read.paths.extend(paths.into_iter().map(|path| (flag.clone(), path)));
            } else if kind == ValueParser::from(clap::value_parser!(SocketAddr)).type_id() {
                read.low_port |=
                    values::<SocketAddr>(&matches, id).iter().any(|at| is_privileged_port(at.port()));
            } else if kind == ValueParser::from(clap::value_parser!(u16)).type_id() && id.ends_with("port") {
                read.low_port |= values::<u16>(&matches, id).into_iter().any(is_privileged_port);
            }
        }
        Ok(read)
    }
}

fn values<T: Clone + Send + Sync + 'static>(matches: &ArgMatches, id: &str) -> Vec<T> {
    matches.try_get_many::<T>(id).ok().flatten().map(|values| values.cloned().collect()).unwrap_or_default()
}

/// Port zero means any free port.
fn is_privileged_port(port: u16) -> bool {
    (1..1024).contains(&port)
}

fn text(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Rejects options that would mean something else in a service, or would be visible to all users.
fn check<'a>(
    program: &Path,
    argv: &[String],
    named: impl Iterator<Item = &'a (String, PathBuf)>,
) -> Result<()> {
    let plain = |c: char| c.is_alphanumeric() || "/._-+ ".contains(c);
    ensure!(
        program.is_absolute() && text(program)?.chars().all(plain),
        "--program {} must be an absolute path of letters, digits, spaces and / . _ - +",
        program.display()
    );
    for (flag, path) in named {
        ensure!(
            path.is_absolute(),
            "{flag} {} is a relative path, which a service resolves from /; write {}",
            path.display(),
            std::path::absolute(path).unwrap_or_else(|_| path.clone()).display()
        );
    }
    for argument in argv {
        ensure!(!argument.contains(char::is_control), "{argument:?} holds a control character");
        if let Some(words) = secrets::in_value(argument) {
            bail!("{words}, {READABLE}; name a file with the password instead");
        }
    }
    Ok(())
}

/// Folders that `ProtectHome=` hides, and macOS's home folders.
fn is_in_home(path: &Path) -> bool {
    ["/home", "/root", "/run/user", "/Users"].iter().any(|homes| path.starts_with(homes))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]
    use super::*;

    fn made(command: &str) -> Result<ServiceSpec> {
        ServiceSpec::new(ServiceRequest {
            manager: Manager::Systemd,
            user: "russet".into(),
            program: "/usr/local/bin/russet".into(),
            environment: BTreeMap::new(),
            caller_environment: BTreeMap::new(),
            command: command.split_whitespace().map(str::to_owned).collect(),
        })
    }

    #[test]
    fn options_unfit_for_a_service_are_refused_with_a_remedy() {
        for (command, words) in [
            ("join https://a:6443 --token t", "--no-agent"),
            ("doctor", "doctor cannot be a service"),
            ("agent --no-such-flag", "does not take these options"),
            ("agent --data-dir state", "write /"),
            ("agent --allow-file-root models", "--allow-file-root models is a relative path"),
            ("gateway --kubeconfig k", "--kubeconfig k is a relative path"),
            ("agent --mqtt mqtt://me:secret@host", "holds a login"),
            ("agent --mqtt mqtt://me:se/secret@host", "holds a login"),
            ("up --exit-with-parent", "no standard input"),
        ] {
            let error = format!("{:#}", made(command).unwrap_err());
            assert!(error.contains(words), "{command}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
        for user in ["", "a b", "$(id)", "root\n", "-x", "0"] {
            let request = ServiceRequest {
                manager: Manager::Systemd,
                user: user.into(),
                program: "/r".into(),
                environment: BTreeMap::new(),
                caller_environment: BTreeMap::new(),
                command: vec!["agent".into()],
            };
            assert!(ServiceSpec::new(request).is_err(), "{user:?}");
        }
        assert!(assignments(&["A=b=c".to_owned()]).unwrap().get("A").is_some_and(|value| value == "b=c"));
        for bad in ["A", "=b", "A B=c", "1=2"] {
            assert!(assignments(&[bad.to_owned()]).is_err(), "{bad}");
        }
    }

    #[test]
    fn homes_are_hidden_unless_something_needed_lies_there() {
        for (command, homes, low_port) in [
            ("agent", HomeAccess::Hidden, false),
            ("agent --allow-file-root /srv/models", HomeAccess::Hidden, false),
            ("agent --allow-file-root /home/me/models", HomeAccess::Read, false),
            ("agent --allow-file-root /", HomeAccess::Read, false),
            ("agent --data-dir /home/me/.russet", HomeAccess::Written, false),
            ("up", HomeAccess::Read, false),
            ("up --gateway-listen 0.0.0.0:443", HomeAccess::Read, true),
            ("up --gateway-port 80", HomeAccess::Read, true),
            ("gateway --listen 0.0.0.0:8443", HomeAccess::Hidden, false),
            ("operator --kubeconfig /root/k", HomeAccess::Read, false),
        ] {
            let service = made(command).unwrap();
            assert_eq!((service.homes, service.low_port), (homes, low_port), "{command}");
        }
    }

    #[test]
    fn service_records_variables_that_no_flag_overrides() {
        let made = |command: &str, engine: &str| {
            let here = [("RUSSET_ENGINE", engine), ("RUSSET_LOG", "debug"), ("HOME", "/root")];
            ServiceSpec::new(ServiceRequest {
                manager: Manager::Systemd,
                user: "russet".into(),
                program: "/usr/local/bin/russet".into(),
                environment: BTreeMap::from([("A".to_owned(), "b".to_owned())]),
                caller_environment: here.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
                command: command.split_whitespace().map(str::to_owned).collect(),
            })
        };
        let names = |service: &ServiceSpec| service.environment.keys().cloned().collect::<Vec<_>>().join(" ");
        let carried = made("agent", "/home/me/engine").unwrap();
        assert_eq!(
            (names(&carried).as_str(), carried.homes),
            ("A RUSSET_ENGINE RUSSET_LOG", HomeAccess::Read)
        );
        let flag = made("agent --engine-binary /opt/engine", "/home/me/engine").unwrap();
        assert_eq!((names(&flag).as_str(), flag.homes), ("A RUSSET_LOG", HomeAccess::Hidden));
        let error = made("agent", "target/engine").unwrap_err().to_string();
        assert!(error.starts_with("RUSSET_ENGINE target/engine is a relative path"), "{error}");
    }

    #[test]
    fn no_secret_gets_into_a_service_s_file() {
        let made = |name: &str, value: &str, by_flag: bool| {
            let variable = BTreeMap::from([(name.to_owned(), value.to_owned())]);
            let (environment, caller_environment) =
                if by_flag { (variable, BTreeMap::new()) } else { (BTreeMap::new(), variable) };
            ServiceSpec::new(ServiceRequest {
                manager: Manager::Systemd,
                user: "russet".into(),
                program: "/usr/local/bin/russet".into(),
                environment,
                caller_environment,
                command: vec!["agent".into()],
            })
        };
        for (name, value, by_flag) in [
            ("HF_ENDPOINT", "https://me:secret@mirror", false),
            ("HF_ENDPOINT", "https://secret@mirror", false),
            ("HTTPS_PROXY", "http://me:secret@proxy:8080", false),
            ("HF_ENDPOINT", "https://me:secret@mirror", true),
            ("HF_TOKEN", "secret", true),
            ("ANY", "a,b=https://mirror/?token=secret", true),
        ] {
            let error = format!("{:#}", made(name, value, by_flag).unwrap_err());
            assert!(error.contains(name) && error.contains("every user could read"), "{error}");
            assert!(!error.contains("=secret") && !error.contains("secret@"), "{error}");
        }
        // Of the caller's environment only what a service needs is looked at.
        assert!(made("HF_TOKEN", "secret", false).unwrap().environment.is_empty());
        let proxy = made("HTTPS_PROXY", "http://proxy:8080", false).unwrap();
        assert_eq!(proxy.environment["HTTPS_PROXY"], "http://proxy:8080");
    }

    #[test]
    fn every_option_is_carried_and_the_folder_is_named() {
        let service = made("agent --node-name studio-1 --memory 64Gi").unwrap();
        let expected =
            "/usr/local/bin/russet agent --node-name studio-1 --memory 64Gi --data-dir /var/lib/russet";
        assert_eq!(service.argv.join(" "), expected);
        let named = made("gateway --data-dir /srv/russet").unwrap();
        assert_eq!(named.argv.join(" "), "/usr/local/bin/russet gateway --data-dir /srv/russet");
        assert_eq!(named.data_dir, Path::new("/srv/russet"));
        // The operator has no data folder.
        assert_eq!(made("operator").unwrap().argv.join(" "), "/usr/local/bin/russet operator");
    }
}
