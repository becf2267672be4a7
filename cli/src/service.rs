//! `russet service`: makes a verb of this program a systemd or launchd service that starts with the machine
//! and runs as its own user; only the root helper runs as root. Files are written and removed here. Nothing
//! is started or stopped: the commands for that are printed.

mod files;
mod launchd;
mod manager;
mod secrets;
mod spec;
mod systemd;
pub mod trusted_path;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use self::files::WriteOutcome;
use self::manager::Manager;
use self::spec::{ServiceSpec, Verb};
use crate::stdout::{out, outln};

/// Default user of this system's services.
pub const USER: &str = Manager::OF_THIS_SYSTEM.user();

/// Arguments of `russet service`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: ServiceAction,
}

#[derive(clap::Subcommand)]
enum ServiceAction {
    /// Write the files that make a verb of this program a service, and print the command that starts it.
    Install(Install),
    /// Remove the files of a stopped service.
    Uninstall {
        /// The service.
        #[arg(value_enum)]
        verb: Verb,
        #[command(flatten)]
        place: ServiceLocation,
        /// Remove the files even if another program wrote them.
        #[arg(long)]
        force: bool,
    },
    /// Show the installed services and their state according to the service manager.
    Status {
        #[command(flatten)]
        place: ServiceLocation,
    },
}

/// Where service files are.
#[derive(clap::Args)]
struct ServiceLocation {
    /// Folder to use as the root of the file system; the service manager is then not queried.
    #[arg(long)]
    root: Option<PathBuf>,
    /// Service manager whose files to use; default this system's own.
    #[arg(long, value_enum)]
    system: Option<Manager>,
}

#[derive(clap::Args)]
struct Install {
    #[command(flatten)]
    place: ServiceLocation,
    /// Print the files instead of writing them.
    #[arg(long, visible_alias = "dry-run")]
    print: bool,
    /// User that runs the service, or for `helper` the user that may send requests; default `russet`, on
    /// macOS `_russet`.
    #[arg(long)]
    user: Option<String>,
    /// Program to run; default this one.
    #[arg(long)]
    program: Option<PathBuf>,
    /// Environment variable of the service, NAME=VALUE; may be given several times.
    #[arg(long = "env")]
    environment: Vec<String>,
    /// The verb: `agent` on a machine that has joined, `up`, `gateway`, `operator` or `helper`; then its
    /// options.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "VERB")]
    command: Vec<String>,
}

/// Runs the subcommand.
pub fn run(arguments: Arguments) -> Result<()> {
    match arguments.action {
        ServiceAction::Install(asked) => install(asked),
        ServiceAction::Uninstall { verb, place, force } => uninstall(verb, &place, force),
        ServiceAction::Status { place } => status(&place),
    }
}

impl ServiceLocation {
    fn manager(&self) -> Manager {
        self.system.unwrap_or(Manager::OF_THIS_SYSTEM)
    }

    fn root(&self) -> PathBuf {
        self.root.clone().unwrap_or_else(|| "/".into())
    }

    /// The service manager, if it can be queried about these files.
    fn live_manager(&self) -> Option<Manager> {
        let manager = self.manager();
        (self.root.is_none() && manager.runs_here()).then_some(manager)
    }
}

fn install(asked: Install) -> Result<()> {
    let Install { place, print, user, program, environment, command } = asked;
    let manager = place.manager();
    let program = match program {
        Some(program) => program,
        None => std::env::current_exe()
            .and_then(std::fs::canonicalize)
            .context("cannot tell where this program is; name it with --program")?,
    };
    // Ignore files that are not text: they are not services of ours.
    let text =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    let request = spec::ServiceRequest {
        manager,
        user: user.unwrap_or_else(|| manager.user().to_owned()),
        program,
        environment: spec::assignments(&environment)?,
        caller_environment: std::env::vars_os().filter_map(text).collect(),
        command,
    };
    let service = ServiceSpec::new(request)?;
    // Below another root are the files of another machine, whose helper checks itself when it starts.
    if service.user == "root" && place.root.is_none() {
        for program in &service.programs {
            trusted_path::check(program)?;
        }
    }
    let files = manager.files(&service)?;
    if print {
        for file in &files {
            outln!("# {} (mode {:o})\n{}", file.path.display(), file.mode, file.text)?;
        }
    } else {
        let root = place.root();
        for file in &files {
            let outcome = files::write(&root, file)?;
            let path = files::under_root(&root, &file.path);
            match outcome {
                WriteOutcome::Unchanged => outln!("{} is up to date", path.display())?,
                WriteOutcome::Written => outln!("{} was written", path.display())?,
            }
        }
    }
    out!("{}", manager::format_steps(&manager.steps(&service)))?;
    Ok(())
}

fn uninstall(verb: Verb, place: &ServiceLocation, force: bool) -> Result<()> {
    let (manager, root) = (place.manager(), place.root());
    let name = manager.name(verb);
    if let Some(manager) = place.live_manager()
        && let Some(state) = manager.query(verb)?
        && state.loaded
    {
        bail!(
            "{name} is {}; stop it first:\n{}",
            state.words,
            manager::indented(&manager.stop_command(verb))
        );
    }
    let path = manager.path(verb);
    let mut removed = files::remove(&root, &path, |text| manager.is_ours(verb, text), force)?;
    // All services of the machine share the user.
    let others = Verb::ALL.iter().any(|other| files::under_root(&root, &manager.path(*other)).exists());
    if let Some(shared) = manager.shared().filter(|_| !others) {
        removed |= files::remove(&root, &shared, systemd::is_ours, force)?;
    }
    ensure!(removed, "{name} is not installed: there is no {}", files::under_root(&root, &path).display());
    outln!("{name} is uninstalled; its user, its data and its logs are kept")?;
    Ok(())
}

fn status(place: &ServiceLocation) -> Result<()> {
    let (manager, root) = (place.manager(), place.root());
    let (mut lines, mut down) = (Vec::new(), 0_u32);
    for verb in Verb::ALL {
        let path = files::under_root(&root, &manager.path(verb));
        let Some(text) = files::read(&path)? else { continue };
        lines.push(format!("{}: {}", manager.name(verb), path.display()));
        let command = manager.command(&text).unwrap_or_else(|| "unknown".to_owned());
        lines.push(format!("  runs  {command}"));
        if !manager.is_ours(verb, &text) {
            lines.push("  note  russet did not write this file".to_owned());
        }
        if let Some(manager) = place.live_manager() {
            let state = manager.query(verb)?;
            down += u32::from(!state.as_ref().is_some_and(|state| state.runs));
            lines.push(format!("  state {}", state.map_or("not loaded".to_owned(), |state| state.words)));
        }
    }
    ensure!(
        !lines.is_empty(),
        "no service of Russet is installed below {}; install one with `russet service install agent`",
        root.display()
    );
    outln!("{}", lines.join("\n"))?;
    if place.live_manager().is_none() {
        outln!("{manager} was not queried: it does not run here, or the files are below another root")?;
    }
    ensure!(down == 0, "{down} of the services do not run");
    Ok(())
}
