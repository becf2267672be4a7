//! A simulated Mac whose network can be changed, for tests of the root helper.

use std::os::unix::fs::PermissionsExt as _;

use russet_agent::helper::{Helper, HelperPolicy, HostController};

/// A Mac whose stub tools store their arguments in files of a directory. Only the output formats are macOS's;
/// none of this ever ran on a Mac.
pub struct Mac(pub tempfile::TempDir);

impl Mac {
    pub fn new() -> Self {
        let mac = Self(tempfile::tempdir().unwrap());
        mac.tool(
            "networksetup",
            r#"case "$1" in
            -listallhardwareports) printf 'Hardware Port: Ethernet\nDevice: en0\n\nHardware Port: Thunderbolt 1\nDevice: en4\n' ;;
            -listnetworkserviceorder) number=0
                while read -r name; do
                    number=$((number + 1))
                    case "$name" in Cable) device=en4 ;; *) device=en0 ;; esac
                    printf '(%s) %s\n(Hardware Port: X, Device: %s)\n\n' "$number" "$name" "$device"
                done < "$D/order" ;;
            -ordernetworkservices) shift; printf '%s\n' "$@" > "$D/order" ;;
            esac"#,
        );
        mac.tool(
            "ifconfig",
            r#"case "$*" in
            "") printf 'en0: flags=8863<UP> mtu 1500\n\tinet 192.168.1.20 netmask 0xffffff00\n'
                printf 'en4: flags=8863<UP> mtu 1500\n'
                while read -r address; do printf '\tinet %s netmask 0xfffffffc\n' "$address"; done < "$D/addresses"
                printf 'bridge0: flags=8863<UP> mtu 1500\n'
                while read -r member; do printf '\tmember: %s flags=3<LEARNING>\n' "$member"; done < "$D/members" ;;
            "bridge0 deletem en4") : > "$D/members" ;;
            "bridge0 addm en4") echo en4 > "$D/members" ;;
            "en4 inet "*" netmask 255.255.255.252 alias") echo "$3" >> "$D/addresses" ;;
            "en4 inet "*" delete") grep -v -x -F "$3" "$D/addresses" > "$D/next"; mv "$D/next" "$D/addresses" ;;
            *) echo "ifconfig: bad value: $*" >&2; exit 1 ;;
            esac"#,
        );
        mac.tool(
            "sysctl",
            r#"case "$1" in
            iogpu.wired_limit_mb=*) echo "${1#*=}" > "$D/wired" ;;
            iogpu.wired_limit_mb) echo "iogpu.wired_limit_mb: $(cat "$D/wired")" ;;
            esac"#,
        );
        for (file, text) in
            [("order", "Cable\nEthernet\n"), ("addresses", ""), ("members", "en4\n"), ("wired", "0\n")]
        {
            std::fs::write(mac.0.path().join(file), text).unwrap();
        }
        mac
    }

    /// Sets the script of a stub tool.
    pub fn tool(&self, name: &str, body: &str) {
        let path = self.0.path().join(name);
        let path_line = "PATH=/usr/bin:/bin";
        std::fs::write(&path, format!("#!/bin/sh\n{path_line}\nD=$(dirname \"$0\")\n{body}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// The order of its services, addresses of its cable, members of its bridge, and its limit of wired
    /// memory.
    pub fn state(&self) -> [String; 4] {
        ["order", "addresses", "members", "wired"]
            .map(|file| std::fs::read_to_string(self.0.path().join(file)).unwrap())
    }

    /// A root helper for it, with its journal beside the tools.
    pub fn helper(&self, boot: &str) -> Helper {
        let policy = HelperPolicy { wired_percent: Some(50), memory: 64 << 30 };
        let machine = HostController::new(Some(self.0.path().to_owned()), None);
        Helper::open(machine, policy, &self.0.path().join("state"), boot).unwrap()
    }
}
