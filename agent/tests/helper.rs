//! The root helper on real interfaces in a network namespace of its own, killed at every step; and on a Mac
//! simulated by stub tools, over its socket.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, whichever function of it does")]

#[path = "cluster/mac_network.rs"]
mod changing;

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use russet_agent::helper::{
    HelperReply, HelperRequest, HelperSocket, MachineRequest, Network, Port, RestartPolicy, UnchangedParts,
    send_request,
};

use self::changing::Mac;

/// A network namespace, kept by a process of the test.
struct NetworkNamespace {
    holder: Child,
    state: tempfile::TempDir,
}

impl Drop for NetworkNamespace {
    fn drop(&mut self) {
        self.holder.kill().ok();
        self.holder.wait().ok();
    }
}

impl NetworkNamespace {
    /// `None`, with the reason printed, where namespaces cannot be created.
    fn new() -> Option<Self> {
        if !rustix::process::getuid().is_root() {
            println!("skipped: only root makes network namespaces");
            return None;
        }
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo made; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let space = Self { holder, state: tempfile::tempdir().unwrap() };
        if line.trim() != "made" {
            println!("skipped: network namespaces cannot be made here");
            return None;
        }
        // A port in a bridge, and a port that is down with an address in another network; both simulate
        // Thunderbolt.
        for words in [
            "link add tb0 type veth peer name far0",
            "link add tb1 type veth peer name far1",
            "link add br0 type bridge",
            "link set br0 up",
            "link set tb0 up",
            "link set far0 up",
            "link set far1 up",
            "link set tb0 master br0",
            "addr add 192.168.7.1/24 broadcast 192.168.7.255 dev tb1",
            "addr add 10.200.0.1/16 dev br0",
        ] {
            assert!(space.run("ip", words.split(' ')).status().unwrap().success(), "ip {words}");
        }
        Some(space)
    }

    fn run<'a>(&self, program: &str, words: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.holder.id())).arg(program).args(words);
        command
    }

    /// Network state without counters and self-settling parts: IPv6 addresses appear a moment after an
    /// interface is up.
    fn network_state(&self) -> String {
        let output = self.run("ip", ["-4", "-o", "addr", "show"]).output().unwrap().stdout;
        let links = self.run("ip", ["-o", "link", "show"]).output().unwrap().stdout;
        let links = String::from_utf8(links).unwrap();
        let word = |line: &str| {
            let up = line.contains(",UP") || line.contains("<UP");
            let master = line.split(" master ").nth(1).and_then(|rest| rest.split(' ').next());
            format!("{:?} up {up} master {master:?}\n", line.split(' ').nth(1))
        };
        links.lines().map(word).collect::<String>() + std::str::from_utf8(&output).unwrap()
    }

    fn run_helper(&self, request: &HelperRequest, boot: &str, kill: Option<String>) -> std::process::Output {
        let request = serde_json::to_string(request).unwrap();
        let state = self.state.path().to_str().unwrap();
        let mut command = self.run(program().to_str().unwrap(), [state, "tb", boot, &request]);
        command.envs(kill.map(|kill| ("RUSSET_KILL", kill))).output().unwrap()
    }

    /// Reverts everything at the machine, and empties the node's request.
    fn revert(&self) {
        self.apply(&HelperRequest::Revert {}, "one");
        self.apply(&empty_request(), "one");
    }

    fn apply(&self, request: &HelperRequest, boot: &str) -> (Vec<String>, Vec<String>) {
        let output = self.run_helper(request, boot, None);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        match serde_json::from_slice(&output.stdout).unwrap() {
            HelperReply::Done { changed, held } => (changed, held),
            other => panic!("{other:?}"),
        }
    }

    /// Whether it was killed at `point` for that time.
    fn apply_with_kill(&self, request: &HelperRequest, point: &str, count: usize) -> bool {
        let output = self.run_helper(request, "one", Some(format!("{point}:{count}")));
        assert!(
            output.status.success() || output.status.signal() == Some(9),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        !output.status.success()
    }
}

fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let program = own.parent().unwrap().parent().unwrap().join("examples/helper");
    assert!(program.exists(), "{} is missing; run the tests with cargo test", program.display());
    program
}

fn apply_request(ports: &[(&str, &str)], after_restart: RestartPolicy) -> HelperRequest {
    let port = |(interface, address): &(&str, &str)| Port {
        interface: (*interface).to_owned(),
        address: (*address).to_owned(),
    };
    let ports = ports.iter().map(port).collect();
    let network = Some(Network { ports, cables_last: false, after_restart });
    HelperRequest::Apply(MachineRequest { node: "a".to_owned(), network, ..MachineRequest::default() })
}

fn empty_request() -> HelperRequest {
    HelperRequest::Apply(MachineRequest { node: "a".to_owned(), ..MachineRequest::default() })
}

fn two_port_request(after_restart: RestartPolicy) -> HelperRequest {
    apply_request(&[("tb0", "172.31.240.1/30"), ("tb1", "172.31.240.5/30")], after_restart)
}

#[test]
fn helper_changes_apply_once_and_revert_completely() {
    let Some(space) = NetworkNamespace::new() else { return };
    let before = space.network_state();
    let (changed, held) = space.apply(&two_port_request(RestartPolicy::Drop), "one");
    assert_eq!(
        changed,
        [
            "tb0 left br0",
            "tb0 has 172.31.240.1/30",
            "tb1 lost 192.168.7.1/24",
            "tb1 is up",
            "tb1 has 172.31.240.5/30"
        ]
    );
    assert_eq!(changed, held);
    let applied = space.network_state();
    assert!(applied.contains("172.31.240.1/30") && !applied.contains("192.168.7.1"), "{applied}");
    assert_eq!(
        space.apply(&two_port_request(RestartPolicy::Drop), "one").0,
        Vec::<String>::new(),
        "it is so already"
    );
    assert_eq!(space.network_state(), applied);

    // Another request undoes only what it does not contain.
    let (changed, _) = space.apply(&apply_request(&[("tb0", "172.31.240.9/30")], RestartPolicy::Drop), "one");
    assert_eq!(changed.first().map(String::as_str), Some("reverted: tb1 has 172.31.240.5/30"));
    assert_eq!(changed.last().map(String::as_str), Some("tb0 has 172.31.240.9/30"));
    assert_eq!(changed.len(), 5, "{changed:?}");

    // A node cannot undo another node's changes; an empty request undoes its own.
    let other = HelperRequest::Apply(MachineRequest { node: "b".to_owned(), ..MachineRequest::default() });
    assert_eq!(space.apply(&other, "one").0, Vec::<String>::new());
    let (changed, held) = space.apply(
        &HelperRequest::Apply(MachineRequest { node: "a".to_owned(), ..MachineRequest::default() }),
        "one",
    );
    assert_eq!((changed.len(), held.len()), (2, 0), "{changed:?}");
    assert_eq!(space.network_state(), before);
}

#[test]
fn helper_killed_at_any_step_can_revert_everything() {
    let Some(space) = NetworkNamespace::new() else { return };
    let before = space.network_state();
    let apply = two_port_request(RestartPolicy::Drop);
    space.apply(&apply, "one");
    let applied = space.network_state();
    space.revert();
    assert_eq!(space.network_state(), before);

    let mut kills = 0;
    for point in ["helper-journalled", "helper-made"] {
        for count in 1..=5 {
            assert!(
                space.apply_with_kill(&apply, point, count),
                "{point} is never come to for the {count}th time"
            );
            assert_ne!(
                count > 1 || point == "helper-made",
                space.network_state() == before,
                "{point} {count}"
            );
            space.revert();
            assert_eq!(space.network_state(), before, "reverted after a kill at {point} {count}");

            assert!(space.apply_with_kill(&apply, point, count));
            space.apply(&apply, "one");
            assert_eq!(space.network_state(), applied, "went on after a kill at {point} {count}");
            space.revert();
            assert_eq!(space.network_state(), before);
            kills += 2;
        }
    }
    for point in ["helper-undone", "helper-forgotten"] {
        for count in 1..=5 {
            space.apply(&apply, "one");
            assert!(space.apply_with_kill(&HelperRequest::Revert {}, point, count), "{point} {count}");
            space.revert();
            assert_eq!(space.network_state(), before, "reverted after a kill at {point} {count}");
            kills += 1;
        }
    }
    println!("{kills} kills");
}

#[test]
fn reboot_drops_temporary_settings_and_reapplies_kept_ones() {
    for (after_restart, again) in [(RestartPolicy::Drop, false), (RestartPolicy::Keep, true)] {
        let Some(space) = NetworkNamespace::new() else { return };
        let before = space.network_state();
        space.apply(&two_port_request(after_restart), "one");
        let applied = space.network_state();
        // Simulate a restart: the network's configuration is lost.
        for words in [
            "addr flush dev tb0",
            "addr flush dev tb1",
            "link set tb1 down",
            "link set tb0 master br0",
            "addr add 192.168.7.1/24 broadcast 192.168.7.255 dev tb1",
        ] {
            assert!(space.run("ip", words.split(' ')).status().unwrap().success(), "ip {words}");
        }
        assert_eq!(space.network_state(), before);
        let (_, held) = space.apply(&HelperRequest::Read {}, "two");
        assert_eq!(held.len(), if again { 5 } else { 0 }, "{held:?}");
        assert_eq!(space.network_state(), if again { applied } else { before.clone() });
        space.apply(&HelperRequest::Revert {}, "two");
        assert_eq!(space.network_state(), before);
    }
}

/// The request for a Mac in these tests.
fn mac_request() -> HelperRequest {
    let ports = vec![Port { interface: "en4".to_owned(), address: "172.31.240.1/30".to_owned() }];
    let network = Some(Network { ports, cables_last: true, after_restart: RestartPolicy::Drop });
    let wired_limit_mebibytes = Some(20_000);
    HelperRequest::Apply(MachineRequest {
        node: "a".to_owned(),
        network,
        wired_limit_mebibytes,
        ..MachineRequest::default()
    })
}

#[tokio::test]
async fn mac_network_is_changed_over_the_socket_and_reverted() {
    let mac = Mac::new();
    let before = mac.state();
    let at: PathBuf = mac.0.path().join("run/helper.sock");
    let socket = HelperSocket::bind(&at, rustix::process::getuid().as_raw()).unwrap();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(mac.helper("one").serve(socket, async {
        ended.await.ok();
    }));
    let HelperReply::Done { changed, .. } = send_request(&at, &mac_request()).await.unwrap() else {
        panic!()
    };
    assert_eq!(
        changed,
        [
            "en4 left bridge0",
            "en4 has 172.31.240.1/30",
            "services of cables come last",
            "the GPU may wire 20000 MiB"
        ]
    );
    assert_eq!(mac.state(), ["Ethernet\nCable\n", "172.31.240.1\n", "", "20000\n"].map(str::to_owned));
    let again = send_request(&at, &mac_request()).await.unwrap();
    assert!(matches!(&again, HelperReply::Done { changed, held } if changed.is_empty() && held.len() == 4));

    // Incomplete, unknown and oversized requests are answered and do no harm.
    for line in [&b"{\"op\":\"run\"}\n"[..], b"no end", b"\xff\n", &[b' '; 100_000]] {
        let mut stream = tokio::net::UnixStream::connect(&at).await.unwrap();
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        // It may have refused before the last byte arrived.
        stream.write_all(line).await.ok();
        stream.shutdown().await.ok();
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer).await {
            Ok(_) => {
                assert!(String::from_utf8_lossy(&answer).contains("does not know the request"), "{line:?}")
            }
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{line:?}"),
        }
    }
    let HelperReply::Failed { why } = ({
        mac.tool("sysctl", "case \"$1\" in *=*) echo 'Operation not permitted' >&2; exit 1;; *) echo 'iogpu.wired_limit_mb: 20000';; esac");
        send_request(&at, &HelperRequest::Revert {}).await.unwrap()
    }) else {
        panic!()
    };
    assert_eq!(why, "`sysctl iogpu.wired_limit_mb=0` failed: Operation not permitted");
    // A refused part does not block the others, and reverted changes are not applied again for a repeated
    // request.
    assert_eq!(mac.state(), ["Cable\nEthernet\n", "", "en4\n", "20000\n"].map(str::to_owned));
    let HelperReply::Refused { why } = send_request(&at, &mac_request()).await.unwrap() else { panic!() };
    assert!(why.contains("reverted at the machine itself"), "{why}");
    end.send(()).unwrap();
    serving.await.unwrap();
    assert!(!at.exists());

    // A failed undo is retried when possible: the order of services survives a restart, everything else does
    // not.
    std::fs::write(mac.0.path().join("addresses"), "").unwrap();
    std::fs::write(mac.0.path().join("members"), "en4\n").unwrap();
    std::fs::write(mac.0.path().join("wired"), "0\n").unwrap();
    let mut helper = mac.helper("two");
    helper.resume_after_boot().await.unwrap();
    assert_eq!(mac.state(), before);
    let held = helper.handle(HelperRequest::Read {}).await;
    assert_eq!(held, HelperReply::Done { changed: Vec::new(), held: Vec::new() });
}

#[tokio::test]
async fn helper_reapplies_only_requested_changes() {
    let mac = Mac::new();
    let before = mac.state();
    let mut helper = mac.helper("one");
    let HelperRequest::Apply(whole) = mac_request() else { panic!() };
    let done = |answer: HelperReply| match answer {
        HelperReply::Done { changed, .. } => changed,
        other => panic!("{other:?}"),
    };
    done(helper.handle(mac_request()).await);
    let applied = mac.state();
    let leave = |network, wired_limit| UnchangedParts { network, wired_limit };
    // A request without the network, then one without the limit.
    let wired = MachineRequest { network: None, leave: leave(true, false), ..whole.clone() };
    let network = MachineRequest { wired_limit_mebibytes: None, leave: leave(false, true), ..whole.clone() };
    for request in [wired, network] {
        assert_eq!(done(helper.handle(HelperRequest::Apply(request)).await), Vec::<String>::new());
        assert_eq!(mac.state(), applied);
    }
    // The whole request is still in force when the helper restarts.
    assert_eq!(done(helper.handle(mac_request()).await), Vec::<String>::new());

    done(helper.handle(HelperRequest::Revert {}).await);
    assert_eq!(mac.state(), before);
    for leave in [leave(false, false), leave(true, false), leave(false, true)] {
        let request = MachineRequest { leave, ..whole.clone() };
        let refused = helper.handle(HelperRequest::Apply(request)).await;
        assert!(matches!(&refused, HelperReply::Refused { why } if why.contains("reverted")), "{refused:?}");
    }
    done(helper.handle(empty_request()).await);
    assert_eq!(done(helper.handle(mac_request()).await).len(), 4);
    assert_eq!(mac.state(), applied);
}

#[tokio::test]
async fn helper_refuses_other_users() {
    let mac = Mac::new();
    if !rustix::process::getuid().is_root() {
        println!("skipped: only root can ask as somebody else");
        return;
    }
    let at = mac.0.path().join("helper.sock");
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(mac.0.path(), open.clone()).unwrap();
    let socket = HelperSocket::bind(&at, 4321).unwrap();
    // Every user may connect here, so that the kernel's peer credentials decide and not the file's mode.
    std::fs::set_permissions(&at, open).unwrap();
    let serving = tokio::spawn(mac.helper("one").serve(socket, std::future::pending()));
    let asker = mac.0.path().join("asker");
    // A child copies it: a descriptor open for writing here would be inherited by the children of other tests, and the
    // kernel executes no file that is open for writing (ETXTBSY).
    let copied = tokio::process::Command::new("cp").arg(program()).arg(&asker).status().await.unwrap();
    assert!(copied.success(), "{copied}");
    for (user, words) in [("4321", "Ok(Done {"), ("4322", "Err(Closed(")] {
        let mut command = tokio::process::Command::new("setpriv");
        let command = command.args(["--reuid", user, "--clear-groups"]).arg(&asker).arg("ask").arg(&at);
        let heard = command.output().await.unwrap();
        assert!(String::from_utf8_lossy(&heard.stdout).starts_with(words), "{user}: {heard:?}");
    }
    serving.abort();
}
