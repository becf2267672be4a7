//! An etcd for tests: one member or several on loopback, optionally with TLS, killed and restarted on demand.
//! Nothing outlives the test: each member ends when the pipe that its keeper reads is closed.

use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
};

/// The variable that names the program.
pub const PROGRAM: &str = "RUSSET_ETCD";

/// Runs etcd until its input closes, then kills it: the end of the test is the end of the pipe.
const WRAPPER_SCRIPT: &str = r#""$@" </dev/null & member=$!; cat >/dev/null; kill -9 $member; wait"#;

/// Members of one etcd.
pub struct Etcd {
    members: Vec<EtcdMember>,
    /// TLS files for a client.
    pub tls: Option<Tls>,
    folder: tempfile::TempDir,
}

/// Files of a CA and of a client certificate.
#[derive(Clone)]
pub struct Tls {
    /// The CA's certificate.
    pub ca: PathBuf,
    /// The certificate of a client, and of every member.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

struct EtcdMember {
    name: String,
    client: String,
    peer: String,
    running: Option<Child>,
}

/// The etcd that [`PROGRAM`] names.
pub fn program() -> Option<PathBuf> {
    std::env::var_os(PROGRAM).filter(|path| !path.is_empty()).map(PathBuf::from)
}

impl Etcd {
    /// Starts `count` members; they respond soon after.
    pub fn start(count: usize, tls: bool) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("russet-etcd-").tempdir()?;
        let tls = if tls { Some(Tls::make(folder.path())?) } else { None };
        let scheme = if tls.is_some() { "https" } else { "http" };
        let members = free_ports(2 * count)?
            .chunks(2)
            .enumerate()
            .map(|(index, ports)| EtcdMember {
                name: format!("m{index}"),
                client: format!("{scheme}://127.0.0.1:{}", ports[0]),
                peer: format!("{scheme}://127.0.0.1:{}", ports[1]),
                running: None,
            })
            .collect();
        let mut etcd = Self { members, tls, folder };
        for at in 0..count {
            etcd.restart(at)?;
        }
        Ok(etcd)
    }

    /// URLs of all members.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|member| member.client.clone()).collect()
    }

    /// Folder of the members' data.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Kill -9 of a member.
    pub fn kill(&mut self, at: usize) -> io::Result<()> {
        if let Some(mut keeper) = self.members[at].running.take() {
            drop(keeper.stdin.take());
            keeper.wait()?;
        }
        Ok(())
    }

    /// Restarts a killed member with its data.
    pub fn restart(&mut self, at: usize) -> io::Result<()> {
        let cluster: Vec<String> =
            self.members.iter().map(|member| format!("{}={}", member.name, member.peer)).collect();
        let member = &self.members[at];
        let program = program().ok_or_else(|| io::Error::other(format!("{PROGRAM} names no etcd")))?;
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.folder.path().join(format!("{}.log", member.name)))?;
        let mut command = Command::new("sh");
        command
            .args(["-c", WRAPPER_SCRIPT, "sh"])
            .arg(program)
            .args(["--name", &member.name])
            .arg("--data-dir")
            .arg(self.folder.path().join(&member.name))
            .args(["--listen-client-urls", &member.client, "--advertise-client-urls", &member.client])
            .args(["--listen-peer-urls", &member.peer, "--initial-advertise-peer-urls", &member.peer])
            .args(["--initial-cluster", &cluster.join(","), "--initial-cluster-state", "new"])
            // A killed process loses nothing that it handed to the system; only a power failure would.
            .args(["--unsafe-no-fsync", "--log-level", "warn"]);
        if let Some(tls) = &self.tls {
            for (flag, file) in [
                ("--cert-file", &tls.cert),
                ("--key-file", &tls.key),
                ("--trusted-ca-file", &tls.ca),
                ("--peer-cert-file", &tls.cert),
                ("--peer-key-file", &tls.key),
                ("--peer-trusted-ca-file", &tls.ca),
            ] {
                command.arg(flag).arg(file);
            }
            command.args(["--client-cert-auth", "--peer-client-cert-auth"]);
        }
        let keeper = command.stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log).spawn()?;
        self.members[at].running = Some(keeper);
        Ok(())
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for at in 0..self.members.len() {
            let _ = self.kill(at);
        }
    }
}

impl Tls {
    /// A new CA and its certificates, in `folder`.
    pub fn make(folder: &Path) -> io::Result<Self> {
        let made = || -> Result<[String; 3], rcgen::Error> {
            let mut authority = CertificateParams::default();
            authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            authority.distinguished_name.push(DnType::CommonName, "etcd-ca");
            let key = KeyPair::generate()?;
            let ca = authority.self_signed(&key)?.pem();
            let issuer = Issuer::new(authority, key);
            let mut params = CertificateParams::new(vec!["localhost".to_owned()])?;
            params.subject_alt_names.push(SanType::IpAddress([127, 0, 0, 1].into()));
            params.distinguished_name.push(DnType::CommonName, "etcd");
            params.extended_key_usages =
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
            let key = KeyPair::generate()?;
            Ok([ca, params.signed_by(&key, &issuer)?.pem(), key.serialize_pem()])
        };
        let [ca, cert, key] = made().map_err(io::Error::other)?;
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).map(|()| path)
        };
        Ok(Self { ca: write("ca.crt", &ca)?, cert: write("etcd.crt", &cert)?, key: write("etcd.key", &key)? })
    }
}

/// Different ports that were free a moment ago.
fn free_ports(count: usize) -> io::Result<Vec<u16>> {
    let held: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<io::Result<_>>()?;
    held.iter().map(|listener| Ok(listener.local_addr()?.port())).collect()
}
