//! A node as a script describes it, and the InferenceNode that its agent would report.

use std::collections::BTreeMap;

use jiff::Timestamp;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    ENGINE_OPTIONS, InferenceNode, InferenceNodeSpec, InferenceNodeStatus, NodeDisk, NodeMemory, names,
};
use russet_plan::quantity;

use super::script::label;
use super::words::{LineError, Words};

/// Memory that agents reserve for the machine's user, or a quarter of the memory if that is less.
const RESERVE: u64 = 32 << 30;

/// A node of a script.
#[derive(Clone, Debug)]
pub struct SimMachine {
    /// Its name.
    pub name: String,
    /// Its chip, as the system names it.
    pub chip: String,
    /// Physical memory, bytes.
    pub memory: u64,
    /// Bytes that models may take.
    pub limit: u64,
    /// Build of its engine.
    pub build: String,
    /// Backends of its engine.
    pub backends: Vec<String>,
    /// Whether RDMA is enabled on it.
    pub rdma: bool,
    /// Whether its agent has measured its memory.
    pub measured: bool,
    /// Bytes of disk that models may take, if measured.
    pub disk: Option<u64>,
    /// Further labels.
    pub labels: BTreeMap<String, String>,
}

impl SimMachine {
    /// Parses the text after `node`.
    pub fn read(words: &mut Words) -> Result<Self, LineError> {
        let name = words.plain("the name of a node")?;
        let chip = words.text("the chip")?;
        let text = words.plain("the memory, such as 512Gi,")?;
        let memory = super::words::quantity(&text, "the memory")?;
        let mut fields = words.fields()?;
        let limit = fields.quantity("limit")?.unwrap_or(memory - (memory / 4).min(RESERVE));
        let switch = [("on", true), ("off", false)];
        let mut labels: BTreeMap<String, String> = [
            (names::LABEL_MEMORY.to_owned(), quantity::write(memory)),
            (names::LABEL_CHIP.to_owned(), chip.trim_start_matches("Apple ").replace(' ', "-")),
        ]
        .into();
        let machine = Self {
            name,
            chip,
            memory,
            limit,
            build: fields.take("build").unwrap_or("1".to_owned()),
            backends: fields.list("backends").unwrap_or(vec!["ring".to_owned(), "jaccl".to_owned()]),
            rdma: fields.one_of("rdma", &switch)?.unwrap_or(true),
            measured: fields.one_of("measured", &[("yes", true), ("no", false)])?.unwrap_or(true),
            disk: fields.quantity("disk")?,
            labels: BTreeMap::new(),
        };
        labels.extend(fields.rest().into_iter().map(|(key, value)| (label(&key), value)));
        Ok(Self { labels, ..machine })
    }

    /// The object on the server.
    pub fn object(&self, now: Timestamp) -> InferenceNode {
        let Self { name, chip, memory, limit, build, backends, rdma: _, measured, disk, labels } = self;
        let mut node = InferenceNode::new(name, InferenceNodeSpec::default());
        node.metadata.labels = Some(labels.clone());
        let memory = NodeMemory {
            total_bytes: *memory,
            serving_limit_bytes: *limit,
            serving_limit: quantity::write(*limit),
            ..NodeMemory::default()
        };
        let mut status = InferenceNodeStatus {
            chip: Some(chip.clone()),
            memory: measured.then_some(memory),
            backends: backends.clone(),
            sharding_modes: ["Single", "Pipeline", "Tensor", "Hybrid"].map(str::to_owned).to_vec(),
            engine_options: ENGINE_OPTIONS.iter().map(|option| (*option).to_owned()).collect(),
            engine_build: Some(build.clone()),
            disk: disk.map(|bytes| NodeDisk { models_limit_bytes: Some(bytes), ..NodeDisk::default() }),
            ..InferenceNodeStatus::default()
        };
        for (kind, holds) in [(Type::Reachable, true), (Type::Ready, *measured)] {
            conditions::set(&mut status.conditions, kind, holds, Reason::Settled, "", None, now);
        }
        node.status = Some(status);
        node
    }
}
