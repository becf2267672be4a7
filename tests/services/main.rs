//! `russet service` on machines with a real systemd: units start, are killed, restart, survive the machine's
//! restart and confine their processes; every printed command is executed, as root and so without sudo.
//! `cargo xtask oracle services` runs it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

use std::path::PathBuf;
use std::time::Duration;

use russet_tests::SMOKE;
use russet_tests::booted::{BootedMachine, LIBRARIES, PROGRAM};

/// An address for a port, kept over the machine's restart.
const CABLE: &str = r#"
apiVersion: russet.dev/v1alpha1
kind: InferenceNode
metadata: {name: box}
spec:
  network: {ports: [{interface: cable0, address: 172.31.240.1/30}], afterRestart: Keep}
"#;
/// Requests of the inbox when the machine ends.
const REQUESTS: usize = 20;
const ASK: &str = r#"curl -s -o /dev/null -w '%{http_code} ' http://127.0.0.1:52415/v1/chat/completions -H 'prefer: respond-async' -H 'content-type: application/json' -d '{"model": "smoke", "messages": [{"role": "user", "content": "Count"}], "min_tokens": 60, "max_tokens": 60}'"#;
const ENGINES: &str = "pgrep russet-engine || true";

/// `systemd-nspawn`, or why there is none.
fn nspawn() -> Option<PathBuf> {
    let program = std::env::var_os(PROGRAM).map(PathBuf::from);
    if program.is_none() {
        assert!(std::env::var_os("RUSSET_ORACLES").is_none(), "{PROGRAM} names no program");
        println!("skipped: {PROGRAM} names no program; `cargo xtask oracle services` finds one");
    } else if !rustix::process::geteuid().is_root() {
        println!("skipped: only root may switch a machine on");
        return None;
    }
    program
}

/// Installs a verb as a service and executes all printed commands. A query is repeated until it succeeds; the
/// join command is returned.
fn install(machine: &BootedMachine, command: &str) -> Option<String> {
    let install = format!("russet service install --env LD_LIBRARY_PATH={LIBRARIES}/mlx/lib {command}");
    let said = machine.run(&install).unwrap();
    let steps: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("  sudo ")).collect();
    assert!(steps.len() >= 3, "{said}");
    let (join, steps): (Vec<&str>, Vec<&str>) = steps.into_iter().partition(|step| step.contains(" join "));
    for step in steps {
        match step.contains(" get ") {
            true => drop(machine.until(&line(step), |_| true).unwrap()),
            false => drop(machine.run(&line(step)).unwrap()),
        }
    }
    join.first().map(|step| line(step))
}

/// The command after `sudo`; the machine has none, and its root needs none.
fn line(step: &str) -> String {
    match step.strip_prefix("-u ").and_then(|rest| rest.split_once(' ')) {
        Some((user, command)) => format!("runuser -u {user} -- {command}"),
        None => step.to_owned(),
    }
}

/// A verb for the machine's own control plane, as the user it belongs to.
fn own(verb: &str) -> String {
    format!("runuser -u russet -- russet {verb} --data-dir /var/lib/russet")
}

/// A property of a service, from systemd.
fn shown(machine: &BootedMachine, unit: &str, property: &str) -> String {
    let line = format!("systemctl show --value --property={property} russet-{unit}.service");
    machine.run(&line).unwrap().trim().to_owned()
}

/// Waits for the model's correct answer to its smoke prompt; returns how long that took.
fn answers(machine: &BootedMachine) -> Duration {
    let ask = "run smoke --prompt 'What is 17 + 25?' --temperature 0 --timeout-seconds 5";
    let (said, waited) = machine.until(&own(ask), |said| !said.is_empty()).unwrap();
    assert_eq!(said.trim(), "17 + 25 = 42.");
    waited
}

#[test]
fn control_plane_restarts_itself_and_its_engines_survive() {
    let Some(nspawn) = nspawn() else { return };
    let mut machine = BootedMachine::start(&nspawn, "up").unwrap();
    install(&machine, "up --node-name box --gateway-listen 127.0.0.1:443");
    let status = machine.run("russet service status").unwrap();
    assert!(status.contains("state active (running), enabled, 0 restarts"), "{status}");
    machine.run(&format!("echo '{SMOKE}' | {}", own("apply -f -"))).unwrap();
    println!("it answers after {:.1?}", answers(&machine));
    // A port below 1024, with the one capability that the unit has for it.
    machine.until("ss --listening --tcp --numeric", |said| said.contains("127.0.0.1:443")).unwrap();

    let (engine, first) = (machine.run(ENGINES).unwrap(), shown(&machine, "up", "MainPID"));
    machine.run("systemctl kill --kill-who=main --signal=KILL russet-up").unwrap();
    let restarts = "systemctl show --value --property=NRestarts russet-up";
    let (_, waited) = machine.until(restarts, |said| said.trim() == "1").unwrap();
    println!("killed, it was started again after {waited:.1?} and answers {:.1?} later", answers(&machine));
    assert_ne!(shown(&machine, "up", "MainPID"), first);
    assert_eq!(machine.run(ENGINES).unwrap(), engine, "the engine outlives who started it");

    machine.run("systemctl restart russet-up").unwrap();
    println!("restarted, it answers after {:.1?}", answers(&machine));
    assert_eq!(machine.run(ENGINES).unwrap(), engine, "an update of the programs ends no engine");

    machine.run("systemctl kill --signal=KILL russet-up").unwrap();
    machine.until(ENGINES, |said| !said.contains(engine.trim())).unwrap();
    println!("everything killed, it answers after {:.1?}", answers(&machine));

    // Requests of the inbox are answered though the machine ends with a part of them.
    let accepted = machine.run(&format!("for n in $(seq {REQUESTS}); do {ASK} & done; wait")).unwrap();
    assert_eq!(accepted.matches("202").count(), REQUESTS, "{accepted}");
    println!("the machine ends at once and starts anew within {:.1?}", machine.crash().unwrap());
    let inbox = "curl -s 'http://127.0.0.1:52415/v1/inbox?limit=100'";
    let is_done = |said: &str| said.matches("\"status\":\"done\"").count() == REQUESTS;
    let (said, waited) = machine.until(inbox, is_done).unwrap();
    let again = said.matches("\"attempts\":2").count();
    println!("{REQUESTS} requests are answered {waited:.1?} later, {again} of them in their second life");

    let boot = machine.run("cat /proc/sys/kernel/random/boot_id").unwrap();
    println!("the machine starts anew within {:.1?}", machine.restart().unwrap());
    assert_ne!(machine.run("cat /proc/sys/kernel/random/boot_id").unwrap(), boot);
    println!("after its restart, with nobody logged in, it answers after {:.1?}", answers(&machine));
    let journal = machine.run("journalctl --boot --no-pager --unit=russet-up").unwrap();
    assert!(journal.contains("Russet is up."), "{journal}");

    assert!(machine.run(&own("logs")).unwrap().contains("/var/lib/russet/logs/serve.log"));

    let refused = machine.run("russet service uninstall up").unwrap_err().to_string();
    let stop = refused.lines().find_map(|line| line.strip_prefix("  sudo ")).expect(&refused);
    machine.run(&line(stop)).unwrap();
    machine.run("russet service uninstall up").unwrap();
    assert_eq!(machine.run("find /etc/systemd /etc/sysusers.d -name '*russet*'").unwrap(), "");
    assert!(machine.run("russet service status").is_err());
}

/// The kernel's view of a service's process: its user, its capabilities, and whether its calls are filtered.
fn bounds(machine: &BootedMachine, unit: &str) -> (String, String) {
    let line = format!("cat /proc/{}/status", shown(machine, unit, "MainPID"));
    let status = machine.run(&line).unwrap();
    let value = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().to_owned()
    };
    assert_eq!((value("NoNewPrivs:"), value("Seccomp:")), ("1".into(), "2".into()), "{unit}");
    (value("Uid:"), value("CapBnd:"))
}

#[test]
fn services_start_in_order_and_keep_their_sandbox() {
    let Some(nspawn) = nspawn() else { return };
    let mut machine = BootedMachine::start(&nspawn, "all").unwrap();
    install(&machine, "up --no-agent");
    // A machine that has not joined has nothing to run, and that is no failure.
    let join = install(&machine, "agent --node-name box --memory 2Gi").unwrap();
    assert_eq!(
        (shown(&machine, "agent", "ConditionResult"), shown(&machine, "agent", "ActiveState")),
        ("no".into(), "inactive".into())
    );
    let token = machine.run(&own("token create --server https://127.0.0.1:6443")).unwrap();
    let (token, address) = token.trim().split_once(" russet join ").unwrap();
    let given = format!("{address} --token {}", token.strip_prefix("RUSSET_TOKEN=").unwrap());
    assert!(join.contains("URL --token T"), "{join}");
    machine.run(&format!("{} --node-name box", join.replace("URL --token T", &given))).unwrap();
    machine.run("systemctl start russet-agent").unwrap();
    install(&machine, "gateway --kubeconfig /var/lib/russet/kubeconfig --listen 127.0.0.1:52416");
    install(&machine, "operator --kubeconfig /var/lib/russet/kubeconfig");
    // The helper is configured to treat interfaces with this prefix as Thunderbolt's.
    let cable = "ip link add cable0 type veth peer name far0";
    machine.run(cable).unwrap();
    install(&machine, "helper --interface-prefix cable");

    machine.run(&format!("echo '{SMOKE}' | {}", own("apply -f -"))).unwrap();
    answers(&machine);
    machine.run(&format!("echo '{CABLE}' | {}", own("apply -f -"))).unwrap();
    let address = "ip -brief address show cable0";
    let (_, waited) = machine.until(address, |said| said.contains("172.31.240.1/30")).unwrap();
    println!("the root helper gave the port its address after {waited:.1?}");

    let user = machine.run("id --user russet").unwrap().trim().to_owned();
    for (unit, owner, most) in [
        ("up", user.as_str(), "0000000000000000"),
        ("agent", &user, "0000000000000000"),
        ("gateway", &user, "0000000000000000"),
        ("operator", &user, "0000000000000000"),
        // CAP_CHOWN and CAP_NET_ADMIN.
        ("helper", "0", "0000000000001001"),
    ] {
        assert_eq!(bounds(&machine, unit), (owner.to_owned(), most.to_owned()), "{unit}");
        assert_eq!(shown(&machine, unit, "NRestarts"), "0", "{unit}");
    }

    println!("the machine starts anew within {:.1?}", machine.restart().unwrap());
    answers(&machine);
    let started =
        |unit: &str| shown(&machine, unit, "ExecMainStartTimestampMonotonic").parse::<u64>().unwrap();
    let [helper, up, agent, gateway, operator] =
        ["helper", "up", "agent", "gateway", "operator"].map(started);
    assert!(helper < up && up < agent && up < gateway && up < operator);
    assert!(machine.run("russet service status").is_ok());
    // A cable that is plugged in again gets its kept settings again.
    assert!(machine.run(address).is_err());
    machine.run(cable).unwrap();
    machine.until(address, |said| said.contains("172.31.240.1/30")).unwrap();
    let reverted = machine.run("russet helper --revert").unwrap();
    assert!(reverted.contains("cable0"), "{reverted}");
    assert!(!machine.run(address).unwrap().contains("172.31.240.1"));
}
