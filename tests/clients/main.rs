//! Real clients, of versions that xtask pins, against a gateway with a scripted model behind a real engine: agents on the
//! command line, which read, edit and run, and SDKs. Each prints a line, `client version: N passed, N failed`, with what is left out
//! and why. The test has a network of its own, with loopback and nothing else. `cargo xtask oracle clients` installs the
//! clients and names them by variables; a client without its variable does not run.

mod agents;
mod machine;
mod report;
mod routing;
mod sdks;

use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result};
use libtest_mimic::{Arguments, Trial};
use machine::Machine;
use report::ClientReport;
use russet_tests::apart;
use tokio::runtime::Runtime;

/// The machine of all clients, which the first one starts.
#[derive(Clone)]
struct SharedMachine {
    runtime: Arc<Runtime>,
    machine: Arc<Mutex<Option<Machine>>>,
}

impl SharedMachine {
    /// The report of a client.
    fn run(
        &self,
        client: impl AsyncFnOnce(&mut Machine) -> Option<ClientReport>,
    ) -> Result<Option<ClientReport>> {
        let mut machine = self.machine.lock().map_err(|_| anyhow::anyhow!("another client panicked"))?;
        self.runtime.block_on(async {
            let machine = match &mut *machine {
                Some(machine) => machine,
                none => none.insert(Machine::start().await.context("before the first client")?),
            };
            Ok(client(machine).await)
        })
    }

    fn stop(self) -> Result<()> {
        let machine = self.machine.lock().map_err(|_| anyhow::anyhow!("a client panicked"))?.take();
        self.runtime.block_on(async {
            match machine {
                Some(machine) => machine.stop().await,
                None => Ok(()),
            }
        })
    }
}

/// The trial of a client; without the variable that names its program it does not run.
fn trial(
    name: &str,
    variable: &'static str,
    shared: &SharedMachine,
    client: impl AsyncFnOnce(&mut Machine) -> Option<ClientReport> + Send + 'static,
) -> Trial {
    let shared = shared.clone();
    Trial::test(name, move || {
        if std::env::var_os(variable).is_none() {
            println!(
                "skipped: {variable} names no client; `cargo xtask oracle clients` sets it, in CI of the quickest"
            );
            return Ok(());
        }
        if !apart::is_apart() {
            println!("skipped: network namespaces are not allowed here");
            return Ok(());
        }
        let report = shared.run(client).map_err(|error| format!("{error:#}"))?;
        let report = report.ok_or("it did not run")?;
        println!("{report}");
        if report.failed.is_empty() { Ok(()) } else { Err(report.failed.join("\n").into()) }
    })
}

fn main() -> Result<()> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    if let Err(error) = apart::move_apart() {
        println!("{error:#}");
    }
    let mut arguments = Arguments::from_args();
    // They have one machine, and its cores.
    arguments.test_threads = Some(1);
    let shared = SharedMachine { runtime: Arc::new(Runtime::new()?), machine: Arc::new(Mutex::new(None)) };
    let sdks = sdks::ALL
        .iter()
        .map(|sdk| trial(sdk.name, sdk.program, &shared, async |machine| sdks::run(sdk, machine).await));
    let agents = agents::ALL.iter().map(|agent| {
        trial(agent.name, agent.program, &shared, async |machine| agents::run(agent, machine).await)
    });
    let routing =
        trial(routing::NAME, routing::PROGRAM, &shared, async |machine| routing::run(machine).await);
    let trials = sdks.chain(agents).chain([routing]).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Err(error) = shared.stop() {
        println!("{error:#}");
    }
    conclusion.exit()
}
