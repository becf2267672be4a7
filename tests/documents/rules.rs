//! What stands in the pages for things of the reader's own, and what the test uses instead; and the commands that it
//! does not execute, each with the reason. A rule that no page needs any more fails.

use std::net::SocketAddr;

use crate::reader::Reader;

/// What exists when a reader opens the first page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// The checkout and what was built.
    Checkout,
    /// `russet up` on this machine, which `kubectl` knows, and `russet` in the PATH.
    Cluster,
}

/// A page, and commands of the reader's own before it.
pub struct Page {
    /// Its path.
    pub name: &'static str,
    /// The commands.
    pub before: &'static [&'static str],
}

/// Readers by the name of their test, and the pages they read one after the other on their cluster.
pub const READERS: [(&str, Given, &[Page]); 3] = [
    ("commands_of_the_readme_end_as_it_says", Given::Checkout, &[Page { name: "README.md", before: &[] }]),
    (
        "commands_of_the_quickstart_end_as_it_says",
        Given::Checkout,
        &[Page { name: "docs/quickstart.md", before: &[] }],
    ),
    (
        "commands_of_catalog_routes_gateway_and_plan_end_so",
        Given::Cluster,
        &[
            // Leaves the deployment `smoke`, which the next pages ask.
            Page { name: "docs/catalog.md", before: &[] },
            Page { name: "docs/routes.md", before: &[] },
            Page { name: "docs/providers.md", before: &[] },
            Page { name: "docs/budgets.md", before: &[] },
            Page { name: "docs/inbox.md", before: &[] },
            Page { name: "docs/batches.md", before: &[] },
            Page { name: "docs/pipelines.md", before: &[] },
            Page { name: "docs/cost.md", before: &[] },
            Page { name: "docs/gateway.md", before: &[] },
            Page {
                name: "docs/plan.md",
                before: &[
                    // The page before stopped the cluster and started it again.
                    "russet wait modeldeployment/smoke",
                    // The described cluster of the page's first commands.
                    "russet get russet -A -o yaml > cluster.yaml",
                    // The nodes that the page labels.
                    "kubectl apply -f nodes.yaml",
                ],
            },
        ],
    ),
];

/// A command that is not executed.
pub struct Exception {
    /// How the command begins.
    pub command: &'static str,
    /// Why it is not executed.
    pub why: &'static str,
}

/// Commands that are not executed.
pub const EXCEPTIONS: &[Exception] = &[
    Exception { command: "cargo xtask demo", why: "a step of .ci/run executes it" },
    Exception {
        command: "russet up --mqtt mqtts://me@homeassistant.local",
        why: "needs a broker; `cargo xtask oracle inbox` has a real one",
    },
    Exception {
        command: "cargo xtask test",
        why: "a step of .ci/run executes it, and this test would start itself",
    },
    Exception {
        command: "russet run qwen3-8b-4bit",
        why: "needs the internet: a model of 4.3 GiB from the hub",
    },
    Exception {
        command: "curl http://127.0.0.1:52415/v1/chat/completions -H 'content-type: application/json' -d '{\n  \"model\": \"qwen3-30b\"",
        why: "needs a model that calls tools, of 17 GiB; the scenario of tests/e2e/tools.rs makes such rounds",
    },
    Exception {
        command: "russet token create",
        why: "needs a second machine, and opens the API server to the network; tests/services executes what it prints",
    },
];

/// Text of a page, and what the test writes instead.
pub struct Substitution {
    /// The text of the page.
    pub text: &'static str,
    /// What the test writes.
    pub with: fn(&Reader) -> String,
}

/// Placeholders of the pages, and what only one program of a machine can have.
pub const SUBSTITUTIONS: &[Substitution] = &[
    Substitution { text: "/tmp/", with: |reader| format!("{}/", reader.path("tmp").display()) },
    // This test was built by it.
    Substitution { text: "cargo xtask build", with: |_| "true".to_owned() },
    // The model folder of the reader.
    Substitution {
        text: "/home/me/models/tiny-llama",
        with: |reader| reader.path("home/models/tiny-llama").display().to_string(),
    },
    // Files of the reader.
    Substitution { text: "C.pem", with: |reader| reader.path("cert.pem").display().to_string() },
    Substitution { text: "K.pem", with: |reader| reader.path("key.pem").display().to_string() },
    Substitution {
        text: "--kubeconfig F --data-dir D",
        with: |reader| {
            let (kubeconfig, folder) =
                (reader.path("home/.russet/gateway/kubeconfig"), reader.path("gateway"));
            format!("--kubeconfig {} --data-dir {}", kubeconfig.display(), folder.display())
        },
    },
    // A gateway of its own has a machine of its own; here `russet up` has these ports.
    Substitution {
        text: "--listen 127.0.0.1:52415 --listen 0.0.0.0:8443",
        with: |_| "--listen 127.0.0.1:52416 --listen 0.0.0.0:8444".to_owned(),
    },
];

/// Arguments of a program that keeps running, which ends with the test; `None` for every other command.
pub fn server_arguments(command: &str) -> Option<&'static str> {
    match command.split_whitespace().take(2).collect::<Vec<_>>()[..] {
        // The test's network has loopback alone.
        ["russet", "up"] => Some("--address 127.0.0.1 --exit-with-parent"),
        ["russet", "gateway"] => Some("--exit-with-parent"),
        _ => None,
    }
}

/// Addresses that such a program serves: the gateway's own and those that the command names.
pub fn server_addresses(command: &str) -> Vec<SocketAddr> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let own = if words.starts_with(&["russet", "up"]) { "127.0.0.1:52415" } else { "" };
    let named = words.windows(2).filter(|pair| ["--listen", "--gateway-listen"].contains(&pair[0]));
    [own].into_iter().chain(named.map(|pair| pair[1])).filter_map(|address| address.parse().ok()).collect()
}

/// The exit code of a command that shows this output.
pub fn exit_code(command: &str, shown: &str) -> i32 {
    match () {
        () if shown.starts_with("error: ") => 1,
        // docs/plan.md: at least one replica cannot be placed.
        () if command.starts_with("russet plan ") && shown.contains("not placed") => 3,
        () => 0,
    }
}

/// Text that the output must contain, for a command or program that contains the other: the smoke model can add.
pub const ANSWERS: &[(&str, &str)] = &[("17 + 25", "42")];

/// Whether this exception is about that command.
pub fn excepts(exception: &Exception, command: &str) -> bool {
    command.starts_with(exception.command)
}

/// A text with every substitution, in one pass.
pub fn substitute(text: &str, reader: &Reader) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        match SUBSTITUTIONS.iter().find(|rule| rest.starts_with(rule.text)) {
            Some(rule) => {
                out += &(rule.with)(reader);
                rest = &rest[rule.text.len()..];
            }
            None => {
                out.push(letter);
                rest = &rest[letter.len_utf8()..];
            }
        }
    }
    out
}
