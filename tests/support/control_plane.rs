//! The control plane of a cluster under test. `RUSSET_CONTROL_PLANE` selects it: `embedded` (the default:
//! `russet up`), `etcd` (the same with its objects in etcd) or `kubernetes` (the real API server with both
//! charts). Scenarios are the same for all; the differences are here.

pub mod embedded;
pub mod etcd;
pub mod kubernetes;
mod pod;

use std::path::PathBuf;

use anyhow::{Result, bail};

use self::embedded::Embedded;
use self::etcd::EtcdControlPlane;
use self::kubernetes::KubernetesControlPlane;

/// A process of the control plane or of the near machine, by its role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneProcess {
    /// The API server and the operator, in one process or two.
    Serve,
    /// The gateway.
    Gateway,
    /// The near machine's agent.
    Agent,
}

/// Which control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneKind {
    /// The embedded API server over its own store.
    Embedded,
    /// The embedded API server over etcd.
    Etcd,
    /// kube-apiserver, its controller manager, etcd; operator and gateway from the chart.
    Kubernetes,
}

impl PlaneKind {
    /// The kind selected by the environment.
    pub fn from_environment() -> Result<Self> {
        Ok(match std::env::var("RUSSET_CONTROL_PLANE").as_deref() {
            Err(_) | Ok("" | "embedded") => Self::Embedded,
            Ok("etcd") => Self::Etcd,
            Ok("kubernetes") => Self::Kubernetes,
            Ok(other) => {
                bail!("RUSSET_CONTROL_PLANE is {other}; there is embedded, etcd and kubernetes")
            }
        })
    }
}

/// A running control plane.
pub enum ControlPlane {
    /// `russet up`.
    Embedded(Box<Embedded>),
    /// `russet up` and another server.
    Etcd(Box<EtcdControlPlane>),
    /// The real one.
    Kubernetes(Box<KubernetesControlPlane>),
}

impl ControlPlane {
    /// Kubeconfig of an administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        match self {
            Self::Embedded(plane) => plane.kubeconfig(),
            Self::Etcd(plane) => plane.up().map(Embedded::kubeconfig).unwrap_or_default(),
            Self::Kubernetes(plane) => plane.kubeconfig(),
        }
    }

    /// Process ids of the role; an error while one of them does not run.
    pub fn pids(&self, role: PlaneProcess) -> Result<Vec<i32>> {
        match self {
            Self::Embedded(plane) => Ok(vec![plane.pid(role)?]),
            Self::Etcd(plane) => Ok(vec![plane.up()?.pid(role)?]),
            Self::Kubernetes(plane) => plane.pids(role),
        }
    }

    /// Metrics addresses of the control plane's processes, each with a metric that must exist.
    pub fn metrics(&self) -> Result<Vec<(String, &'static str)>> {
        match self {
            Self::Embedded(plane) => Ok(vec![(plane.metrics()?, "apiserver_request_total")]),
            Self::Etcd(plane) => Ok(vec![(plane.up()?.metrics()?, "apiserver_request_total")]),
            Self::Kubernetes(plane) => Ok(vec![(plane.metrics(), "russet_operator_reconciles_total")]),
        }
    }

    /// Arguments by which `russet token` finds the control plane.
    pub fn token_arguments(&self) -> Vec<String> {
        match self {
            Self::Embedded(plane) => vec!["--data-dir".into(), plane.data_dir().display().to_string()],
            Self::Etcd(plane) => match plane.up() {
                Ok(up) => vec!["--data-dir".into(), up.data_dir().display().to_string()],
                Err(_) => Vec::new(),
            },
            Self::Kubernetes(plane) => vec!["--kubeconfig".into(), plane.kubeconfig().display().to_string()],
        }
    }

    /// Stops it; the near machine's agent and its engines first.
    pub async fn stop(self) -> Result<()> {
        match self {
            Self::Embedded(plane) => plane.stop().await,
            Self::Etcd(plane) => plane.stop().await,
            Self::Kubernetes(plane) => plane.stop().await,
        }
    }
}
