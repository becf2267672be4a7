//! The unit of a service, and the user it runs as. Pure text functions. `docs/service.md` explains the lines.

use std::path::Path;

use russet_rpc::tls::identity_dir;

use super::spec::{HomeAccess, ServiceSpec, Verb};

/// First line of every file; files without it are not removed or replaced.
const MARK: &str = "# Written by `russet service install`";

/// Whether this program wrote a file.
pub fn is_ours(text: &str) -> bool {
    text.starts_with(MARK)
}

/// The service's `User=`, created by `systemd-sysusers` when the machine starts.
pub fn sysusers(user: &str) -> String {
    format!("{MARK}: the user that Russet's services run as.\nu {user} - \"Russet\" - -\n")
}

/// The unit.
pub fn unit(service: &ServiceSpec) -> String {
    let ServiceSpec { verb, argv, programs: _, user, data_dir, environment, homes, low_port } = service;
    let mut text = format!(
        "{MARK}; overwritten by the next install. Keep your own changes in a drop-in: systemctl edit {}\n",
        name(*verb)
    );
    let mut section = |title: &str, lines: Vec<String>| {
        text.push_str(&format!("\n[{title}]\n"));
        for line in lines {
            text.push_str(&line);
            text.push('\n');
        }
    };
    section("Unit", unit_section(*verb, data_dir));
    section("Service", {
        let mut lines =
            vec!["Type=exec".to_owned(), format!("User={user}"), format!("ExecStart={}", command(argv))];
        lines.extend(restart_options(*verb));
        // After the built-in variables, which these may override.
        for (name, value) in environment {
            lines.push(format!("Environment={}", quoted(&format!("{name}={value}"), false)));
        }
        lines.extend(sandbox_options(*verb, data_dir, *homes, *low_port));
        lines
    });
    section("Install", vec!["WantedBy=multi-user.target".to_owned()]);
    text
}

/// Name of a unit.
pub fn name(verb: Verb) -> String {
    format!("russet-{}.service", verb.word())
}

fn unit_section(verb: Verb, data_dir: &Path) -> Vec<String> {
    let mut lines = vec![
        format!("Description={}", verb.description()),
        // The helper sets up part of the network, and does not wait for it.
        if verb == Verb::Helper { "" } else { "Wants=network-online.target" }.to_owned(),
        // After a control plane on the same machine, if there is one.
        match verb {
            Verb::Up => "After=network-online.target".to_owned(),
            // Before its clients.
            Verb::Helper => "Before=russet-agent.service russet-up.service".to_owned(),
            _ => "After=network-online.target russet-up.service".to_owned(),
        },
        // No start limit: the service may wait for another machine.
        "StartLimitIntervalSec=0".to_owned(),
    ];
    lines.retain(|line| !line.is_empty());
    if verb == Verb::Agent {
        // A machine that has left its cluster has nothing to run.
        let joined = data_dir.join("agent").join(identity_dir::KUBECONFIG);
        lines.push(format!("ConditionPathExists={}", joined.display().to_string().replace('%', "%%")));
    }
    lines
}

/// Stop and restart options.
fn restart_options(verb: Verb) -> Vec<String> {
    let mut lines = vec!["Restart=always", "RestartSec=2", "TimeoutStopSec=30"];
    if verb.has_engines() {
        // Engines outlive their agent by a minute, so that the next agent can adopt them: neither a restart
        // nor one engine that ran out of memory may stop the others.
        lines.extend(["KillMode=process", "OOMPolicy=continue"]);
        // %p is the unit's name. Sockets with long paths are in the temporary folder, which must survive a
        // restart too.
        lines.extend(["RuntimeDirectory=%p", "RuntimeDirectoryMode=0700", "RuntimeDirectoryPreserve=yes"]);
        lines.extend(["Environment=TMPDIR=%t/%p", "LimitMEMLOCK=infinity"]);
    }
    if verb == Verb::Helper {
        // Its socket is there; the agent's user has to reach it.
        lines.extend(["RuntimeDirectory=russet", "RuntimeDirectoryMode=0755"]);
    }
    lines.extend(["LimitNOFILE=65536", "LimitCORE=0"]);
    lines.into_iter().map(str::to_owned).collect()
}

/// Sandbox options.
fn sandbox_options(verb: Verb, data_dir: &Path, homes: HomeAccess, low_port: bool) -> Vec<String> {
    let data_dir = quoted(&data_dir.display().to_string(), false);
    let home = match homes {
        HomeAccess::Hidden => "yes",
        HomeAccess::Read => "read-only",
        HomeAccess::Written => "no",
    };
    let port = if low_port { "CAP_NET_BIND_SERVICE" } else { "" };
    // The helper changes networks, and gives its socket to the agent's user.
    let bounds = if verb == Verb::Helper { "CAP_NET_ADMIN CAP_CHOWN" } else { port };
    let mut lines = vec![
        "UMask=0077".to_owned(),
        format!("CapabilityBoundingSet={bounds}"),
        format!("AmbientCapabilities={port}"),
        "NoNewPrivileges=yes".to_owned(),
        "ProtectSystem=strict".to_owned(),
        format!("ReadWritePaths={data_dir}"),
        format!("ProtectHome={home}"),
        "PrivateTmp=yes".to_owned(),
        "ProtectProc=invisible".to_owned(),
        "ProtectHostname=yes".to_owned(),
        "ProtectKernelLogs=yes".to_owned(),
        "ProtectKernelModules=yes".to_owned(),
        "ProtectKernelTunables=yes".to_owned(),
        "ProtectControlGroups=yes".to_owned(),
        "RestrictNamespaces=yes".to_owned(),
        "RestrictRealtime=yes".to_owned(),
        "RestrictSUIDSGID=yes".to_owned(),
        "LockPersonality=yes".to_owned(),
        "SystemCallArchitectures=native".to_owned(),
        "SystemCallFilter=@system-service".to_owned(),
        "SystemCallErrorNumber=EPERM".to_owned(),
    ];
    // Netlink is needed to list the machine's interfaces.
    let families =
        if verb == Verb::Helper { "AF_UNIX AF_NETLINK" } else { "AF_UNIX AF_INET AF_INET6 AF_NETLINK" };
    lines.push(format!("RestrictAddressFamilies={families}"));
    if verb == Verb::Helper {
        lines.push("IPAddressDeny=any".to_owned());
    }
    if !verb.has_engines() {
        // Engines need the machine's GPUs and RDMA devices, and their libraries generate code at run time.
        // ProtectClock= is here because it blocks all other devices.
        let closed = ["PrivateDevices=yes", "ProtectClock=yes", "MemoryDenyWriteExecute=yes"];
        lines.extend(closed.map(str::to_owned));
    }
    lines
}

/// A command line in systemd's syntax.
fn command(argv: &[String]) -> String {
    let words: Vec<String> = argv.iter().map(|word| quoted(word, true)).collect();
    words.join(" ")
}

/// A word in systemd's quoting. `%` begins a specifier everywhere, `$` a variable in commands only.
fn quoted(word: &str, command: bool) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_@:/.,=+-[]".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    let mut out = String::from("\"");
    for letter in word.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            '%' => out.push_str("%%"),
            '$' if command => out.push_str("$$"),
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

/// The command line in a unit.
pub fn exec_command(text: &str) -> Option<String> {
    text.lines().find_map(|line| line.strip_prefix("ExecStart=")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_program_as_they_were_written() {
        for (word, expected) in [
            ("--node-name", "--node-name"),
            ("mqtts://me@[fd00::2]:8883", "mqtts://me@[fd00::2]:8883"),
            ("", "\"\""),
            ("two words", "\"two words\""),
            ("100%", "\"100%%\""),
            ("$HOME", "\"$$HOME\""),
            (r#"a"b\c"#, r#""a\"b\\c""#),
            ("it's;|&", "\"it's;|&\""),
            ("Büro", "\"Büro\""),
        ] {
            assert_eq!(quoted(word, true), expected);
        }
        assert_eq!(quoted("NAME=$x y", false), "\"NAME=$x y\"");
    }
}
