//! Machines as network namespaces, with rate-limited links between them. All are removed on drop.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// Namespaces, by number.
pub struct SpreadLab {
    names: Vec<String>,
    /// `ip` of each link's end, by machine.
    ends: Vec<Vec<String>>,
}

fn run(program: &str, words: &str) -> Result<()> {
    let output = Command::new(program).args(words.split_whitespace()).output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {words} failed: {}", said.trim());
    Ok(())
}

/// Rate limit of an end of a link, with a queue of a tenth of a second.
fn limit(verb: &str, namespace: &str, device: &str, mbit: u64) -> Result<()> {
    run(
        "tc",
        &format!(
            "-n {namespace} qdisc {verb} dev {device} root tbf rate {mbit}mbit burst 256kb latency 30ms"
        ),
    )
}

impl SpreadLab {
    fn namespaces(count: usize) -> Result<Self> {
        let mut lab = Self { names: Vec::new(), ends: vec![Vec::new(); count] };
        for number in 0..count {
            let name = format!("rsspread{}-{number}", std::process::id());
            run("ip", &format!("netns add {name}"))?;
            run("ip", &format!("-n {name} link set lo up"))?;
            lab.names.push(name);
        }
        Ok(lab)
    }

    /// Two machines, with a link of each of these limits in Mbit/s.
    pub fn links(limits: &[u64]) -> Result<Self> {
        let mut lab = Self::namespaces(2)?;
        for (number, &mbit) in limits.iter().enumerate() {
            let (here, there) = (lab.names[0].clone(), lab.names[1].clone());
            run(
                "ip",
                &format!("link add l{number} netns {here} type veth peer name l{number} netns {there}"),
            )?;
            for (machine, namespace) in [here, there].iter().enumerate() {
                let address = format!("10.77.{number}.{}", machine + 1);
                run("ip", &format!("-n {namespace} addr add {address}/30 dev l{number}"))?;
                run("ip", &format!("-n {namespace} link set l{number} up"))?;
                limit("add", namespace, &format!("l{number}"), mbit)?;
                lab.ends[machine].push(address);
            }
        }
        Ok(lab)
    }

    /// This many machines on one switch with ports of `mbit`; the switch is another namespace.
    pub fn switch(count: usize, mbit: u64) -> Result<Self> {
        let mut lab = Self::namespaces(count + 1)?;
        let switch = lab.names[count].clone();
        run("ip", &format!("-n {switch} link add switch type bridge"))?;
        run("ip", &format!("-n {switch} link set switch up"))?;
        for number in 0..count {
            let own = lab.names[number].clone();
            run("ip", &format!("link add l0 netns {own} type veth peer name p{number} netns {switch}"))?;
            run("ip", &format!("-n {switch} link set p{number} master switch up"))?;
            let address = format!("10.78.0.{}", number + 1);
            run("ip", &format!("-n {own} addr add {address}/24 dev l0"))?;
            run("ip", &format!("-n {own} link set l0 up"))?;
            limit("add", &own, "l0", mbit)?;
            limit("add", &switch, &format!("p{number}"), mbit)?;
            lab.ends[number].push(address);
        }
        Ok(lab)
    }

    /// Changes the limit of a link.
    pub fn limit(&self, link: usize, mbit: u64) -> Result<()> {
        self.names.iter().try_for_each(|name| limit("change", name, &format!("l{link}"), mbit))
    }

    /// Pulls a link.
    pub fn cut(&self, link: usize) -> Result<()> {
        run("ip", &format!("-n {} link set l{link} down", self.names[0]))
    }

    /// The first address of a machine.
    pub fn ip(&self, machine: usize) -> &str {
        &self.ends[machine][0]
    }

    /// The same with a port.
    pub fn at(&self, machine: usize, port: u16) -> String {
        format!("{}:{port}", self.ip(machine))
    }

    /// Every address of a machine, with a port.
    pub fn addresses(&self, machine: usize, port: u16) -> Vec<String> {
        self.ends[machine].iter().map(|ip| format!("{ip}:{port}")).collect()
    }

    /// `from>to` of each link, from the second machine to a port of the first.
    pub fn paths(&self, port: u16) -> Vec<String> {
        let ends = self.ends[1].iter().zip(&self.ends[0]);
        ends.map(|(from, to)| format!("{from}>{to}:{port}")).collect()
    }

    fn command(&self, machine: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[machine]]).arg(program);
        command
    }

    /// Run time of a program on a machine, in seconds.
    pub fn timed(&self, machine: usize, program: &str, words: &[String]) -> Result<f64> {
        let began = Instant::now();
        let output = self.command(machine, Path::new(program)).args(words).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{program} failed with {}: {}", output.status, said.trim());
        Ok(began.elapsed().as_secs_f64())
    }
}

impl Drop for SpreadLab {
    fn drop(&mut self) {
        for name in &self.names {
            run("ip", &format!("netns del {name}")).ok();
        }
    }
}

/// Result of a program of the bench.
#[derive(Debug)]
pub struct BenchReport {
    pub seconds: f64,
    /// CPU seconds of this process.
    pub cpu: f64,
    pub bytes: u64,
}

/// A program on a machine; killed on drop.
pub struct RunningBench {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl RunningBench {
    /// Starts a program of the bench and waits until it is ready.
    pub fn start(lab: &SpreadLab, machine: usize, program: &Path, words: &[&str]) -> Result<Self> {
        let mut running = Self::spawn(lab.command(machine, program).args(words))?;
        let line = running.line()?;
        ensure!(line == "ready", "{words:?} said {line:?}");
        Ok(running)
    }

    /// Starts a server and waits until it listens.
    pub fn listens(lab: &SpreadLab, machine: usize, program: &str, words: &[&str], at: &str) -> Result<Self> {
        let running = Self::spawn(lab.command(machine, Path::new(program)).args(words))?;
        let (host, port) = at.rsplit_once(':').context("an address without a port")?;
        for _ in 0..100 {
            let probe = format!("exec 3<>/dev/tcp/{host}/{port}");
            if lab.command(machine, Path::new("bash")).args(["-c", &probe]).output()?.status.success() {
                return Ok(running);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!("{program} does not listen at {at}")
    }

    fn spawn(command: &mut Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stdout.take().context("no standard output")?);
        Ok(Self { child, lines })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// Its result when it is done.
    pub fn report(&mut self) -> Result<BenchReport> {
        let line = self.line()?;
        let value: Value =
            serde_json::from_str(&line).with_context(|| format!("a program of the bench said {line:?}"))?;
        let number = |name: &str| value[name].as_f64().with_context(|| format!("no {name} in {line}"));
        Ok(BenchReport { seconds: number("seconds")?, cpu: number("cpu")?, bytes: number("bytes")? as u64 })
    }

    /// Stops it; returns its result.
    pub fn end(mut self) -> Result<BenchReport> {
        drop(self.child.stdin.take());
        self.report()
    }
}

impl Drop for RunningBench {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
