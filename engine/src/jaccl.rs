//! RDMA devices for MLX's jaccl backend: which device connects which tensor ranks of a stage. Not here: the
//! choice of devices, which the planner makes. Written after MLX's source and recorded hostfiles, and never
//! run: jaccl exists on macOS with Thunderbolt 5 alone.

use russet_wire::engine_config::Backend;
use thiserror::Error;

/// Maximum members of a mesh: jaccl's own limit.
const MAX_MESH_MEMBERS: usize = 8;
/// Maximum cables between two neighbours of a ring: jaccl's own limit.
const MAX_RING_CABLES: usize = 4;

/// Device names by row and column, which are the tensor rank and its peer; an empty cell is no cable, several
/// names are several cables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices(pub Vec<Vec<Vec<String>>>);

/// Cable topology of the tensor ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// Full mesh.
    Mesh,
    /// Ring: each rank with the previous and the next one.
    Ring,
}

/// Devices that jaccl cannot use.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DevicesError {
    /// Not one row and one column for each tensor rank.
    #[error(
        "rdmaDevices has {rows} rows, the widest or narrowest of {columns} cells, but the stage has {members} members; give a row and a cell for each"
    )]
    Size {
        /// Rows given.
        rows: usize,
        /// Cells of the first row with a wrong width, or of the first row.
        columns: usize,
        /// Tensor ranks of the stage.
        members: usize,
    },
    /// Too many for a mesh.
    #[error(
        "jaccl connects at most {MAX_MESH_MEMBERS} members in a mesh, but the stage has {0}; cable a ring and use jaccl-ring, or use smaller stages"
    )]
    Members(usize),
    /// Tensor ranks without the cables they need.
    #[error("rdmaDevices names {found} devices from member {from} to member {to}, but {needed}")]
    Cables {
        /// Row.
        from: usize,
        /// Column.
        to: usize,
        /// Devices in the cell.
        found: usize,
        /// Required cables.
        needed: String,
    },
}

/// MLX's error of a queue pair that could not be connected, with what to do about its errno; other texts stay as
/// they are.
pub fn with_remedy(error: String) -> String {
    let lower = error.to_ascii_lowercase();
    let errno = lower.rsplit_once("errno").and_then(|(_, rest)| {
        let digits: String =
            rest.trim_start_matches([' ', ':', '=']).chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    });
    let remedy = match errno.filter(|_| lower.contains("rtr") || lower.contains("queue pair")) {
        // EINVAL: no entry of the device's GID table belongs to the port's address.
        Some(22) => {
            "the RDMA device does not know its port's IPv4 address: take the address off the port and give it one again, or plug the cable in again"
        }
        // EBUSY: the device still has the queue pairs of an engine that was killed.
        Some(16) => {
            "the RDMA device is still in use: end other programs that use RDMA on this machine, and restart the machine if none is left"
        }
        _ => return error,
    };
    format!("{error}; {remedy}")
}

impl Topology {
    /// The cables that a backend needs between the tensor ranks; `None` without RDMA.
    pub fn of(backend: Backend) -> Option<Self> {
        match backend {
            // A configuration with an unknown backend is refused.
            Backend::None | Backend::Ring | Backend::Unknown => None,
            Backend::Jaccl => Some(Self::Mesh),
            Backend::JacclRing => Some(Self::Ring),
        }
    }
}

impl Devices {
    /// Checks that `members` tensor ranks can connect over these devices.
    pub fn check(&self, topology: Topology, members: usize) -> Result<(), DevicesError> {
        let rows = self.0.len();
        let columns = self.0.iter().map(Vec::len).find(|&cells| cells != members).unwrap_or(members);
        if rows != members || columns != members {
            return Err(DevicesError::Size { rows, columns, members });
        }
        if topology == Topology::Mesh && members > MAX_MESH_MEMBERS {
            return Err(DevicesError::Members(members));
        }
        let wires = self
            .0
            .iter()
            .enumerate()
            .flat_map(|(from, row)| row.iter().enumerate().map(move |(to, cell)| (from, to, cell.len())));
        // Every neighbour pair of a ring has as many cables as the first one.
        let first = self.0.first().map_or(0, |row| row[1 % members].len());
        for (from, to, found) in wires {
            let neighbours = (from + 1) % members == to || (to + 1) % members == from;
            let needed = match topology {
                _ if from == to => (found > 0).then(|| "a member needs none to itself".to_owned()),
                Topology::Mesh => (found == 0).then(|| "a mesh needs one between any two".to_owned()),
                Topology::Ring if neighbours => (found != first || found == 0 || found > MAX_RING_CABLES)
                    .then(|| {
                        format!("a ring needs as many between all neighbours, from 1 to {MAX_RING_CABLES}")
                    }),
                Topology::Ring => None,
            };
            if let Some(needed) = needed {
                return Err(DevicesError::Cables { from, to, found, needed });
            }
        }
        Ok(())
    }

    /// Contents of the file that `MLX_IBV_DEVICES` names: a cell is null, a name, or a list of names.
    pub fn devices_file(&self) -> String {
        let cell = |names: &Vec<String>| match names.as_slice() {
            [] => serde_json::Value::Null,
            [name] => serde_json::json!(name),
            names => serde_json::json!(names),
        };
        let rows: Vec<Vec<serde_json::Value>> =
            self.0.iter().map(|row| row.iter().map(cell).collect()).collect();
        serde_json::json!(rows).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Cells as in recorded files: null, a name, or a list of names.
    fn devices(matrix: &Value) -> Devices {
        let cell = |cell: &Value| match cell {
            Value::Null => Vec::new(),
            Value::String(name) => vec![name.clone()],
            names => serde_json::from_value(names.clone()).unwrap(),
        };
        let row = |row: &Value| row.as_array().unwrap().iter().map(cell).collect();
        Devices(matrix.as_array().unwrap().iter().map(row).collect())
    }

    /// A full mesh of `members`, with device names numbered as on a real machine.
    fn mesh(members: usize) -> Devices {
        let cell = |from: usize, to: usize| if from == to { vec![] } else { vec![format!("rdma_en{to}")] };
        Devices((0..members).map(|from| (0..members).map(|to| cell(from, to)).collect()).collect())
    }

    #[test]
    fn errno_of_a_queue_pair_comes_with_its_remedy() {
        for (error, words) in [
            (
                "[jaccl] Changing queue pair to RTR failed with errno 22",
                Some("does not know its port's IPv4 address"),
            ),
            ("[jaccl] Changing queue pair to RTR failed with errno: 16", Some("still in use")),
            ("[jaccl] Changing queue pair to RTR failed with errno 110", None),
            ("[ring] bind failed, errno 22", None),
            ("no errno at all of a queue pair", None),
        ] {
            let message = with_remedy(error.to_owned());
            assert!(message.starts_with(error), "{message}");
            match words {
                Some(words) => assert!(message.contains(words), "{message}"),
                None => assert_eq!(message, error),
            }
        }
    }

    #[test]
    fn the_file_is_what_mlx_reads() {
        let two = devices(&json!([[[], ["rdma_en4"]], [["rdma_en4"], []]]));
        assert_eq!(two.devices_file(), r#"[[null,"rdma_en4"],["rdma_en4",null]]"#);
        assert_eq!(two.check(Topology::Mesh, 2), Ok(()));
        assert_eq!(two.check(Topology::Ring, 2), Ok(()));
        let wires = devices(&json!([[[], ["rdma_en3", "rdma_en4"]], [["rdma_en3", "rdma_en4"], []]]));
        assert_eq!(
            wires.devices_file(),
            r#"[[null,["rdma_en3","rdma_en4"]],[["rdma_en3","rdma_en4"],null]]"#
        );
        assert_eq!(wires.check(Topology::Ring, 2), Ok(()));
        assert_eq!(
            mesh(3).devices_file(),
            r#"[[null,"rdma_en1","rdma_en2"],["rdma_en0",null,"rdma_en2"],["rdma_en0","rdma_en1",null]]"#
        );
    }

    #[test]
    fn devices_that_cannot_connect_the_members_say_why() {
        let mut holed = mesh(4);
        holed.0[2][3].clear();
        let mut uneven = mesh(3);
        uneven.0[1][2].push("rdma_en9".into());
        let mut line = mesh(4);
        line.0[0][2].clear();
        line.0[2][0].clear();
        assert_eq!(line.check(Topology::Ring, 4), Ok(()));
        for (devices, topology, members, said) in [
            (mesh(2), Topology::Mesh, 3, "has 2 rows"),
            (Devices(vec![vec![vec![]], vec![vec![], vec![]]]), Topology::Mesh, 2, "of 1 cells"),
            (Devices::default(), Topology::Ring, 2, "has 0 rows"),
            (mesh(9), Topology::Mesh, 9, "at most 8 members in a mesh, but the stage has 9"),
            (holed.clone(), Topology::Mesh, 4, "names 0 devices from member 2 to member 3"),
            (holed, Topology::Ring, 4, "names 0 devices from member 2 to member 3"),
            (uneven, Topology::Ring, 3, "names 2 devices from member 1 to member 2"),
            (line, Topology::Mesh, 4, "a mesh needs one between any two"),
        ] {
            let error = devices.check(topology, members).unwrap_err().to_string();
            assert!(error.contains(said), "{said}: {error}");
        }
    }

    /// Files of real clusters, if this machine has the collection.
    #[test]
    fn recorded_device_matrices_are_written_unchanged() {
        let Some(folder) = std::env::var_os("RUSSET_RECORDED").map(std::path::PathBuf::from) else {
            eprintln!("not run: RUSSET_RECORDED names no folder of recorded files");
            return;
        };
        let read = |name: &str| -> Value {
            let text = std::fs::read_to_string(folder.join(name)).unwrap();
            serde_json::from_str(&text).unwrap()
        };
        let hostfile = |name: &str| -> Value {
            read(name).as_array().unwrap().iter().map(|host| host["rdma"].clone()).collect()
        };
        for (matrix, members) in [
            (hostfile("hostfile-jaccl-2-node.json"), 2),
            (hostfile("hostfile-jaccl-4-node-mesh.json"), 4),
            (hostfile("hostfile-jaccl-4-node-m3-ultra-mlx-docs.json"), 4),
            (read("jaccl-devices-matrix-3-node-readme.json"), 3),
            (read("jaccl-devices-matrix-3-node-pipeline.json"), 3),
        ] {
            let devices = devices(&matrix);
            assert_eq!(devices.check(Topology::Mesh, members), Ok(()), "{matrix}");
            assert_eq!(serde_json::from_str::<Value>(&devices.devices_file()).unwrap(), matrix);
        }
        assert_eq!(devices(&hostfile("hostfile-jaccl-1-node.json")).devices_file(), "[[null]]");
    }
}
