//! mlx-lm in a process of its own, with the same work in the same run, and the output of figures.

#![allow(dead_code, reason = "each of its users needs another part")]

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A process of mlx-lm.
pub struct MlxLmProcess {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Drop for MlxLmProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl MlxLmProcess {
    /// Starts it, pinned to a core if one is given; as a rank of a sharded model if there are hosts.
    pub fn start(model: &Path, core: Option<usize>, hosts: Option<&Path>) -> Self {
        let python =
            std::env::var_os("RUSSET_PYTHON").expect("RUSSET_PYTHON; use `cargo xtask bench engine`");
        let environment = std::env::var("RUSSET_PYTHON_ENV").unwrap_or_else(|_| "{}".into());
        let environment: HashMap<String, String> = serde_json::from_str(&environment).unwrap();
        let mut command = match core {
            None => Command::new(python),
            Some(core) => {
                let mut command = Command::new("taskset");
                command.args(["-c", &core.to_string()]).arg(python);
                command
            }
        };
        if let (Some(rank), Some(hosts)) = (core, hosts) {
            command.env("MLX_RANK", rank.to_string()).env("MLX_HOSTFILE", hosts);
        }
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/support/peer.py");
        command.envs(environment).arg(script).arg(model);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    /// Sends it work; read the result with `answer`.
    pub fn ask(&mut self, work: &str) {
        writeln!(self.input, "{work}").unwrap();
        self.input.flush().unwrap();
    }

    /// The result of the last work.
    pub fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            self.output.read_line(&mut line).unwrap();
            assert!(!line.is_empty(), "mlx-lm ended");
            // It prints this once, when the model is loaded.
            if line.trim() != "ready" {
                return line.trim().to_owned();
            }
        }
    }
}

/// The median.
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints one figure for `cargo xtask bench engine`: the ratio to the peer must reach a minimum; for
/// milliseconds, less is better.
pub fn tell(what: &str, unit: &str, least: f64, ours: f64, peer: f64) {
    let figure = serde_json::json!({"what": what, "unit": unit, "least": least, "ours": ours, "peer": peer});
    println!("{figure}");
}
