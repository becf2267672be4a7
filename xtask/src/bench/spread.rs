//! Downloads between machines: agents in network namespaces with rate-limited links.

mod lab;
mod sshd;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use self::lab::{BenchReport, RunningBench, SpreadLab};
use self::sshd::Sshd;
use super::{BenchRow, Goal};
use crate::{cargo, mlx, setup};

pub const ABOUT: &str = "A serving agent and a downloading agent (release build, mutual TLS, every chunk read again and compared \
    with its BLAKE3 hash) in two network namespaces with three links, each limited by `tbf`, a /30 each, MTU \
    1500 (of which TCP can use 0.956), into memory (`/dev/shm`); a model of 1 GiB. Limits apply to both \
    directions. A drain is three connections per link that read the output of sendfile(2) and discard it; \
    the drain into a file is the cost of a copy without encryption or verification. aria2 has the same three \
    links and sixteen connections to an HTTP server with ranges and without TLS; rsync runs over ssh with \
    its default cipher and uses the fastest link, because it can use only one. Medians of three rounds in \
    turns, each into memory that was written to just before. Three receivers and their source are on one \
    switch, each port limited to 400 Mbit/s.";

/// Size of the model, MiB.
const SIZE: u64 = 1024;
const ROUNDS: usize = 3;
/// Mbit/s of three links.
const EQUAL: [u64; 3] = [400, 400, 400];
const UNEQUAL: [u64; 3] = [800, 400, 200];

/// Builds the programs and runs all measurements.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    setup::packages(&[
        ("aria2", "is what HTTP downloads are compared with"),
        ("rsync", "is what copies are compared with"),
        ("openssh-client", "carries rsync"),
    ])?;
    Sshd::is_here()?;
    let example = ["build", "--release", "-p", "russet-agent", "--example", "spread"];
    cargo::run(&mut cargo::command(prepared, &example))?;
    let bench = SpreadBench::new(cargo::root().join("target/release/examples/spread"))?;
    let mut rows = Vec::new();
    for (limits, name) in [(EQUAL, "three equal links"), (UNEQUAL, "links of 800, 400 and 200")] {
        rows.extend(bench.links(&limits, name)?);
    }
    rows.push(bench.with_link_change(
        "a link falls to a tenth",
        |lab| lab.limit(2, EQUAL[2] / 10),
        EQUAL[2] / 10,
    )?);
    rows.push(bench.with_link_change("a link dies", |lab| lab.cut(2), 0)?);
    rows.push(bench.receivers()?);
    Ok(rows)
}

struct SpreadBench {
    program: PathBuf,
    folder: Folder,
    /// The seed's weights file.
    file: String,
    sshd: Sshd,
}

/// A folder in memory, deleted on drop.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn row(what: &str, ours: f64, peer: f64, unit: &'static str, ratio: f64, goal: Goal) -> BenchRow {
    BenchRow { area: "spread", what: what.to_owned(), ours, peer: Some(peer), unit, ratio: Some(ratio), goal }
}

impl SpreadBench {
    fn new(program: PathBuf) -> Result<Self> {
        let folder = Folder(format!("/dev/shm/russet-spread-{}", std::process::id()).into());
        std::fs::create_dir_all(&folder.0)?;
        let mut make = std::process::Command::new(&program);
        make.arg("make").arg(&folder.0).args([&SIZE.to_string(), "seed", "one", "two", "three"]);
        let output = make.output().context("the model cannot be made")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let file = String::from_utf8(output.stdout)?.trim().to_owned();
        let sshd = Sshd::new(&folder.0)?;
        Ok(Self { program, folder, file, sshd })
    }

    fn path(&self) -> &Path {
        &self.folder.0
    }

    fn folder(&self) -> String {
        self.path().display().to_string()
    }

    /// Touches this machine's free memory: on a virtual machine the host reclaims unused memory after a
    /// while, and getting it back makes the first write several times as slow.
    fn warm(&self) -> Result<()> {
        let path = self.path().join("warm");
        let mut file = std::fs::File::create(&path)?;
        let block = vec![1; 1 << 20];
        (0..SIZE).try_for_each(|_| file.write_all(&block))?;
        Ok(std::fs::remove_file(path)?)
    }

    /// A server of one kind at all addresses of the first machine of a lab.
    fn server(&self, lab: &SpreadLab, words: &[&str]) -> Result<RunningBench> {
        self.warm()?;
        let addresses = lab.addresses(0, 21_000);
        let words: Vec<&str> = words.iter().copied().chain(addresses.iter().map(String::as_str)).collect();
        RunningBench::start(lab, 0, &self.program, &words)
    }

    /// Downloads the model over all links; returns the result, and CPU seconds of both ends.
    fn pull(&self, lab: &SpreadLab, meanwhile: impl FnOnce() -> Result<()>) -> Result<(BenchReport, f64)> {
        self.forget("one")?;
        let server = self.server(lab, &["serve", &self.folder(), "seed"])?;
        let paths: Vec<String> = lab.paths(21_000).iter().map(|path| format!("seed={path}")).collect();
        let mut words = vec!["pull".to_owned(), self.folder(), "one".to_owned()];
        words.extend(paths);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut puller = RunningBench::start(lab, 1, &self.program, &words)?;
        meanwhile()?;
        let result = puller.report()?;
        let cpu = result.cpu + server.end()?.cpu;
        Ok((result, cpu))
    }

    /// Receives the output of sendfile; with a `file` into that.
    fn drain(&self, lab: &SpreadLab, file: Option<&str>) -> Result<(BenchReport, f64)> {
        let server = self.server(lab, &["pour", &self.file])?;
        let (size, paths) = (SIZE.to_string(), lab.paths(21_000));
        let target = file.map(|name| self.path().join(name).display().to_string());
        let mut words = vec![if file.is_some() { "keep" } else { "drain" }, &size];
        words.extend(target.as_deref());
        words.extend(paths.iter().map(String::as_str));
        let result = RunningBench::start(lab, 1, &self.program, &words)?.report()?;
        let cpu = result.cpu + server.end()?.cpu;
        if let Some(path) = target {
            std::fs::remove_file(path)?;
        }
        Ok((result, cpu))
    }

    fn aria2(&self, lab: &SpreadLab) -> Result<f64> {
        let server = self.server(lab, &["ranges", &self.file])?;
        let own: Vec<String> =
            lab.paths(0).iter().filter_map(|path| Some(path.split_once('>')?.0.to_owned())).collect();
        let mut words = vec![
            format!("--multiple-interface={}", own.join(",")),
            format!("--dir={}", self.path().display()),
            "--out=aria2".into(),
            "--split=16".into(),
            "--max-connection-per-server=16".into(),
            "--min-split-size=1M".into(),
            "--allow-overwrite=true".into(),
            "--file-allocation=none".into(),
            "--quiet".into(),
        ];
        let at = lab.addresses(0, 21_000);
        words.extend(at.iter().map(|address| format!("http://{address}/model.safetensors")));
        let seconds = lab.timed(1, "aria2c", &words)?;
        server.end()?;
        self.same("aria2")?;
        Ok(seconds)
    }

    /// Over the first link, with a separate sshd.
    fn rsync(&self, lab: &SpreadLab) -> Result<f64> {
        let address = &lab.addresses(0, 21_001)[0];
        let (host, port) = address.rsplit_once(':').context("an address without a port")?;
        self.warm()?;
        let daemon = ["-D", "-f", &self.sshd.config, "-p", port, "-o", &format!("ListenAddress={host}")];
        let _daemon = RunningBench::listens(lab, 0, sshd::PROGRAM, &daemon, address)?;
        let target = self.path().join("rsync").display().to_string();
        let words = [
            "--whole-file".into(),
            "--inplace".into(),
            format!("--rsh=ssh -p {port} {}", self.sshd.client),
            format!("root@{host}:{}", self.file),
            target,
        ];
        let seconds = lab.timed(1, "rsync", &words)?;
        self.same("rsync")?;
        Ok(seconds)
    }

    /// Checks that a peer's copy is identical, then deletes it.
    fn same(&self, name: &str) -> Result<()> {
        let path = self.path().join(name);
        let status =
            std::process::Command::new("cmp").arg("-s").args([&path, Path::new(&self.file)]).status()?;
        ensure!(status.success(), "what {name} copied is not the same");
        Ok(std::fs::remove_file(path)?)
    }

    fn forget(&self, node: &str) -> Result<()> {
        match std::fs::remove_dir_all(self.path().join(format!("models-{node}"))) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// All measurements over links of these limits, in turn.
    fn links(&self, limits: &[u64; 3], name: &str) -> Result<Vec<BenchRow>> {
        let lab = SpreadLab::links(limits)?;
        let (mut ours, mut drains, mut file_drains) = (Vec::new(), Vec::new(), Vec::new());
        let (mut aria2, mut rsync) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ours.push(self.pull(&lab, || Ok(()))?);
            drains.push(self.drain(&lab, None)?);
            file_drains.push(self.drain(&lab, Some("kept"))?);
            aria2.push(self.aria2(&lab)?);
            rsync.push(self.rsync(&lab)?);
        }
        let (aria2, rsync) = (median(aria2), median(rsync));
        let bytes = ours[0].0.bytes as f64;
        let [(seconds, cpu), (drained, bare), (_, stored)] = [ours, drains, file_drains].map(|runs| {
            let seconds = median(runs.iter().map(|(result, _)| result.seconds).collect());
            (seconds, median(runs.iter().map(|(_, cpu)| cpu / 1.073_741_824).collect()))
        });
        let sum = limits.iter().sum::<u64>() as f64;
        let goodput = bytes * 8.0 / seconds / 1e6;
        let of = |what: &str| format!("{what}, {name}");
        Ok(vec![
            row(
                &of("goodput of the sum of limits"),
                goodput,
                sum,
                "Mbit/s",
                goodput / sum,
                Goal::AtLeast(0.90),
            ),
            row(
                &of("verified and written, of a drain"),
                seconds,
                drained,
                "s",
                drained / seconds,
                Goal::AtLeast(0.95),
            ),
            row(
                &of("CPU of both ends a GB, of sendfile to nowhere"),
                cpu,
                bare,
                "s",
                cpu / bare,
                Goal::AtMost(3.0),
            ),
            row(
                &of("CPU of both ends a GB, of sendfile to a file"),
                cpu,
                stored,
                "s",
                cpu / stored,
                Goal::AtMost(3.0),
            ),
            row(&of("aria2 against ours"), seconds, aria2, "s", aria2 / seconds, Goal::AtLeast(1.0)),
            row(
                &of("rsync over ssh, one link, against ours"),
                seconds,
                rsync,
                "s",
                rsync / seconds,
                Goal::AtLeast(1.0),
            ),
        ])
    }

    /// After a third of the transfer, a fault hits the third of three equal links, which carries `left`
    /// Mbit/s from then on.
    fn with_link_change(
        &self,
        what: &str,
        happens: impl Fn(&SpreadLab) -> Result<()>,
        left: u64,
    ) -> Result<BenchRow> {
        let lab = SpreadLab::links(&EQUAL)?;
        let sum = EQUAL.iter().sum::<u64>() as f64 * 1e6 / 8.0;
        let bytes = (SIZE << 20) as f64;
        let before = bytes / sum / 3.0;
        let (result, _) = self.pull(&lab, || {
            std::thread::sleep(Duration::from_secs_f64(before));
            happens(&lab)
        })?;
        let after = sum - (EQUAL[2] - left) as f64 * 1e6 / 8.0;
        let ideal = before + (bytes - before * sum) / after;
        let what = format!("{what}, of the ideal");
        Ok(row(&what, result.seconds, ideal, "s", ideal / result.seconds, Goal::AtLeast(0.90)))
    }

    /// Three concurrent receivers, which can download from each other, against one.
    fn receivers(&self) -> Result<BenchRow> {
        let lab = SpreadLab::switch(4, 400)?;
        let nodes = ["seed", "one", "two", "three"];
        let receive = |receivers: std::ops::RangeInclusive<usize>| -> Result<f64> {
            let serve = lab.at(0, 21_000);
            let server =
                RunningBench::start(&lab, 0, &self.program, &["serve", &self.folder(), "seed", &serve])?;
            let mut running = Vec::new();
            for own in receivers.clone() {
                self.forget(nodes[own])?;
                let others = std::iter::once(0).chain(receivers.clone()).filter(|other| *other != own);
                let paths =
                    others.map(|other| format!("{}={}>{}", nodes[other], lab.ip(own), lab.at(other, 21_000)));
                let mut words = vec!["pull".to_owned(), self.folder(), nodes[own].to_owned()];
                words.push(format!("@{}", lab.at(own, 21_000)));
                words.extend(paths);
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                running.push(RunningBench::start(&lab, own, &self.program, &words)?);
            }
            let result: Vec<BenchReport> =
                running.iter_mut().map(RunningBench::report).collect::<Result<_>>()?;
            drop(running);
            server.end()?;
            Ok(result.iter().map(|result| result.seconds).fold(0.0, f64::max))
        };
        let (three, one) = (receive(1..=3)?, receive(1..=1)?);
        let what = "three receivers against one";
        Ok(row(what, three, one, "s", three / one, Goal::AtMost(1.25)))
    }
}
